"""python -m tools ladder: selection, one process a version, resuming, failures that stop nobody, table and plot."""
import json

import pytest
from typer.testing import CliRunner

from tools import ladder

GOOD = "# A good one.\nrecipe: real_fft\ncompile: false\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A ladder of three uncompiled versions, one of which cannot be loaded."""
    (tmp_path / "v01.yaml").write_text(GOOD)
    (tmp_path / "v02.yaml").write_text("# A bad one.\nrecipe: no_such\n")
    (tmp_path / "v54.yaml").write_text("# Mine.\nrecipe: packed_pairs\ncompile: false\n")
    monkeypatch.setattr(ladder, "LADDER", tmp_path)
    # Results are kept by the versions' files alone here: the sources may be edited while the tests run.
    monkeypatch.setattr(ladder, "fingerprint", lambda name: ladder.file_of(name).read_text())
    return tmp_path


def run(folder, *arguments):
    import typer

    app = typer.Typer()
    app.command()(ladder.command)
    return CliRunner().invoke(app, ["--device", "cpu", "--length", "64", "--channels", "4", "--repeats", "2", "--json",
                                    str(folder / "out.json"), *arguments])


def test_select():
    names = ["v01", "v02", "v10", "v11", "fused"]
    assert ladder.select(names, "v02-v10, fused") == ["v02", "v10", "fused"]
    assert ladder.select(names, "fused,v11,v01") == ["v01", "v11", "fused"]
    with pytest.raises(ValueError, match="no version is called 'v99'; known: v01, v02"):
        ladder.select(names, "v01,v99")


def test_one_failing_version_does_not_stop_the_rest(folder):
    finished = run(folder, "--only", "v01,v02,v54", "--plot", str(folder / "plot.png"))
    assert finished.exit_code == 1
    assert "FAILED v02" in finished.output
    assert "unknown recipe 'no_such'" in finished.output
    rows = json.loads((folder / "out.json").read_text())["rows"]
    assert {name: row["status"] for name, row in rows.items()} == {"v01": "right", "v02": "failed", "v54": "right"}
    measured = rows["v54"]["batches"]["4"]
    assert rows["v54"]["change"] == "Mine."
    assert 0 < measured["l2"] < 1e-3
    assert measured["eager"]["call_ms"] > 0
    assert ladder.speedup(rows["v54"]) == pytest.approx(measured["eager"]["call_ms"] / measured["method"]["call_ms"])
    assert (folder / "plot.png").stat().st_size > 10_000

    # The same command again runs what failed and nothing that is right, and --fresh all of it.
    before = rows["v01"]
    (folder / "v02.yaml").write_text(GOOD)
    finished = run(folder, "--only", "v01,v02,v54")
    assert finished.exit_code == 0, finished.output
    rows = json.loads((folder / "out.json").read_text())["rows"]
    assert rows["v02"]["status"] == "right"
    assert rows["v01"] == before

    finished = run(folder, "--only", "v01", "--batches", "2")
    assert finished.exit_code == 2
    assert "holds a run with other settings" in finished.output


def test_fingerprint_follows_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "LADDER", tmp_path)
    monkeypatch.setattr(ladder, "ROOT", tmp_path)
    source = tmp_path / "graphs" / "real.py"
    source.parent.mkdir()
    marks = set()
    for code, text in (("a", GOOD), ("b", GOOD), ("b", GOOD + "recompile_limit: 3\n")):
        source.write_text(code)
        (tmp_path / "v01.yaml").write_text(text)
        marks.add(ladder.fingerprint("v01"))
    assert len(marks) == 3


def test_a_version_that_hangs_is_ended(folder):
    finished = run(folder, "--only", "v01", "--time-limit", "0.1")
    assert finished.exit_code == 1
    assert "FAILED v01: ran past the time limit of 0.1 s" in finished.output


def test_list_and_unknown_versions(folder):
    listed = run(folder, "--list")
    assert listed.exit_code == 0
    assert "v54" in listed.output
    assert "Mine." in listed.output
    refused = run(folder, "--only", "v03")
    assert refused.exit_code == 2
    assert "no version is called 'v03'; known: v01, v02, v54, spectral, fused" in refused.output


def measured(speedup):
    times = {"eager": {"call_ms": speedup, "gpu_ms": speedup}, "method": {"call_ms": 1.0, "gpu_ms": 1.0}}
    return {"status": "right", "batches": {"64": times}}


def test_summary_names_order_and_distance():
    rows = {name: measured(value) | {"published": str(mark)} for name, value, mark in (
        ("v02", 2.0, 1.95), ("v03", 1.5, 2.47), ("v05", 3.0, 2.85), ("v15", 3.5, 2.98), ("v39", 4.0, 3.57))}
    rows["v40"] = measured(3.6) | {"published": "3.57"}
    order, distance = ladder.summarise(rows)
    assert "published: v02 < v03 < v05 < v15 < v39; measured on this device: v03 < v02 < v05 < v15 < v39" in order
    assert distance == "v40 reaches 90% of v39, the best of v31 to v53 measured here"
    rows["v39"]["status"] = "wrong"
    assert ladder.summarise(rows) == []
