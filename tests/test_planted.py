"""Checks that fail when they should: faults planted in a copy of the tree, each with the check that must find it.

On a GPU tests/gpu/planted.py does the same for kernels: a barrier taken out, a plan too large, a slowdown of 6 %.
"""
import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import commands
import pytest

from tools import bench

run_tools = functools.partial(commands.run_tools, limit=280)

ROOT = Path(__file__).resolve().parent.parent
METHODS = ROOT / "tests" / "methods"


def planted(tmp_path, file, old, new):
    """A copy of the tree with every `old` (a regular expression that must be there) in one file made `new`."""
    for name in ("methods", "tests", "tools", "graphs", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    text, count = re.subn(old, new, (tmp_path / file).read_text())
    assert count
    (tmp_path / file).write_text(text)
    return tmp_path


def failing_tests(tree, *nodes, **variables):
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *nodes], cwd=tree,
                         env=os.environ | {"OMP_NUM_THREADS": "1"} | variables, capture_output=True, text=True,
                         timeout=250)
    return run.returncode, run.stdout + run.stderr


TOLERANCES = {      # whose -> file, old, new, the check that must find it, and what that says
    "of a drawn problem": ("tests/fuzzing.py", r"= 1\.25, most: float = 6\.0", "= 2.5, most: float = 12.0",
                           "tests/test_fuzz.py::test_wrong_results_are_refused", "'scaled'"),
    "of the judge": ("tools/worker.py", r"L2_LIMIT = 2.5e-3\nROW_LIMIT = 4e-3", "L2_LIMIT = 5e-3\nROW_LIMIT = 8e-3",
                     "tests/test_faults.py::test_the_judge_refuses_a_little_too_much_noise", "DID NOT RAISE"),
}


@pytest.mark.parametrize("which", TOLERANCES)
def test_loosened_tolerance(tmp_path, which):
    file, old, new, check, text = TOLERANCES[which]
    status, said = failing_tests(planted(tmp_path, file, old, new), check)
    assert status == 1, said
    assert text in said


KERNEL_FAULTS = {       # what -> old, new, the file of checks that must find it, and what that says
    "reads and writes one past a row": (r"offsets < row", "offsets <= row", "test_edges.py", "Segmentation fault"),
    "offsets of 32 bits": (r"\.to\(tl\.int64\)", ".to(tl.int32)", "test_offsets.py", "test_row_beyond_31_bits"),
    "a twiddle the wrong way round": (r"(?s)(def twiddle.*?)-2 \* math\.pi", r"\1 2 * math.pi", "test_fuzz_kernel.py",
                                      "of the L2 limit"),
}


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_faulty_kernel(tmp_path, fault):
    pytest.importorskip("triton")
    old, new, checks, text = KERNEL_FAULTS[fault]
    file = "dft.py" if "twiddle" in fault else "fused/portable.py"
    tree = planted(tmp_path, f"methods/main/glconv/{file}", old, new)
    status, said = failing_tests(tree, f"tests/interpreted/{checks}", TRITON_INTERPRET="1")
    assert status in (1, -11), said     # a test failed, or the process ended
    assert text in said


def test_plan_that_asks_for_too_much_shared_memory():
    resources = pytest.importorskip("tools.resources")
    from glconv.plan import CARDS, table

    card = CARDS[8, 6]
    row = max((row for row in table(card.capability) if row.blocks == 1), key=lambda row: row.size)
    assert resources.measure(row, card, True).problems == []
    found = " ".join(resources.measure(dataclasses.replace(row, stages=9), card, True).problems)
    assert "bytes of shared memory, the card gives 101376" in found


WITHOUT_BARRIER = """
import sys
sys.path[:0] = [{root!r}, {package!r}, {gpu!r}]
import plant
from glconv.plan import CARDS, table
from tools import resources
row = next(row for row in table((8, 6)) if (row.n1, row.n2, row.blocks) == (64, 32, 1))

def count():
    kernel = resources.compile_portable(row, 86)
    code = resources.dump(kernel.asm["cubin"], "--dump-sass")
    return len(plant.BARRIER.findall(kernel.asm["ptx"])), code.count("BAR.SYNC")

before = count()
plant.install("barrier:1")
after = count()
print(*before, *after)
try:
    plant.without_barrier("", 0)
except ValueError as error:
    print(error)
""".format(root=str(ROOT), package=str(ROOT / "methods" / "main"), gpu=str(ROOT / "tests" / "gpu"))


def test_barrier_is_taken_out():
    """As tests/gpu/planted.py does it: the assembly text keeps its barriers, the machine code has one less."""
    pytest.importorskip("triton")
    run = subprocess.run([sys.executable, "-c", WITHOUT_BARRIER], capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    counts, refusal = run.stdout.splitlines()
    text, code, text_after, code_after = map(int, counts.split())
    assert text_after == text > 10
    assert code_after == code - 1
    assert refusal == "barrier 0 of 0"


def test_misspelt_key(tmp_path):
    """Every command that takes a config refuses it before anything runs."""
    config = tmp_path / "misspelt.yaml"
    config.write_text("kernle: portable\n")
    run = run_tools("judge", "--config", config)
    assert run.returncode == 2
    assert "unknown config key 'kernle'; known keys: graph, kernel," in run.stdout


def recorded(speedups):
    """A saved run of the suite with these speed-ups."""
    return {"format": 1, "device": "A card", "date": "2026-01-01T00:00:00+00:00", "versions": {"torch": "2"},
            "cases": {name: {"speedup": {"gpu": value, "call": value}, "ms": {"gpu": 1.0, "call": 1.0}, "wall_ms": 1.0,
                             "spread": 0.01, "error": 7e-4, "path": "hopper"} for name, value in speedups.items()}}


@pytest.mark.parametrize(("ratio", "status"), [(1.2, 0), (1.0, 0), (0.951, 0), (0.949, 1)])
def test_slowdown_of_five_per_cent(tmp_path, ratio, status):
    (tmp_path / "a-card.json").write_text(json.dumps(recorded({"one": 10.0, "two": 8.0})))
    (tmp_path / "now.json").write_text(json.dumps(recorded({"one": 10.0, "two": 8.0 * ratio, "three": 1.0})))
    run = run_tools("bench", "--compare", "--from", tmp_path / "now.json", "--baselines", tmp_path)
    assert run.returncode == status, run.stdout + run.stderr
    assert "three: not in the baseline" in run.stdout
    assert ("slower by more than 5% of the speed-up over eager: two" in run.stdout) == bool(status)
    assert ("SLOWER" in run.stdout) == bool(status)


def test_a_device_without_a_baseline_says_so(tmp_path):
    (tmp_path / "now.json").write_text(json.dumps(recorded({"one": 10.0})))
    arguments = ("bench", "--from", tmp_path / "now.json", "--baselines", tmp_path / "stored")
    run = run_tools(*arguments, "--compare")
    assert run.returncode == 2
    assert "no baseline for A card in " in run.stdout
    assert "`make bench-store` stores this device's" in run.stdout
    assert run_tools(*arguments, "--store").returncode == 0
    assert run_tools(*arguments, "--compare").returncode == 0


def test_a_slower_method_is_seen(tmp_path):
    """Measured, not only compared: the same method twice as slow against a baseline of its own. The first one fails
    where the environment's secrets reach it."""
    options = ("--device", "cpu", "--cases", "auto-b16-l512", "--baselines", tmp_path, "--repeats", 9)
    run = run_tools("bench", "--method", METHODS / "honest", "--store", *options, SOME_TOKEN="secret")
    assert run.returncode == 0, run.stdout + run.stderr
    stored, = tmp_path.glob("*.json")
    assert stored.name == bench.file_name(bench.device_model("cpu"))
    run = run_tools("bench", "--method", METHODS / "twice_as_slow", "--compare", *options)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "slower by more than 5% of the speed-up over eager: auto-b16-l512" in run.stdout


def test_a_wrong_method_is_not_measured():
    run = run_tools("bench", "--method", METHODS / "wrong_answer", "--device", "cpu", "--cases", "auto-b16-l512")
    assert run.returncode == 1
    assert "gives a wrong answer" in run.stdout


def test_a_copy_of_the_package_is_measured_itself(tmp_path):
    """Not the tree's own: a copy that gives nothing is wrong."""
    shutil.copytree(ROOT / "methods" / "main", tmp_path / "main", ignore=shutil.ignore_patterns("__pycache__"))
    entry = tmp_path / "main" / "glconv" / "__init__.py"
    with entry.open("a") as text:
        text.write("\n\ndef gated_causal_conv(x, in_gate, out_gate, k, config=None):\n    return x\n")
    run = run_tools("bench", "--method", tmp_path / "main", "--device", "cpu", "--cases", "auto-b16-l512")
    assert run.returncode == 1, run.stdout + run.stderr
    assert "returns memory" in run.stdout


def fuzz(tree, *arguments):
    return subprocess.run([sys.executable, str(tree / "tests" / "gpu" / "fuzz.py"), "--device", "cpu", *arguments],
                          cwd=tree, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                          timeout=200)


def test_a_long_run_prints_what_repeats_a_failure(tmp_path):
    tree = planted(tmp_path, "methods/main/glconv/dft.py", r"\(2 \* length\)", "(2.001 * length)")
    run = fuzz(tree, "--minutes", "0.05", "--jobs", "1", "--elements", "4000", "--json", str(tmp_path / "found.json"))
    assert run.returncode == 1, run.stdout + run.stderr
    line = re.search(r"python3 tests/gpu/fuzz\.py --path (\w+) --draw '([^']+)'", run.stdout)
    assert line
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failed"][0]["draw"] == line[2]
    again = fuzz(tree, "--path", line[1], "--draw", line[2])
    assert again.returncode == 1
    assert again.stdout.startswith("WRONG on path right-angle: row ")
    assert fuzz(ROOT, "--path", line[1], "--draw", line[2]).stdout.startswith("right on path right-angle: row ")
