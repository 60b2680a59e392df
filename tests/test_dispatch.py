"""The public entry: the right route, taken by a look-up after the first call, from every form the package comes in."""
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import glconv
import pytest
import torch
from glconv import Problem, SolverConfig, describe, gated_causal_conv, reference
from glconv.plan import CARDS
from torch._subclasses.fake_tensor import FakeTensorMode

ROOT = Path(__file__).resolve().parent.parent
EAGER, SPECTRAL = SolverConfig(graph="eager"), SolverConfig(graph="spectral", compile=False)
RIGHT_ANGLE = SolverConfig(graph="right-angle", compile=False)


def draw(batch=3, streams=2, heads=2, length=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, in_gate, out_gate = (torch.randn(batch, streams, heads, length, generator=generator).half() for _ in range(3))
    return x, in_gate, out_gate, torch.randn(streams, heads, length, generator=generator)


def assert_right(y, inputs, limit=1e-3):
    assert y.dtype == torch.float16
    assert y.is_contiguous()
    assert reference.row_errors(y, reference.oracle(*inputs)).max() < limit


@pytest.mark.parametrize(("config", "path"), [
    (SolverConfig(), "right-angle"), (SolverConfig(graph="fused"), "right-angle"), (RIGHT_ANGLE, "right-angle"),
    (SPECTRAL, "spectral"), (EAGER, "eager")])
def test_route_on_a_cpu(config, path):
    route = describe(*draw(), config)
    assert route.path == path
    assert route.reason.startswith(f"graph: {config.graph}")
    assert_right(route.call(*draw()), draw())


def test_route_of_an_empty_batch():
    assert describe(*draw(batch=0)).path == "empty"
    assert gated_causal_conv(*draw(batch=0)).shape == (0, 2, 2, 64)


def test_route_is_logged_once(caplog):
    inputs = draw(length=61)
    with caplog.at_level(logging.DEBUG, logger="glconv"):
        for _ in range(3):
            gated_causal_conv(*inputs, RIGHT_ANGLE)
    assert [record.getMessage() for record in caplog.records if "path" in record.getMessage()] == [
        "Problem(batch=3, streams=2, heads=2, length=61, device=device(type='cpu')): path right-angle, graph: "
        "right-angle"]


def test_second_call_is_a_look_up(monkeypatch):
    inputs = draw(length=63)
    first = gated_causal_conv(*inputs, RIGHT_ANGLE)
    monkeypatch.setattr(glconv, "check", lambda *tensors: pytest.fail("checked again"))
    monkeypatch.setattr(glconv, "_route", lambda *problem: pytest.fail("planned again"))
    assert torch.equal(gated_causal_conv(*inputs, RIGHT_ANGLE), first)
    other = draw(length=63, seed=1)
    assert_right(gated_causal_conv(*other, RIGHT_ANGLE), other)


def test_the_last_signature_answers_for_no_other(forgetful):
    """Whatever differs from the call before takes its own route, or is refused, as if there had been none before."""
    x, in_gate, out_gate, k = inputs = draw(length=59)
    eager = gated_causal_conv(*inputs, EAGER)
    for _ in range(2):
        assert torch.equal(gated_causal_conv(*inputs, EAGER), eager)
        for others in (draw(length=58), draw(batch=2, length=59), (x.view(3, 1, 4, 59), in_gate.view(3, 1, 4, 59),
                                                                   out_gate.view(3, 1, 4, 59), k.view(1, 4, 59))):
            assert not glconv._last.alike(*others)
            assert_right(gated_causal_conv(*others, EAGER), others)
            gated_causal_conv(*inputs, EAGER)
        assert_right(gated_causal_conv(x, x, x, k, EAGER), (x, x, x, k))
        with pytest.raises(TypeError, match="k has dtype torch.float64"):
            gated_causal_conv(x, in_gate, out_gate, k.double(), EAGER)
        with pytest.raises(ValueError, match="x is not contiguous"):
            gated_causal_conv(x.transpose(1, 2).contiguous().transpose(1, 2), in_gate, out_gate, k, EAGER)
        with pytest.raises(ValueError, match="out_gate requires a gradient"):
            gated_causal_conv(x, in_gate, out_gate.clone().requires_grad_(), k, EAGER)
        with pytest.raises(TypeError, match="in_gate is"):
            gated_causal_conv(x, None, out_gate, k, EAGER)
        with pytest.raises(TypeError, match="config is"):
            gated_causal_conv(*inputs, "eager")


NESTED = """
import sys, torch
sys.path.insert(0, {package!r})
from glconv import gated_causal_conv, SolverConfig
config = SolverConfig(graph="eager")
tensors = [torch.randn(2, 1, 2, 8).half() for _ in range(3)] + [torch.randn(1, 2, 8)]
for position in range(4):
    for _ in range(2):
        gated_causal_conv(*tensors, config)
    nested = torch.nested.nested_tensor([tensors[position][0]] * 2)
    try:
        gated_causal_conv(*tensors[:position], nested, *tensors[position + 1:], config)
    except (TypeError, ValueError) as error:
        print(error)
"""


def test_a_nested_tensor_after_a_dense_one(tmp_path):
    """In a process of its own: Dynamo's check of a nested tensor's strides would end it."""
    said = run_python(NESTED.format(package=str(ROOT / "methods" / "main")), tmp_path).splitlines()
    assert len(said) == 4
    assert all("nested" in line for line in said)


def test_a_signature_first_met_in_another_mode_is_remembered_in_this_one(forgetful):
    inputs = draw(length=57)
    with torch.inference_mode():
        gated_causal_conv(*inputs, EAGER)
    for _ in range(2):
        assert_right(gated_causal_conv(*inputs, EAGER), inputs)
    assert glconv._last.alike(*inputs)
    k = torch.nn.Parameter(inputs[3])
    with torch.no_grad():
        gated_causal_conv(*inputs[:3], k, EAGER)
        assert glconv._last.alike(*inputs[:3], k)
        gated_causal_conv(*inputs[:3], k, EAGER)
    assert not glconv._last.alike(*inputs[:3], k)
    with pytest.raises(ValueError, match="^k requires a gradient"):
        gated_causal_conv(*inputs[:3], k, EAGER)


def test_a_lazily_negated_view_is_refused(forgetful):
    """A kernel reads memory, where the sign is not."""
    x, in_gate, out_gate, k = inputs = draw(length=56)
    for _ in range(2):
        gated_causal_conv(*inputs, EAGER)
        with pytest.raises(ValueError, match=r"^k is a lazily negated view; want k.resolve_neg\(\)$"):
            gated_causal_conv(x, in_gate, out_gate, torch._neg_view(k), EAGER)


def test_a_layout_of_another_library_is_refused(forgetful):
    x, in_gate, out_gate, k = inputs = draw(length=55)
    for _ in range(2):
        gated_causal_conv(*inputs, EAGER)
        with pytest.raises((TypeError, ValueError), match="^k "):
            gated_causal_conv(x, in_gate, out_gate, k.to_mkldnn(), EAGER)


def test_symbolic_tracing():
    inputs = draw(length=54)
    traced = torch.fx.experimental.proxy_tensor.make_fx(
        lambda *tensors: gated_causal_conv(*tensors, RIGHT_ANGLE), tracing_mode="symbolic")(*inputs)
    assert_right(traced(*inputs), inputs)


def test_routes_are_bounded(monkeypatch):
    monkeypatch.setattr(glconv, "_routes", {})
    monkeypatch.setattr(glconv, "_ROUTES_KEPT", 8)
    for length in range(1, 30):
        inputs = draw(length=length)
        assert_right(gated_causal_conv(*inputs, RIGHT_ANGLE), inputs)
        assert len(glconv._routes) <= 8


@pytest.fixture
def card(monkeypatch):
    """A CUDA device by its description alone: plans are made for it, launchers only named."""
    launch = pytest.importorskip("glconv.fused.launch")
    monkeypatch.setattr(launch, "launcher", lambda problem, plan: f"launcher of {plan.path}")

    def present(capability):
        monkeypatch.setattr(launch, "device_of", lambda device: CARDS[capability])
        launch.plan_for.cache_clear()

    yield present
    launch.plan_for.cache_clear()


@pytest.mark.parametrize(("capability", "length", "config", "path"), [
    ((8, 6), 2048, SolverConfig(), "portable"), ((8, 6), 300, SolverConfig(graph="fused"), "portable"),
    ((9, 0), 2048, SolverConfig(kernel="portable"), "portable"), ((9, 0), 1 << 20, SolverConfig(), "spectral"),
    ((8, 0), 2048, SPECTRAL, "spectral"), ((8, 0), 2048, RIGHT_ANGLE, "right-angle"), ((8, 0), 2048, EAGER, "eager")])
def test_route_on_a_card(card, capability, length, config, path):
    card(capability)
    route = glconv._route(Problem(4, 2, 4, length, torch.device("cuda:0")), config)
    assert route.path == path
    assert (route.call == f"launcher of {path}") == (path in glconv.FUSED_PATHS)


def test_fused_without_a_kernel_is_an_error(card):
    card((9, 0))
    with pytest.raises(ValueError, match="^graph: fused has no kernel for .*length=1048576.*; want graph: auto$"):
        glconv._route(Problem(1, 1, 1, 1 << 20, torch.device("cuda:0")), SolverConfig(graph="fused"))


def test_operator_takes_the_same_route(card):
    card((8, 6))
    glconv.operator_call.cache_clear()
    assert glconv.operator_call(Problem(4, 2, 4, 2048, torch.device("cuda:0"))) == "launcher of portable"
    assert glconv.operator_call(Problem(0, 2, 4, 2048, torch.device("cuda:0")))(*draw(batch=0)).shape == (0, 2, 2, 64)
    glconv.operator_call.cache_clear()


def test_fake_tensors_take_no_route_of_real_ones():
    inputs = draw(length=62)
    gated_causal_conv(*inputs, RIGHT_ANGLE)
    with FakeTensorMode() as mode:
        y = gated_causal_conv(*map(mode.from_tensor, inputs), RIGHT_ANGLE)
    assert y.shape == inputs[0].shape
    assert isinstance(y, torch._subclasses.FakeTensor)


@pytest.mark.parametrize("config", [None, SPECTRAL, EAGER, RIGHT_ANGLE], ids=["auto", "spectral", "eager", "right"])
def test_within_a_compiled_model(config):
    """One graph without a break, whatever the config, pointwise work around it included."""
    inputs = draw()
    model = torch.compile(lambda x, in_gate, out_gate, k: gated_causal_conv(2 * x, in_gate, out_gate, k, config) + 1,
                          fullgraph=True)
    y = model(*inputs)
    doubled = (2 * inputs[0], *inputs[1:])
    exact = reference.oracle(*doubled) + 1
    assert (y.double() - exact).norm() < 1e-3 * exact.norm()


def test_errors_within_a_compiled_model_name_the_argument():
    x, in_gate, out_gate, k = draw()
    with pytest.raises(Exception, match="k has dtype torch.float64; want torch.float32"):
        torch.compile(gated_causal_conv, fullgraph=True)(x, in_gate, out_gate, k.double())


def test_host_program_keeps_its_settings():
    import torch._dynamo

    def settings():
        return (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
                torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
                torch._dynamo.config.get_config_copy())

    before = settings()
    inputs = draw(length=48)
    for config in (SolverConfig(), SolverConfig(graph="spectral")):
        assert_right(gated_causal_conv(*inputs, config), inputs)
    assert settings() == before


def run_python(code: str, folder: Path, **variables: str) -> str:
    """Runs code in a fresh Python that sees `folder` and the installed packages, and nothing of this repository."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "GLCONV_CONFIG")}
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, env=kept | variables, capture_output=True, text=True,
                         timeout=240)
    assert run.returncode == 0, run.stderr
    return run.stdout


SOLVE = """
import importlib.util, pathlib, torch
spec = importlib.util.spec_from_file_location("submitted", "{file}")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import glconv
assert pathlib.Path(glconv.__file__).resolve().is_relative_to(pathlib.Path("{package}").resolve()), glconv.__file__
torch.manual_seed(0)
x, in_gate, out_gate = (torch.randn(2, 3, 4, 32).half() for _ in range(3))
k = torch.randn(3, 4, 32)
y = module.solve(x=x, in_gate=in_gate, out_gate=out_gate, k=k)
assert torch.equal(y, module.solve(x, in_gate, out_gate, k))
u = x.double() * in_gate.double()
exact = out_gate * sum(torch.nn.functional.pad(u, (m, 0))[..., :32] * k[..., m, None].double() for m in range(32))
assert y.dtype == torch.float16 and y.shape == x.shape
assert (y.double() - exact).norm() < 1e-3 * exact.norm()
print("solved")
"""


def test_copy_of_the_folder_alone(tmp_path):
    """No YAML library is imported, and no other folder of the repository is needed."""
    folder = tmp_path / "submission"
    shutil.copytree(ROOT / "methods" / "main", folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    code = SOLVE.format(file=folder / "solver.py", package=folder)
    code += "import sys\nassert 'yaml' not in sys.modules\n"
    assert run_python(code, tmp_path) == "solved\n"


def test_installed_by_pip(tmp_path):
    """The wheel holds the package and nothing else; solver.py alone runs over it."""
    source, site, folder = tmp_path / "source", tmp_path / "site", tmp_path / "folder"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT / "methods", source / "methods", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target",
                    str(site), str(source)], check=True, capture_output=True, timeout=120)
    assert sorted(path.name for path in site.iterdir()) == ["glconv", f"glconv-{glconv.__version__}.dist-info"]
    assert {path.relative_to(site) for path in site.rglob("glconv/**/*.py")} == {
        path.relative_to(source / "methods" / "main") for path in source.rglob("methods/main/glconv/**/*.py")}
    folder.mkdir()
    shutil.copy(ROOT / "methods" / "main" / "solver.py", folder)
    assert run_python(SOLVE.format(file=folder / "solver.py", package=site), folder, PYTHONPATH=str(site)) == "solved\n"
