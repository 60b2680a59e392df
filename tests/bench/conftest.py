"""Options of the benchmark suite: which method, on which device."""
from pathlib import Path

import pytest
import torch

from tools import judge, timing, worker

ROOT = Path(__file__).resolve().parents[2]


def pytest_addoption(parser):
    group = parser.getgroup("glconv")
    group.addoption("--bench-method", default="main", help="folder with solver.py, or the name of one under methods/")
    group.addoption("--bench-device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    group.addoption("--bench-repeats", type=int, default=0, help="timed calls; by default 20 on a GPU, 60 on a CPU")


@pytest.fixture(scope="session")
def device(pytestconfig):
    device = torch.device(judge.find_device(pytestconfig.getoption("--bench-device")))
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


@pytest.fixture(scope="session")
def repeats(pytestconfig, device):
    return pytestconfig.getoption("--bench-repeats") or (20 if device.type == "cuda" else 60)


@pytest.fixture(scope="session")
def method(pytestconfig):
    """The method's module: `solve`, and for the cases of single paths the package beside it."""
    folder = judge.find_method(pytestconfig.getoption("--bench-method"))
    return worker.load_file("benched", folder / "solver.py")


@pytest.fixture(scope="session")
def eager():
    return worker.frozen_eager()


@pytest.fixture(scope="session")
def flush(device):
    """Makes the caches cold."""
    if device.type == "cuda":
        return timing.L2Flush(device)
    buffer = torch.empty(1 << 26, dtype=torch.uint8)
    return lambda: buffer.fill_(0)
