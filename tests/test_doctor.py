"""python -m tools doctor and sealed: what they report, and the exit status that scripts go by."""
import json
from pathlib import Path

import pytest
import torch
import typer
from commands import run_tools
from glconv import reference

from tools import bench, doctor, judge, sealed

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


def test_report_of_a_cpu_without_a_compiler():
    done = run_tools("doctor", "--cpu", "--json", "-", CXX="no-such-compiler", GLCONV_CONFIG="")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["torch"] == torch.__version__
    assert report["environment"]["CXX"] == "no-such-compiler"
    assert "no C++ compiler (no-such-compiler) is on the PATH" in report["devices"]["cpu"]["compiler"]
    paths = report["devices"]["cpu"]["paths"]
    assert {name: path["status"] for name, path in paths.items()} == dict.fromkeys(
        ("auto", "spectral", "right-angle", "eager"), "right")
    assert paths["auto"]["path"] == "right-angle"
    assert all(path["error"] < 1e-3 for path in paths.values())
    assert report["problems"] == []
    assert "no CUDA" in report or torch.cuda.is_available()


def uncompiled(monkeypatch):
    """The paths without their compilation, which takes seconds."""
    for name in ("auto", "spectral", "right-angle"):
        fields, kinds = doctor.PATHS[name]
        monkeypatch.setitem(doctor.PATHS, name, (fields | {"compile": False}, kinds))


def test_wrong_path_and_failing_path_are_told_and_fail(monkeypatch, capsys, forgetful):
    uncompiled(monkeypatch)
    wrong = reference.eager
    monkeypatch.setattr(reference, "eager", lambda *tensors: wrong(*tensors) * 1.01)
    monkeypatch.setattr("glconv.spectral.right_angle.convolve", lambda *tensors: 1 / 0)
    report = doctor.examine([CPU])
    paths = report["devices"]["cpu"]["paths"]
    assert paths["eager"]["status"] == "wrong"
    assert paths["right-angle"]["status"] == "failed"
    assert paths["spectral"]["status"] == "right"
    assert {problem.split(":")[0] for problem in report["problems"]} == {
        "eager on cpu wrong", "right-angle on cpu failed", "auto on cpu failed"}
    doctor.show(report)
    said = capsys.readouterr().out
    assert "ZeroDivisionError: division by zero" in said
    assert "gives the right answer" not in said


def test_path_that_is_not_for_a_device_is_told_apart(monkeypatch):
    assert doctor.try_path("hopper", CPU) == {"status": "not here", "reason": "runs on a CUDA device"}


def test_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    assert doctor.unwritable(tmp_path / "new" / "folder") is None
    assert doctor.unwritable(tmp_path / "file" / "cache") == f"{tmp_path / 'file'} is no folder"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    report = {"caches": doctor.cache_folders(), "devices": {}}
    assert doctor.problems(report) == [f"the Triton cache cannot be written: {tmp_path / 'file'} is no folder"]


def test_exit_status(monkeypatch, capsys):
    for problems, status in (([], 0), (["eager on cpu wrong: x"], 1)):
        report = {"environment": {}, "caches": {}, "devices": {}, "problems": problems}
        monkeypatch.setattr(doctor, "examine", lambda devices, report=report: report)
        with pytest.raises(typer.Exit) as ended:
            doctor.command(json_file=None, cpu=True)
        assert ended.value.exit_code == status


def test_sealed_cases_are_judged_and_recorded(tmp_path):
    done = run_tools("sealed", "--seed", 5, "--count", 2, "--repeats", 3, "--device", "cpu", "--json",
               tmp_path / "record.json", "--method", ROOT / "tests" / "methods" / "honest")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["seed"], record["cases"], record["right"], record["wrong"]) == (5, 2, 2, [])
    assert record["geometric_mean"]["call"] > 0
    assert record["worst_row"] < 1e-3
    assert "seed 5: 2 of 2 right; geometric mean over eager: call " in done.stdout


def test_wrong_sealed_case_fails():
    done = run_tools("sealed", "--seed", 5, "--count", 1, "--repeats", 3, "--device", "cpu", "--method",
               ROOT / "tests" / "methods" / "wrong_answer")
    assert done.returncode == 1
    assert "WRONG " in done.stdout
    assert "seed 5: 0 of 1 right" in done.stdout


def test_a_seed_is_drawn_where_none_is_given(monkeypatch):
    seeds = set()

    def draw(seed, count, small):
        seeds.add(seed)
        raise judge.Unusable("enough")

    monkeypatch.setattr(sealed.families, "sealed", draw)
    for _ in range(2):
        with pytest.raises(typer.Exit):
            sealed.command(seed=None, count=3, method="main", device="cpu", repeats=3, time_limit=1, store=False,
                           json_file=None)
    assert len(seeds) == 2


def test_baseline_names():
    assert bench.file_name("NVIDIA H200") == "nvidia-h200.json"
    assert bench.file_name("CPU Intel(R) Xeon(R) @ 2.20GHz") == "cpu-intel-r-xeon-r-2-20ghz.json"
