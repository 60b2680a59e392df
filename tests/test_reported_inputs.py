"""Inputs that users of such operators have reported trouble with, through the public entry, on every path."""
import math
import warnings

import fuzzing
import pytest
import torch
from glconv import SolverConfig, describe, gated_causal_conv
from glconv.reference import oracle, row_errors
from glconv.spectral import graph

PATHS = {
    "auto": SolverConfig(),
    "right-angle": SolverConfig(graph="right-angle", compile=False),
    "spectral": SolverConfig(graph="spectral", compile=False),
    "eager": SolverConfig(graph="eager"),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROUNDING = 2.0**-11     # of a value to FP16, relative

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize("path", PATHS)]


def draw(device, batch, streams, heads, length, seed=0):
    """Standard normal x and gates, k of norm about 1 a channel."""
    generator = torch.Generator().manual_seed(seed)
    x, in_gate, out_gate = (torch.randn(batch, streams, heads, length, generator=generator).half() for _ in range(3))
    k = torch.randn(streams, heads, length, generator=generator) / math.sqrt(length)
    return tuple(tensor.to(device) for tensor in (x, in_gate, out_gate, k))


def solve(path, inputs):
    """The result with its form checked and its inputs seen unchanged."""
    before = [tensor.clone() for tensor in inputs]
    y = gated_causal_conv(*inputs, PATHS[path])
    assert (y.shape, y.dtype, y.device, y.is_contiguous()) == (inputs[0].shape, torch.float16, inputs[0].device, True)
    assert all(torch.equal(tensor.nan_to_num(1.5), kept.nan_to_num(1.5)) for tensor, kept in zip(inputs, before))
    return y


def arithmetic(path, inputs):
    """How a path rounds on its way where that is in FP16; None where its transforms are FP32."""
    length, device = inputs[0].shape[-1], inputs[0].device
    if device.type == "cpu" or path not in ("auto", "spectral"):
        return None
    if path == "auto" and describe(*inputs).path != "spectral":
        return fuzzing.fused(length)
    return fuzzing.half(length) if graph.transform_dtype(length, device, PATHS[path]) == torch.float16 else None


def assert_right(path, inputs, limit=1e-3):
    """Relative L2 of every row within the limit; with FP16 transforms, whose error is relative to |u| |k| even where
    rows cancel or keep but a few positions, within what follows from the inputs."""
    y, rounded = solve(path, inputs), arithmetic(path, inputs)
    if rounded:
        finding = fuzzing.examine(y, inputs, rounded)
        assert finding.right, str(finding)
    else:
        assert row_errors(y, oracle(*inputs)).max().item() <= limit
    return y


@pytest.mark.parametrize("length", [256, 512, 1024, 2048, 4096, 8192, 14113, 16384])
def test_ordinary_rows_within_1e_3(path, device, length):
    """Rows of at least 256 positions, kernels white and decaying: 1e-3 each; all rows together with FP16 FFTs, where an
    H200 gave up to 2.47e-3 for white kernels: half of their energy, and none of the noise, is past the end."""
    if device == "cpu" and length > 1024:
        pytest.skip("long rows where they are fast")
    x, in_gate, out_gate, k = draw(device, 5, 3, 2, length)
    decaying = k * torch.exp(-torch.arange(length, device=device) * (10 / length))
    for kernel, half_limit in ((k, 2.6e-3), (decaying, 2.2e-3)):
        inputs = x, in_gate, out_gate, kernel
        y, exact = solve(path, inputs), oracle(*inputs)
        if path == "spectral" and device == "cuda":
            assert (y - exact).norm() <= half_limit * exact.norm()
        else:
            assert row_errors(y, exact).max() <= 1e-3


def test_prime_like_length(path, device):
    assert_right(path, draw(device, 2, 3, 5, 14113))


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_tiny_length(path, device, length):
    inputs = draw(device, 2, 2, 3, length)
    y, exact = solve(path, inputs), oracle(*inputs)
    # So few terms may cancel that a row is small against them; the error is bounded by the terms.
    terms = oracle(*(tensor.abs() for tensor in inputs))
    assert ((y - exact).abs() <= 4 * ROUNDING * terms.amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("batch", [1, 3, 5, 7, 33])
def test_odd_batch(path, device, batch):
    assert_right(path, draw(device, batch, 2, 2, 128))


def test_constant_signal_and_kernel(path, device):
    """Everything at frequency zero: y climbs to 82, a transform of it much higher."""
    x = torch.full((2, 1, 2, 2048), 40.0, dtype=torch.float16, device=device)
    ones, k = torch.ones_like(x), torch.full((1, 2, 2048), 1e-3, device=device)
    y = assert_right(path, (x, ones, ones, k), limit=2e-3)
    assert y[0, 0, 0, -1].item() == pytest.approx(81.92, rel=2e-3)


@pytest.mark.parametrize("position", [0, 1000, 2047])
def test_near_the_top_of_fp16(path, device, position):
    x = torch.zeros(2, 1, 1, 2048, dtype=torch.float16, device=device)
    x[0, ..., position] = 60000
    ones, k = torch.ones_like(x), torch.zeros(1, 1, 2048, device=device)
    k[..., 0] = 1
    y = solve(path, (x, ones, ones, k))
    assert torch.isfinite(y).all()
    assert (y.double() - x.double()).abs().max() <= 60000 * 2e-3
    assert y[0, 0, 0, position].item() == pytest.approx(60000, rel=2e-3)


def test_tiny_signal(path, device):
    x, in_gate, out_gate, k = draw(device, 2, 2, 2, 2048)
    assert_right(path, (x * 1e-4, in_gate.sigmoid(), out_gate.sigmoid(), k), limit=2e-3)


def test_impulse_kernel(path, device):
    x, in_gate, out_gate, k = draw(device, 2, 1, 2, 2048)
    k.zero_()[:, 0, 0] = 1      # channel 0: at position 0
    k[:, 1, 2047] = 1           # channel 1: at the last one
    y = assert_right(path, (x, in_gate, out_gate, k))
    gated = x.double() * in_gate.double()
    limit = 2e-3 * gated.norm(dim=-1).amax() * out_gate.abs().amax() / math.sqrt(2048)
    assert (y[:, :, 0] - gated[:, :, 0] * out_gate[:, :, 0]).norm(dim=-1).max() / math.sqrt(2048) <= limit
    last = gated[:, :, 1, 0] * out_gate[:, :, 1, -1]
    assert (y[:, :, 1, -1] - last).abs().max() <= 2e-3 * gated.norm(dim=-1).amax()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_bad_row_stays_alone(path, device, bad, which):
    clean = draw(device, 4, 2, 2, 256)
    inputs = tuple(tensor.clone() for tensor in clean)
    inputs[which][1, 0, 1, 100] = bad
    inputs[1 - which][1, 0, 1, 100] = 1
    clean[1 - which][1, 0, 1, 100] = 1
    y, whole = solve(path, inputs), solve(path, clean)
    assert not torch.isfinite(y[1, 0, 1]).all()
    y[1, 0, 1] = whole[1, 0, 1]
    if path == "spectral":      # the row that shares a transform with the bad one keeps its value, not its rounding
        assert row_errors(y[0, 0, 1], whole[0, 0, 1].double()) < 3e-3
        y[0, 0, 1] = whole[0, 0, 1]
    assert torch.equal(y, whole)


def test_zero_kernel(path, device):
    x, in_gate, out_gate, k = draw(device, 3, 2, 2, 256)
    assert (solve(path, (x, in_gate, out_gate, torch.zeros_like(k))) == 0).all()


def test_zero_batch(path, device):
    x, in_gate, out_gate, k = draw(device, 2, 2, 3, 64)
    assert solve(path, (x[:0], in_gate[:0], out_gate[:0], k)).shape == (0, 2, 3, 64)


def test_sliced_input(path, device):
    inputs = list(draw(device, 2, 2, 3, 80))
    for position, name in enumerate(("x", "in_gate", "out_gate", "k")):
        sliced = [tensor[..., :64].contiguous() for tensor in inputs]
        sliced[position] = inputs[position][..., :64]
        with pytest.raises(ValueError, match=f"^{name} is not contiguous: "):
            gated_causal_conv(*sliced, PATHS[path])


def test_many_shapes(path, device):
    """40 shapes in one process: all right, and no warning that one of them runs uncompiled. (A few where each is
    compiled for a CPU, at two seconds a shape; test_compiled.py counts the graphs of 40.)"""
    count = 5 if (path, device) == ("auto", "cpu") else 40
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for number in range(count):
            assert_right(path, draw(device, 1 + number % 5, 1 + number % 4, 1 + number // 4, 32, seed=number))


@pytest.mark.gpu
def test_side_stream(path, device):
    if device == "cpu":
        pytest.skip("streams are CUDA's")
    inputs = draw(device, 4, 2, 2, 2048)
    expected = solve(path, inputs)
    stream = torch.cuda.Stream()
    late = tuple(torch.zeros_like(tensor) for tensor in inputs)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)      # what runs on another stream would read the zeros
        for tensor, value in zip(late, inputs):
            tensor.copy_(value)
        y = gated_causal_conv(*late, PATHS[path])
    stream.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.gpu
def test_capture(path, device):
    if device == "cpu":
        pytest.skip("CUDA graphs are CUDA's")
    inputs, others = draw(device, 4, 2, 2, 2048), draw(device, 4, 2, 2, 2048, seed=1)
    expected = solve(path, others)
    solve(path, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gated_causal_conv(*inputs, PATHS[path])
    for tensor, value in zip(inputs, others):
        tensor.copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)
