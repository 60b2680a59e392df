"""python -m tools roofline: every case on every path of the device, against the copy's time; a table and a picture."""
import json
from pathlib import Path

import pytest
from commands import run_tools

from tools import roofline

ROOT = Path(__file__).resolve().parent.parent


def test_cases_on_a_cpu(tmp_path):
    done = run_tools("roofline", "--device", "cpu", "--cases", "1x256,2x64", "--channels", 8, "--repeats", 3, "--json",
                     tmp_path / "r.json", "--plot", tmp_path / "r.png", COLUMNS="200")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    for case, moved in zip(report["cases"], (8 * 256 * (8 + 4), 8 * 64 * (16 + 4))):
        assert case["floor_ms"] * report["copy_bytes_per_s"] == pytest.approx(1e3 * moved)
        for name, taken in case["paths"].items():
            assert taken["share"] == case["floor_ms"] / taken["gpu"]
            assert taken["speedup"] == case["paths"]["eager"]["gpu"] / taken["gpu"]
            assert 0 < taken["error"] < 1e-3, name
        assert set(case["paths"]) == {"eager", "right-angle"}
    assert "2x64" in done.stdout
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_path_lists_the_known():
    done = run_tools("roofline", "--device", "cpu", "--paths", "fastest", COLUMNS="200")
    assert done.returncode == 2
    assert "unknown path fastest; known: spectral, right-angle, portable, hopper" in done.stderr


def test_panels_go_over_batch_and_over_length():
    cases = [{"batch": batch, "length": length} for batch, length in ((4, 8), (1, 8), (2, 16), (1, 16), (9, 4), (2, 8))]
    (batches, over_batch), (_, over_length) = roofline.panels(cases)
    assert batches == "batch, at length 8"
    assert [tick for tick, _ in over_batch] == ["1", "2", "4"]
    assert [tick for tick, _ in over_length] == ["4\n(9)", "8\n(4)", "16\n(2)"]
