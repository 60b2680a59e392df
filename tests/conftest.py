"""What every test shares: tests marked gpu are skipped where there is no CUDA device; hypothesis repeats itself."""
import sys

import pytest
import torch
from hypothesis import settings

# The same problems every time, so a failure belongs to the change at hand; `--hypothesis-profile=long` goes looking.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=100, database=None)
settings.register_profile("long", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


def forget():
    """Drops every route, graph and plan that the package keeps in this process."""
    import glconv
    from glconv.spectral import graph, right_angle

    glconv._routes.clear()
    glconv._last = glconv._NOTHING
    kept = [glconv._dataflow, glconv.operator_call, graph.compiled, right_angle.build]
    if "glconv.fused.launch" in sys.modules:
        from glconv.fused import launch

        kept += [launch.plan_for, launch.launcher]
    for cache in kept:
        cache.cache_clear()


@pytest.fixture
def forgetful():
    """A test that begins without anything kept, and leaves nothing behind."""
    forget()
    yield
    forget()


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
