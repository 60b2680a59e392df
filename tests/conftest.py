"""What every test shares: tests marked gpu are skipped where there is no CUDA device; hypothesis repeats itself."""
import pytest
import torch
from hypothesis import settings

# The same problems every time, so a failure belongs to the change at hand; `--hypothesis-profile=long` goes looking.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=100, database=None)
settings.register_profile("long", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
