"""SolverConfig and the YAML files over it: every refusal with its text, every file loads and solves."""
import re
from pathlib import Path

import pytest
import torch
from glconv import SolverConfig, gated_causal_conv, reference
from glconv.config import DEFAULTS, active_config

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "configs").glob("*.yaml"))
KEYS = "graph, kernel, compile, mode, options, dynamic, recompile_limit, transform_dtype"

REFUSED = {
    "unknown key": ({"grpah": "fused"}, ValueError, f"unknown config key 'grpah'; known keys: {KEYS}"),
    "key that is no text": ({1: 2}, ValueError, f"unknown config key 1; known keys: {KEYS}"),
    "graph": ({"graph": "fft"}, ValueError,
              "graph is 'fft'; want one of auto, fused, spectral, right-angle, eager"),
    "kernel": ({"kernel": "ampere"}, ValueError, "kernel is 'ampere'; want one of auto, portable, hopper"),
    "mode": ({"mode": "fast"}, ValueError,
             "mode is 'fast'; want one of default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs"),
    "transform_dtype": ({"transform_dtype": "bfloat16"}, ValueError,
                        "transform_dtype is 'bfloat16'; want one of auto, float16, float32"),
    "graph of wrong type": ({"graph": None}, TypeError,
                            "graph is None, of type NoneType; want one of auto, fused, spectral, right-angle, eager"),
    "compile as text": ({"compile": "false"}, TypeError, "compile is 'false', of type str; want bool"),
    "dynamic as number": ({"dynamic": 1}, TypeError, "dynamic is 1, of type int; want bool"),
    "limit as truth": ({"recompile_limit": True}, TypeError, "recompile_limit is True, of type bool; want int"),
    "limit as fraction": ({"recompile_limit": 8.5}, TypeError, "recompile_limit is 8.5, of type float; want int"),
    "limit below one": ({"recompile_limit": 0}, ValueError, "recompile_limit is 0; want at least 1"),
    "options as a list": ({"options": ["combo_kernels"]}, TypeError,
                          "options is ['combo_kernels'], of type list; want a mapping of Inductor option to value"),
    "options with a list in it": ({"options": {"combo_kernels": [1]}}, TypeError,
                                  "options has combo_kernels: [1], of type list; want bool, int, float or str"),
    "options and a mode": ({"options": {"combo_kernels": True}, "mode": "max-autotune"}, ValueError,
                           "options and mode: max-autotune exclude each other in torch.compile; want mode: default "
                           "with options, or no options"),
    "mode uncompiled": ({"compile": False, "mode": "max-autotune"}, ValueError,
                        "mode is set with compile: false; want compile: true, or no mode"),
    "dynamic uncompiled": ({"compile": False, "dynamic": True}, ValueError,
                           "dynamic is set with compile: false; want compile: true, or no dynamic"),
    "mode of the fused kernel": ({"graph": "fused", "mode": "max-autotune"}, ValueError,
                                 "mode is set with graph: fused, which is not compiled; want graph: auto, spectral, "
                                 "right-angle"),
    "kernel of the spectral graph": ({"graph": "spectral", "kernel": "hopper"}, ValueError,
                                     "kernel: hopper is set with graph: spectral; want graph: auto, fused"),
    "float16 right-angle transforms": ({"graph": "right-angle", "transform_dtype": "float16"}, ValueError,
                                       "transform_dtype: float16 is set with graph: right-angle; want graph: auto, "
                                       "spectral"),
    "no mapping": (["graph"], TypeError, f"a config is of type list; want a mapping of {KEYS}"),
}


@pytest.mark.parametrize(("mapping", "kind", "text"), REFUSED.values(), ids=REFUSED)
def test_refused(mapping, kind, text):
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        SolverConfig.from_mapping(mapping)


def test_unknown_inductor_option_names_near_ones():
    with pytest.raises(ValueError, match=r"^options has 'combo_kernel', unknown to this Inductor; nearest known: .*"
                                         r"\bcombo_kernels\b"):
        SolverConfig(options={"combo_kernel": True})


def test_defaults_can_be_hashed_and_compared():
    one, other = (SolverConfig(graph="spectral", options={"combo_kernels": True}) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one.options == (("combo_kernels", True),)
    assert SolverConfig.from_mapping({}) == SolverConfig()


def test_default_file_states_every_default():
    import yaml

    path = ROOT / "configs" / "default.yaml"
    assert SolverConfig.from_yaml(path) == SolverConfig()
    assert list(yaml.safe_load(path.read_text())) == list(DEFAULTS)


def test_empty_file_gives_the_defaults(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert SolverConfig.from_yaml(path) == SolverConfig()


def test_file_is_named_in_its_errors(tmp_path):
    path = tmp_path / "misspelt.yaml"
    path.write_text("grpah: fused\n")
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: unknown config key 'grpah'; known keys: {KEYS}$"):
        SolverConfig.from_yaml(path)
    path.write_text("graph: [\n")
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: not valid YAML: "):
        SolverConfig.from_yaml(path)


def test_yaml_makes_no_objects(tmp_path):
    path = tmp_path / "object.yaml"
    path.write_text("graph: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(ValueError, match="not valid YAML"):
        SolverConfig.from_yaml(path)


def test_environment_names_a_file(monkeypatch):
    active_config.cache_clear()
    monkeypatch.setenv("GLCONV_CONFIG", str(ROOT / "configs" / "eager-graph.yaml"))
    try:
        assert active_config() == SolverConfig(graph="spectral", compile=False)
    finally:
        active_config.cache_clear()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_loads_and_solves(path):
    config = SolverConfig.from_yaml(path)
    torch.manual_seed(0)
    x, in_gate, out_gate = (torch.randn(3, 2, 2, 64).half() for _ in range(3))
    k = torch.randn(2, 2, 64)
    y = gated_causal_conv(x, in_gate, out_gate, k, config)
    exact = reference.oracle(x, in_gate, out_gate, k)
    assert reference.row_errors(y, exact).max() < 1e-3
