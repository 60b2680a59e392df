"""What goes wrong around a solver, as far as it can without a GPU: memory next to what is forbidden, offsets past 2^31,
missing compilers, caches that cannot be written, cards without a kernel. tests/gpu/test_gpu_faults.py has the rest."""
import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path

import fuzzing
import glconv
import pytest
import torch
from glconv import SolverConfig, gated_causal_conv
from glconv.plan import CARDS
from glconv.spectral import right_angle

from tools import cases, worker

TESTS = Path(__file__).parent
ROOT = TESTS.parent
CPU = torch.device("cpu")


@pytest.mark.parametrize("file", ["test_edges.py", "test_offsets.py"])
def test_fused_kernel_interpreted(file):
    """In a process of its own: the interpreter must be chosen before Triton is imported, and a fault ends it."""
    pytest.importorskip("triton")
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                          str(TESTS / "interpreted" / file)], cwd=ROOT, capture_output=True, text=True, timeout=280,
                         env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout


SOLVE = """
import sys, torch
sys.path[:0] = [{tests!r}, {package!r}]
import fuzzing, glconv
tensors = fuzzing.inputs(fuzzing.Draw(2, 1, 3, 96, "normal", "sigmoid", "uniform", "white", 1.0, 1.0, 1))
finding = fuzzing.examine(glconv.gated_causal_conv(*tensors), tensors, fuzzing.single(96))
print("right" if finding.right else finding)
""".format(tests=str(TESTS), package=str(ROOT / "methods" / "main"))


def solve(**variables):
    return subprocess.run([sys.executable, "-c", SOLVE], cwd=ROOT, env=os.environ | variables, capture_output=True,
                          text=True, timeout=120)


def test_without_a_compiler_it_runs_uncompiled_and_says_so():
    run = solve(CXX="no-such-compiler")
    assert run.stdout == "right\n", run.stderr
    assert "graphs run uncompiled on the CPU: no C++ compiler (no-such-compiler) is on the PATH" in run.stderr


def test_cache_of_graphs_that_cannot_be_written(tmp_path):
    """It works, or the error names the folder: never a hang, never a wrong result."""
    folder = tmp_path / "file" / "cache"
    folder.parent.write_text("no folder")
    run = solve(TORCHINDUCTOR_CACHE_DIR=str(folder))
    assert run.stdout == "right\n" or str(folder) in run.stderr, run.stderr[-2000:]
    assert (run.returncode == 0) == (run.stdout == "right\n")


COMPILE = """
import sys
sys.path[:0] = [{root!r}, {package!r}]
from glconv.plan import CARDS, table
from tools.resources import measure
row = min((row for row in table((8, 6)) if row.path == "portable"), key=lambda row: row.size)
print(measure(row, CARDS[8, 6], True).problems)
""".format(root=str(ROOT), package=str(ROOT / "methods" / "main"))


def test_cache_of_kernels_that_cannot_be_written(tmp_path):
    pytest.importorskip("triton")
    folder = tmp_path / "file" / "cache"
    folder.parent.write_text("no folder")
    run = subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, capture_output=True, text=True, timeout=120,
                         env=os.environ | {"TRITON_CACHE_DIR": str(folder)})
    assert run.stdout == "[]\n" or str(folder.parent) in run.stderr, run.stderr[-2000:]


@pytest.fixture
def old_card(monkeypatch):
    """A CUDA device by its description alone, of capability 7.5."""
    launch = pytest.importorskip("glconv.fused.launch")
    card = dataclasses.replace(CARDS[8, 6], name="Old", capability=(7, 5))
    monkeypatch.setattr(launch, "device_of", lambda device: card)
    launch.plan_for.cache_clear()
    yield glconv.Problem(3, 1, 5, 2048, torch.device("cuda", 0))
    launch.plan_for.cache_clear()


def test_card_without_a_kernel(old_card):
    route = glconv._route(old_card, SolverConfig())
    assert (route.path, route.reason) == ("spectral", "no fused kernel for capability 7.5")
    with pytest.raises(ValueError, match=r"^graph: fused has no kernel for .* capability 7\.5; want graph: auto$"):
        glconv._route(old_card, SolverConfig(graph="fused"))
    with pytest.raises(ValueError, match=r"^kernel: portable cannot run: no portable kernel for capability 7\.5$"):
        glconv._route(old_card, SolverConfig(kernel="portable"))


def draw(length, seed):
    problem = fuzzing.Draw(2, 1, 3, length, "normal", "sigmoid", "uniform", "decaying", 1.0, 1.0, seed)
    return fuzzing.inputs(problem)


def test_threads(forgetful):
    """Four threads, two problems, each thread its own inputs, first calls included."""
    config = SolverConfig(graph="right-angle", compile=False)
    inputs = [draw(100 + number % 2, number) for number in range(4)]
    results = [[] for _ in inputs]

    def work(number):
        results[number] += [gated_causal_conv(*inputs[number], config) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tensors, mine in zip(inputs, results):
        assert len(mine) == 20
        assert fuzzing.examine(mine[0], tensors, fuzzing.single(tensors[0].shape[-1])).right
        assert all(torch.equal(y, mine[0]) for y in mine)


def test_memory_that_is_short_raises_and_the_next_call_works():
    """The address space has room for the inputs and not for a result of 128 MiB."""
    code = SOLVE + """
import mmap, resource
config = glconv.SolverConfig(graph="right-angle", compile=False)
big = [torch.zeros(64, 1, 64, 16384, dtype=torch.float16)] * 3
k = torch.zeros(1, 64, 16384)
used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
try:
    glconv.gated_causal_conv(*big, k, config)
    print("no error")
except (RuntimeError, MemoryError) as error:
    print("raised", type(error).__name__)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
finding = fuzzing.examine(glconv.gated_causal_conv(*tensors, config), tensors, fuzzing.single(96))
print("right" if finding.right else finding)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120,
                         env=os.environ | {"CXX": "no-such-compiler", "OMP_NUM_THREADS": "1"})
    assert run.stdout.splitlines() == ["right", "raised RuntimeError", "right"], run.stdout + run.stderr[-2000:]


@pytest.mark.parametrize(("noise", "right"), [(2.2e-3, True), (2.9e-3, False)])
def test_the_judge_refuses_a_little_too_much_noise(noise, right):
    """Its limits have no room to be loosened unnoticed."""
    case = cases.Case(2, 1, 4, 2048, "uniform", "decaying", 1.0, seed=1)
    inputs = cases.make_inputs(case, 0, CPU)
    exact = right_angle.convolve(*inputs).float()
    torch.manual_seed(0)
    y = exact + noise * torch.randn_like(exact) * exact.square().mean(-1, keepdim=True).sqrt()
    examiner = worker.Examiner(type("Method", (), {"solve": None}), CPU, 0)
    if right:
        examiner.errors(y.half(), inputs)
    else:
        with pytest.raises(worker.Wrong, match="gives a wrong answer: relative L2 2"):
            examiner.errors(y.half(), inputs)
