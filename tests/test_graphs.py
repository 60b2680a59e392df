"""The ladder: its loader, and all 53 versions against float64 on a CPU (FP32 transforms, the kernels' CPU
implementations); the Triton kernels through the interpreter. On a GPU tests/gpu runs all 53 in their own precision."""
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from glconv import SolverConfig
from glconv.compiled import missing_toolchain
from glconv.reference import oracle, row_errors
from glconv.spectral.pairs import Packing

import graphs
from graphs import ops

CPU = torch.device("cpu")
VERSIONS = {version.name: version for version in graphs.ladder()}
needs_compiler = pytest.mark.skipif(missing_toolchain(CPU) is not None, reason="needs a C++ compiler")


def inputs(batch, streams, heads, length):
    torch.manual_seed(length + batch)
    x, in_gate, out_gate = (torch.randn(batch, streams, heads, length).half() for _ in range(3))
    return x, in_gate, out_gate, torch.randn(streams, heads, length) / length**0.5


def check(version, solver, *shape):
    tensors = inputs(*shape)
    before = [t.clone() for t in tensors]
    y = solver(*tensors)
    assert (y.shape, y.dtype, y.is_contiguous()) == (tensors[0].shape, torch.float16, True), (version.name, shape)
    assert row_errors(y, oracle(*tensors)).max() < 2e-3, (version.name, shape)
    assert all(torch.equal(t, copy) for t, copy in zip(tensors, before)), f"{version.name} changed an input"


def test_there_are_53_versions_with_their_published_figures():
    assert list(VERSIONS) == [f"v{number:02}" for number in range(1, 54)] == list(graphs.published())
    assert float(graphs.published()["v40"]["published_speedup"]) == 3.5726


def test_every_config_states_its_idea_and_its_graph_settings():
    for name in VERSIONS:
        text = (graphs.LADDER / f"{name}.yaml").read_text()
        assert text.startswith("# "), name
        assert all(f"\n{key}: " in text for key in ("recipe", "dynamic", "recompile_limit")), name


def test_no_two_versions_are_the_same():
    """v39 and v40 differ in a limit alone, the others in more."""
    seen = {}
    for name, version in VERSIONS.items():
        key = (version.recipe, version.parameters, version.config)
        assert key not in seen, (name, seen.get(key))
        seen[key] = name


@pytest.mark.parametrize("name", VERSIONS)
def test_right_for_odd_single_and_awkward_shapes(name):
    """Every branch of every version, uncompiled: pairs, odd and single rows, no power of two, one position, long."""
    version = VERSIONS[name]
    solver = graphs.Solver(version, CPU)
    solver.compiles = False
    for shape in ((4, 2, 3, 16), (2, 1, 2, 1), (2, 1, 1, 8), (3, 1, 2, 32), (1, 2, 1, 64), (4, 1, 2, 15), (5, 1, 1, 9),
                  (2, 1, 1, 8192), (3, 1, 1, 100)):
        check(version, solver, *shape)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", VERSIONS)
def test_right_under_its_own_graph_settings(name):
    """Compiled by Inductor with the version's mode, options, dynamic and limits, without a graph break."""
    version = VERSIONS[name]
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        check(version, version.solver(CPU), 4, 1, 2, 16)
    assert torch._dynamo.utils.counters["graph_break"] == {}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


BAD = {
    "no recipe": ({"mode": "default"}, ValueError, "want a mapping with recipe: one of real_fft, overlap_add"),
    "unknown recipe": ({"recipe": "magic"}, ValueError, "unknown recipe 'magic'; known recipes: real_fft, overlap_add"),
    "unknown key": ({"recipe": "real_fft", "modes": "x"}, ValueError,
                    "unknown key 'modes'; known keys: recipe, parameters, graph"),
    "unknown parameter": ({"recipe": "local_product", "parameters": {"tiles": 1}}, ValueError,
                          "unknown parameter 'tiles' of local_product; known parameters: in_place, order, tile, warps"),
    "no parameters known": ({"recipe": "overlap_add", "parameters": {"tile": 1}}, ValueError, "known parameters: none"),
    "wrong type": ({"recipe": "local_product", "parameters": {"tile": "wide"}}, TypeError,
                   "tile is 'wide', a str; want a int"),
    "truth for a number": ({"recipe": "packed_pairs", "parameters": {"stages": True}}, TypeError,
                           "stages is True, a bool; want a int"),
    "wrong choice": ({"recipe": "packed_pairs", "parameters": {"odd": "drop"}}, ValueError,
                     "odd is 'drop'; want one of real, pad"),
    "wrong layout": ({"recipe": "packed_pairs", "parameters": {"layout": "rows"}}, ValueError,
                     "layout is 'rows'; want one of 'planes'"),
    "parameters are a list": ({"recipe": "real_fft", "parameters": ["tile"]}, TypeError, "want a mapping"),
    "a graph beside the recipe": ({"recipe": "real_fft", "graph": "fused"}, ValueError,
                                  "graph is 'fused' beside a recipe"),
    "a config's own error": ({"recipe": "real_fft", "mode": "fast"}, ValueError, "mode is 'fast'; want one of default"),
}


@pytest.mark.parametrize("name", BAD)
def test_loader_names_the_key_and_what_is_allowed(name):
    content, error, text = BAD[name]
    with pytest.raises(error, match=re.escape(text)):
        graphs.from_mapping("v99", content)


def test_loader_names_the_file(tmp_path):
    path = tmp_path / "v54.yaml"
    path.write_text("recipe: [")
    with pytest.raises(ValueError, match=r"v54.yaml: not valid YAML"):
        graphs.load(path)
    path.write_text("recipe: magic")
    with pytest.raises(ValueError, match=r"v54.yaml: unknown recipe"):
        graphs.load(path)


def test_an_engineer_writes_v54(tmp_path):
    path = tmp_path / "v54.yaml"
    path.write_text("# Mine.\nrecipe: packed_pairs\nparameters:\n  tile_pairs: 2\n  layout: word\ncompile: false\n")
    version = graphs.load(path)
    assert version.config == SolverConfig(compile=False)
    assert dict(version.parameters)["packing"].tile_pairs == 2
    check(version, version.solver(CPU), 4, 1, 2, 16)


OP_CALLS = {
    "multiply_spectra": lambda: (torch.randn(3, 2, 9) + 1j, torch.randn(2, 9) + 1j, False, 64, 4),
    "multiplied_spectra_of": lambda: (torch.randn(2, 3, 8), torch.randn(2, 9) + 1j, True, 64, 4),
    "gate_pairs": lambda: (torch.randn(4, 2, 8).half(), torch.randn(4, 2, 8).half(), torch.float32),
    "unpack_pairs": lambda: (torch.randn(2, 3, 16, 2), torch.randn(3, 3, 8).half(), 0.5),
}


def test_every_operator_is_tested_here():
    names = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    assert {name for space, name in names if space == "glconv_graphs"} == set(OP_CALLS)
    assert ops.LIBRARY.ns == "glconv_graphs"


@pytest.mark.parametrize("name", OP_CALLS)
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.glconv_graphs, name).default, OP_CALLS[name]())


def compiled_for(kernel, pointers, constants, capability, warps, stages):
    """A Triton kernel compiled for a card that need not be here."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {"scale": "fp32", "factor": "fp32"} | dict.fromkeys(pointers, "*fp16")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    return triton.compile(ASTSource(kernel, signature, values, aligned), target=GPUTarget("cuda", capability, 32),
                          options={"num_warps": warps, "num_stages": stages})


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
def test_every_packing_of_the_ladder_compiles_for_other_cards():
    """sm_80 to sm_90; shared memory within what every one of them has for a block."""
    pytest.importorskip("triton")
    from glconv.spectral.kernels import pair_kernel

    packings = {dict(version.parameters).get("packing", Packing()) for version in VERSIONS.values()
                if version.recipe == "packed_pairs" and dict(version.parameters).get("product") != "torch"}
    assert len(packings) > 10
    for packing in packings:
        constants = {
            "STATIC_CHANNELS": 768 * packing.static_sizes, "STATIC_LENGTH": 2048 * packing.static_sizes,
            "TILE_PAIRS": packing.tile_pairs, "TILE_BINS": packing.tile_bins, "EMIT": packing.emit,
            "NYQUIST": packing.nyquist, "LAYOUT": packing.layout, "SCALE_KERNEL": packing.scale_at == "kernel",
            "SIGNAL": packing.signal_policy, "KERNEL": packing.kernel_policy}
        for capability in (86, 90):
            binary = compiled_for(pair_kernel, ("spectra", "kernel", "packed"), constants, capability, packing.warps,
                                  packing.stages)
            assert binary.metadata.shared <= 99 << 10, packing


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize(("name", "pointers", "constants"), [
    ("multiply_kernel", ("u", "k", "product"), {"CHANNEL_MAJOR": True, "TILE": 1024}),
    ("multiply_kernel", ("u", "k", "product"), {"CHANNEL_MAJOR": False, "TILE": 1024}),
    ("gate_kernel", ("x", "in_gate", "packed"), {"TILE": 1024}),
    ("unpack_kernel", ("packed", "out_gate", "y"), {"TILE": 1024})])
def test_single_step_kernels_compile_for_other_cards(name, pointers, constants):
    pytest.importorskip("triton")
    from graphs import kernels

    assert compiled_for(getattr(kernels, name), pointers, constants, 86, 4, 3).metadata.shared <= 99 << 10


def test_triton_kernels_through_the_interpreter():
    tests = Path(__file__).parent
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                          str(tests / "interpreted" / "test_graph_kernels.py")],
                         cwd=tests.parent, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
