"""What every test shares: tests marked gpu are skipped where there is no CUDA device."""
import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
