"""The judge against methods that are wrong in one way each, and its own parts."""
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tools import cases, report, table
from tools.judge import environment, find_cases, find_method

ROOT = Path(__file__).resolve().parent.parent
METHODS = ROOT / "tests" / "methods"
ONE_CASE = "b2-s1x192"


def run_judge(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "tools", "judge", "--device", "cpu", "--repeats", "3", *arguments],
                          cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=120)


CAUGHT = {
    "wrong_answer": "gives a wrong answer: relative L2 ",
    "fp32_output": "returns dtype torch.float32, want torch.float16",
    "mutating": "mutates its input x",
    "cached_answer": "gives the same answer for different inputs: a kept result",
    "cached_by_address": "for new values at old addresses gives a wrong answer: relative L2 ",
    "reused_buffer": "changes an earlier result by a later call: the memory of results is shared",
    "non_contiguous": "returns a non-contiguous tensor, strides [786432, 786432, 4096, 1]",
    "aliasing": "returns memory that belongs to the input out_gate",
    "unwritten": "gives ",      # NaN or a wrong answer: malloc decides whether it lands on the poison
    "raising": "raises RuntimeError: no kernel for this device",
    "crashing": "its process ended with signal SIGSEGV",
    "tampering": "replaces time.perf_counter",
    "too_slow": "ran past the time limit of 3 s",
}


@pytest.mark.parametrize(("method", "reason"), CAUGHT.items(), ids=CAUGHT)
def test_bad_method_is_caught(method, reason):
    limit = ("--time-limit", "3") if method == "too_slow" else ()
    run = run_judge("--method", str(METHODS / method), "--cases", ONE_CASE, *limit)
    assert f"WRONG b2-s1x192-l2048-uniform-decaying-1: {reason}" in run.stdout, run.stdout + run.stderr
    assert "score 0: 1 of 1 cases not right" in run.stdout
    assert run.returncode == 1


UNUSABLE = {
    "leaning": "the method cannot be loaded: ModuleNotFoundError: No module named 'glconv'",
    "without_solve": "the method cannot be loaded: AttributeError: module 'solver' has no attribute 'solve'",
    "absent": "no method at ",
}


@pytest.mark.parametrize(("method", "reason"), UNUSABLE.items(), ids=UNUSABLE)
def test_unusable_method_is_refused(method, reason):
    run = run_judge("--method", str(METHODS / method), "--cases", ONE_CASE)
    assert run.stdout.startswith(reason), run.stdout + run.stderr
    assert run.returncode == 2


def test_lost_process_is_replaced_once():
    run = run_judge("--method", str(METHODS / "crashing"), "--cases", "b2-")
    assert run.stdout.count("WRONG") == 2
    assert "NOT RUN b2-s12x16-l2048-normal-decaying-0.1: the method lost its process before" in run.stdout
    assert run.returncode == 1


def test_honest_method_gets_a_score_and_no_secret(tmp_path):
    json_file, picture = tmp_path / "out" / "report.json", tmp_path / "out" / "report.png"
    run = run_judge("--method", str(METHODS / "honest"), "--cases", "b1-,b2-s4*", "--json", str(json_file), "--plot",
                    str(picture), SOME_TOKEN="secret")
    assert run.returncode == 0, run.stdout + run.stderr
    written = json.loads(json_file.read_text(), parse_constant=pytest.fail)
    assert written["correct"]
    assert [row["status"] for row in written["cases"]] == ["right"] * 4
    assert all(row["l2"] < 1e-3 and row["worst_row"] < 1e-3 for row in written["cases"])
    speedups = [row["speedup"]["call"] for row in written["cases"]]
    assert written["score"] == pytest.approx(math.prod(speedups) ** 0.25)
    assert f"score {written['score']:.2f} times eager (geometric mean of 4 cases, whole calls)" in run.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.glob("out/*")) == [json_file, picture] or set(tmp_path.glob("out/*")) == {json_file, picture}


def test_misspelt_config_is_refused(tmp_path):
    config = tmp_path / "misspelt.yaml"
    config.write_text("grpah: fused\n")
    run = run_judge("--config", str(config))
    assert "unknown config key 'grpah'; known keys: graph, kernel," in run.stdout
    assert run.returncode == 2


def test_case_that_is_none_is_refused():
    run = run_judge("--cases", "b3-")
    assert run.stdout.startswith("no case matches 'b3-'; known: b1-s1x192")
    assert run.returncode == 2


def test_list_names_the_cases():
    run = run_judge("--list")
    assert run.stdout.split() == [case.name for case in cases.visible(small=True)]
    assert run.returncode == 0


def test_environment_is_an_allow_list(monkeypatch, tmp_path):
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    kept = environment(tmp_path / "config.yaml")
    assert "SOME_TOKEN" not in kept
    assert kept["CUDA_VISIBLE_DEVICES"] == "1"
    assert kept["GLCONV_CONFIG"] == str(tmp_path / "config.yaml")


def test_methods_go_by_name_too():
    assert find_method("eager") == ROOT / "methods" / "eager"
    assert find_method(str(METHODS / "honest")) == METHODS / "honest"


def test_visible_cases():
    visible = cases.visible()
    assert {case.batch for case in visible} == {1, 4, 16, 64}
    assert len({case.streams for case in visible}) >= 3
    assert all(case.streams * case.heads == 768 and case.length == 2048 for case in visible)
    assert len({case.name for case in visible}) == len(visible)


def test_sealed_cases_come_from_their_seed_alone():
    assert cases.sealed(7, 20) == cases.sealed(7, 20)
    assert cases.sealed(7, 20) != cases.sealed(8, 20)
    assert cases.sealed(7, 5) == cases.sealed(7, 20)[:5]
    drawn = cases.sealed(7, 200)
    assert all(case.streams * case.heads == 768 and case.length == 2048 for case in drawn)
    assert not {case.streams for case in drawn} & {case.streams for case in cases.visible()}
    assert {case.gates for case in drawn} == set(cases.SEALED_GATES)
    lengths = {case.length for case in cases.sealed(7, 200, lengths=True)}
    assert min(lengths) < 300
    assert max(lengths) > 12000
    assert any(length & (length - 1) for length in lengths)
    assert any(not length & (length - 1) for length in lengths)


@pytest.mark.parametrize("gates", cases.SEALED_GATES)
@pytest.mark.parametrize("kernel", cases.KERNELS)
def test_inputs_are_valid_and_never_twice_the_same(gates, kernel):
    from glconv import check

    case = cases.Case(3, 2, 4, 100, gates, kernel, 0.5, seed=1)
    first, again, other = (cases.make_inputs(case, call, torch.device("cpu")) for call in (0, 0, 1))
    assert check(*first).batch == 3
    assert all(torch.isfinite(tensor).all() for tensor in first)
    assert all(torch.equal(one, same) for one, same in zip(first, again))
    assert not any(torch.equal(one, another) for one, another in zip(first, other))
    assert torch.allclose(first[3].norm(dim=-1), torch.tensor(0.5))


def test_case_options_that_do_not_fit():
    with pytest.raises(ValueError, match="--lengths is for sealed cases"):
        find_cases("auto", None, 5, lengths=True, small=True)
    family, chosen = find_cases("auto", 3, 5, lengths=False, small=True)
    assert (family, len(chosen)) == ("sealed 3, 5 small cases", 5)


@pytest.mark.parametrize(("speedup", "expected"), [
    (0.5, 0), (1, 0), (1 + 7.08 / 2, 0.3), (8.08, 0.6), (8.08 + 13.28 / 2, 0.8), (21.36, 1), (100, 1)])
def test_reward(speedup, expected):
    assert report.reward(speedup) == pytest.approx(expected)


def test_one_wrong_case_makes_the_score_zero():
    case = cases.visible(small=True)[0]
    times = {name: {"call_ms": ms, "gpu_ms": ms, "host_ms": ms, "spread": 0.0} for name, ms in
             (("eager", 8.0), ("method", 2.0))}
    right = {"status": "right", "l2": 0.0, "worst_row": 0.0, **times}
    machine = {"device_type": "cpu", "copy_bytes_per_s": 1e9}
    both = report.make_report("m", None, "small", machine, [case, case], [right, right])
    assert (both["score"], both["correct"]) == (pytest.approx(4), True)
    assert both["reward"] == pytest.approx(report.reward(4))
    assert both["cases"][0]["roofline_share"] == pytest.approx(case.moved_bytes / 1e9 / 2e-3)
    one = report.make_report("m", None, "small", machine, [case, case], [right, {"status": "wrong", "reason": "x"}])
    assert (one["score"], one["reward"], one["correct"], one["wrong"]) == (0, 0, False, 1)


def test_report_of_a_gpu(tmp_path):
    """A device has columns that a CPU has not, in the table, the Markdown and the picture."""
    case = cases.visible()[-1]
    eager, method = ({"call_ms": call, "gpu_ms": gpu, "host_ms": host, "spread": 0.01} for call, gpu, host in
                     ((4.0, 3.75, 0.2), (0.5, 0.25, 0.011)))
    results = [{"status": "right", "path": "hopper", "l2": 7e-4, "worst_row": 8e-4, "peak_bytes": 192 << 20,
                "eager": eager, "method": method}, {"status": "wrong", "reason": "mutates its input x"}]
    machine = {"device_type": "cuda", "device": "A card", "torch": "2", "triton": "3", "copy_bytes_per_s": 4e12}
    made = report.make_report("main", "configs/x.yaml", "visible cases", machine, [case, case], results)
    console = Console(width=200, record=True, file=io.StringIO())
    report.print_report(made, console)
    text = console.export_text()
    row = next(line for line in text.splitlines() if "hopper" in line)
    assert row.split() == [case.name, "hopper", "4.000", "0.500", "8.00", "1%", "0.2500", "15.00", "11", "200",
                           "7.0e-04", "8.0e-04", f"{case.moved_bytes / 4e12 / 0.25e-3:.0%}", "192.0"]
    assert f"WRONG {case.name}: mutates its input x" in text
    lines = table.markdown(made).splitlines()
    assert "`main`, config `configs/x.yaml` on A card" in lines[0]
    assert lines[4].startswith(f"| {case.name} | hopper | 4.000 | 0.500 | 8.00 | 0.2500 | 15.00 | 11 | 7.0e-04 |")
    assert len({line.count("|") for line in lines[2:6]}) == 1
    report.plot(made, tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_table_is_put_between_its_marks():
    text = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    assert table.put_into(text, "new") == f"before\n{table.BEGIN}\nnew\n{table.END}\nafter\n"
    with pytest.raises(ValueError, match="no place for a table"):
        table.put_into("nothing", "new")
    assert table.put_into((ROOT / "README.md").read_text(), "new")


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "report.json"
    report.write_json({"value": math.nan, "values": (1.0, math.inf)}, path)
    assert json.loads(path.read_text()) == {"value": None, "values": [1.0, None]}
    with pytest.raises(TypeError):
        report.write_json({"value": object()}, path)
    assert json.loads(path.read_text()) == {"value": None, "values": [1.0, None]}
    assert list(tmp_path.iterdir()) == [path]
