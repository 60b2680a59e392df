"""python -m tools inspect: launches, fusions, bytes, and where gates and casts landed."""
import pytest
import torch
import typer
from glconv.compiled import missing_toolchain
from typer.testing import CliRunner

import graphs
from tools import inspect

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(missing_toolchain(CPU) is not None, reason="needs a C++ compiler")


def run(*arguments):
    app = typer.Typer()
    app.command()(inspect.command)
    return CliRunner().invoke(app, [*arguments, "--device", "cpu", "--length", "16", "--heads", "2"])


def test_launches_of_the_paired_graph():
    """Four rows of two channels of 16 positions: what each launch must move can be counted by hand."""
    x, in_gate, out_gate = (torch.randn(4, 1, 2, 16).half() for _ in range(3))
    call = inspect.compiled_from(graphs.LADDER / "v40.yaml", 16, CPU)
    with inspect.watched() as found:
        call(x, in_gate, out_gate, torch.randn(1, 2, 16))
    launches = [launch for launch in found[0] if launch.kind != "view"]
    assert len(found) == 1
    assert [launch.kind for launch in launches] == ["pointwise", "library", "pointwise", "library", "operator",
                                                    "library", "pointwise"]
    gate, _, of_k, _, pairs, inverse, last = launches
    rows, length, fp16, fp32 = 4 * 2, 16, 2, 4
    assert gate.reads == {"x": rows * length * fp16, "in_gate": rows * length * fp16}
    assert sum(gate.writes.values()) == rows * 2 * length * fp32
    assert of_k.reads == {"k": 2 * length * fp32}
    assert pairs.ops == ["pair_spectra"]
    assert sum(pairs.reads.values()) == (rows + 2) * (length + 1) * 2 * fp32
    assert inverse.ops == ["complex FFT"]
    assert last.reads["out_gate"] == rows * length * fp16
    assert sum(last.writes.values()) == rows * length * fp16
    assert "float32 -> float16" in last.casts
    assert gate.casts == ["float16 -> float32"]


def test_two_configs_side_by_side():
    shown = run("--config", "v40", "--config", "v04")
    assert shown.exit_code == 0, shown.output
    assert "in_gate: read by 1" in shown.output
    assert "out_gate: read by 7" in shown.output
    assert "v40: 7 launches (3 generated, 3 library, 1 operator), 4 views; moves" in shown.output
    assert "v04: 7 launches (4 generated, 3 library), 3 views; moves" in shown.output
    assert shown.output.count("times the floor of 0.001 MB") == 4


@pytest.mark.parametrize(("content", "text"), [
    ("compile: false", "compile: false, so Inductor makes nothing of it"),
    ("graph: fused", "graph: fused is not made by Inductor; want one of spectral, right-angle"),
    ("recipe: magic", "unknown recipe 'magic'"), ("grap: fused", "unknown config key 'grap'")])
def test_errors_name_file_and_key(tmp_path, content, text):
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    shown = run("--config", str(path))
    assert shown.exit_code == 2
    assert text in shown.output
    assert "mine.yaml" in shown.output
