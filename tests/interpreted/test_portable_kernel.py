"""The portable kernel against float64: through Triton's interpreter where TRITON_INTERPRET=1 is set before Triton is
imported (tests/test_portable.py starts this file so; the plain formula), natively on a CUDA device otherwise (PTX)."""
import dataclasses
import math
import os

import pytest
import torch
from glconv import reference
from glconv.fused import portable
from glconv.plan import Plan

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(),
                                 reason="needs TRITON_INTERPRET=1 or a CUDA device"),
              # What overflows on the way is the subject of some tests.
              pytest.mark.filterwarnings("ignore::RuntimeWarning")]

# n1, n2, blocks, unrolled or stacked: every kind of plan, short.
ONE, LOOPED, UNROLLED, WIDE = (16, 16, 1, ""), (16, 16, 3, ""), (16, 16, 2, "unroll"), (64, 32, 1, "")
STACKED = (64, 16, 2, "stacked")
KINDS = (ONE, LOOPED, UNROLLED, (32, 16, 2, "stacked"))
FULL = 256


def plan_of(kind, programs=2):
    n1, n2, blocks, form = kind
    return Plan("portable", "test", n1, n2, blocks, n1 // 16, 2, form == "unroll", 255, 0, 1, programs,
                form == "stacked", not INTERPRETED)


def size(kind):
    return math.prod(kind[:3])


def convolve(x, in_gate, out_gate, k, plan):
    y = torch.full_like(x, float("nan"))
    portable.run(x, in_gate, out_gate, k, plan, y)
    return y


def inputs(batch, streams, heads, length, seed=0):
    torch.manual_seed(seed)
    x, in_gate, out_gate = (torch.randn(batch, streams, heads, length).half().to(DEVICE) for _ in range(3))
    k = torch.randn(streams, heads, length) * torch.exp(-torch.arange(length) / 100)
    return x, in_gate, out_gate, k.to(DEVICE)


def ones(*shape, value=1.0):
    return torch.full(shape, value, dtype=torch.float16, device=DEVICE)


def worst(y, x, in_gate, out_gate, k):
    assert y.isfinite().all()
    return reference.row_errors(y, reference.oracle(x, in_gate, out_gate, k)).max().item()


@pytest.mark.parametrize("kind", [*KINDS, WIDE, STACKED])
@pytest.mark.parametrize(("batch", "streams", "heads", "programs"), [(3, 2, 2, 5), (1, 1, 3, 1), (4, 1, 2, 2)])
def test_full_length(kind, batch, streams, heads, programs):
    problem = inputs(batch, streams, heads, size(kind))
    assert worst(convolve(*problem, plan_of(kind, programs)), *problem) <= 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("short", [1, 2, 8, 100, 255])
def test_masked_length(kind, short):
    """Every alignment of a row: 2 bytes, 4 bytes, 16 bytes."""
    problem = inputs(2, 1, 3, size(kind) - short)
    assert worst(convolve(*problem, plan_of(kind, 3)), *problem) <= 1e-3


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_tiny_length(length):
    problem = inputs(3, 1, 2, length)
    exact = reference.oracle(*problem)
    assert (convolve(*problem, plan_of(ONE)).double() - exact).abs().max() <= 2e-3 * exact.abs().max()


@pytest.mark.parametrize("kind", [ONE, LOOPED, UNROLLED])
def test_impulses(kind):
    """k = delta at 0 and at L-1: the gated input itself, and its first value alone at the end."""
    length = size(kind)
    x, in_gate, out_gate, k = inputs(2, 1, 2, length)
    k.zero_()
    k[0, 0, 0] = k[0, 1, -1] = 1.0
    y = convolve(x, in_gate, out_gate, k, plan_of(kind)).double()
    exact = reference.oracle(x, in_gate, out_gate, k)
    assert reference.row_errors(y[:, :, 0], exact[:, :, 0]).max() <= 1e-3
    # All of a row's energy passes through its spectrum, so what rounding leaves is measured by the input.
    norm = (x[:, :, 1].double() * in_gate[:, :, 1].double()).norm(dim=-1).max()
    assert (y[:, :, 1] - exact[:, :, 1]).abs().max() <= 1e-3 * norm * out_gate.abs().max()


@pytest.mark.parametrize("kind", [ONE, LOOPED, UNROLLED])
def test_causality(kind):
    """What comes after t leaves everything before it as it was: within rounding, and to the bit in earlier tiles."""
    length, t = size(kind), size(kind) - 100
    x, in_gate, out_gate, k = inputs(1, 1, 2, length)
    first = convolve(x, in_gate, out_gate, k, plan_of(kind))
    changed = x.clone()
    changed[..., t:] += 3.0
    second = convolve(changed, in_gate, out_gate, k, plan_of(kind))
    tile = kind[0] * kind[1]
    assert torch.equal(first[..., :t // tile * tile], second[..., :t // tile * tile])
    exact = reference.oracle(x, ones(*x.shape), ones(*x.shape), k).norm(dim=-1).max()
    assert (first[..., :t].double() - second[..., :t].double()).abs().max() <= 1e-3 * exact * out_gate.abs().max()
    assert (first[..., t:] != second[..., t:]).any()


def test_linear_and_shift():
    x, in_gate, _, k = inputs(1, 1, 1, FULL)
    gates = ones(*x.shape)
    y = convolve(x, in_gate, gates, k, plan_of(ONE)).double()
    assert torch.equal(convolve(2 * x, in_gate, gates, k, plan_of(ONE)).double(), 2 * y)
    assert torch.equal(convolve(x, in_gate, gates, 4 * k, plan_of(ONE)).double(), 4 * y)
    shifted = torch.zeros_like(x)
    shifted[..., 5:] = (x * in_gate)[..., :-5]
    moved = convolve(shifted, gates, gates, k, plan_of(ONE)).double()
    assert (moved[..., 5:] - y[..., :-5]).norm() <= 2e-3 * y.norm()


@pytest.mark.parametrize("kind", [ONE, LOOPED, UNROLLED])
def test_rows_do_not_depend_on_the_batch_or_on_the_split(kind):
    """To the bit; nor from call to call."""
    x, in_gate, out_gate, k = inputs(5, 1, 2, size(kind))
    x[1] *= 1e-3            # would lose bits in the second pass,
    x[3] *= 8000            # which this row asks for
    in_gate[3], out_gate[3] = 1, 0.01
    whole = convolve(x, in_gate, out_gate, k, plan_of(kind, 3))
    assert torch.equal(whole, convolve(x, in_gate, out_gate, k, plan_of(kind, 10)))
    assert torch.equal(whole, convolve(x, in_gate, out_gate, k, plan_of(kind, 1)))
    for row in range(5):
        alone = convolve(*(tensor[row:row + 1].contiguous() for tensor in (x, in_gate, out_gate)), k, plan_of(kind, 2))
        assert torch.equal(whole[row:row + 1], alone)


@pytest.mark.parametrize("kind", [ONE, LOOPED, UNROLLED])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(kind, bad):
    x, in_gate, out_gate, k = inputs(3, 1, 2, size(kind))
    clean = convolve(x, in_gate, out_gate, k, plan_of(kind, 1))
    x[1, 0, 1, 7] = bad
    y = convolve(x, in_gate, out_gate, k, plan_of(kind, 1))
    assert not y[1, 0, 1].isfinite().any()
    y[1, 0, 1] = clean[1, 0, 1]
    assert torch.equal(y, clean)


def coherent(length, pattern):
    n = torch.arange(length, dtype=torch.float64)
    return {"constant": torch.ones(length).double(), "alternating": 1 - 2 * (n % 2),
            "chirp": torch.sign(torch.cos(math.pi * n * n / length))}[pattern]


@pytest.mark.parametrize("kind", [ONE, LOOPED, UNROLLED, WIDE, STACKED])
@pytest.mark.parametrize("pattern", ["constant", "alternating", "chirp"])
@pytest.mark.parametrize("matched", [False, True])
def test_largest_inputs(kind, pattern, matched):
    """|u| = 1024 all over with a kernel that gathers all of it, in one bin or at one position: right, and finite."""
    length = size(kind)
    signal = coherent(length, pattern)
    x = (1024 * signal).half().to(DEVICE).expand(2, 1, 1, length).contiguous()
    k = (signal.flip(0) if matched else signal).float().to(DEVICE)[None, None] / length
    gates = ones(*x.shape)
    assert worst(convolve(x, gates, gates, k, plan_of(kind)), x, gates, gates, k) <= 2e-3


@pytest.mark.parametrize("kind", [ONE, LOOPED, UNROLLED])
def test_top_of_the_range(kind):
    """60000 at one position passes an impulse unharmed; the gated result may fit where the convolution does not."""
    length = size(kind)
    gates = ones(1, 1, 1, length)
    x = torch.zeros_like(gates)
    x[..., 5] = 60000
    k = torch.zeros(1, 1, length, device=DEVICE)
    k[..., 0] = 1
    y = convolve(x, gates, gates, k, plan_of(kind))
    assert y[..., 5].item() == pytest.approx(60000, rel=1e-3)
    assert (y.double() - x.double()).norm() <= 1e-3 * 60000
    x, k = ones(1, 1, 1, length, value=40), torch.full_like(k, 50.0)
    small = ones(1, 1, 1, length, value=1e-2)
    assert worst(convolve(x, gates, small, k, plan_of(kind)), x, gates, small, k) <= 1e-3


@pytest.mark.parametrize("kind", [ONE, LOOPED, UNROLLED])
def test_too_large_is_right_or_not_finite(kind):
    length = size(kind)
    gates, small = ones(1, 1, 1, length), ones(1, 1, 1, length, value=1e-3)
    for value in (3000.0, 20000.0, 65504.0):
        x = ones(1, 1, 1, length, value=value)
        k = torch.full((1, 1, length), 1 / length, device=DEVICE)
        y, exact = convolve(x, gates, small, k, plan_of(kind)), reference.oracle(x, gates, small, k)
        right = (y.double() - exact).abs() <= 3e-3 * exact.abs().max()
        assert (right | ~y.isfinite()).all()


@pytest.mark.parametrize("kind", [ONE, LOOPED, UNROLLED, WIDE, STACKED])
@pytest.mark.parametrize("shape", ["white", "decaying", "smooth"])
def test_small_signals(kind, shape):
    length = size(kind)
    torch.manual_seed(1)
    x = (torch.randn(4, 1, 2, length) * 1e-4).half().to(DEVICE)
    in_gate, out_gate = (torch.rand(4, 1, 2, length).half().to(DEVICE) for _ in range(2))
    noise, decay = torch.randn(1, 2, length), torch.exp(-torch.arange(length) / 50.0)
    k = {"white": noise, "decaying": noise * decay, "smooth": decay.expand(1, 2, length)}[shape]
    k = (k / k.norm(dim=-1, keepdim=True) * 4).contiguous().to(DEVICE)
    y = convolve(x, in_gate, out_gate, k, plan_of(kind))
    error = (y.double() - reference.oracle(x, in_gate, out_gate, k)).norm()
    assert error <= 2e-3 * reference.oracle(x, in_gate, out_gate, k).norm()


@pytest.mark.parametrize("kind", [ONE, LOOPED, UNROLLED])
@pytest.mark.parametrize(("scale", "signal"), [(1e4, 1e-3), (1e30, 0.0), (3e38, 0.0), (1e-6, 1e3), (1e-30, 1e3)])
def test_kernel_scales(kind, scale, signal):
    x, in_gate, out_gate, k = inputs(2, 1, 2, size(kind))
    x, k = (x * signal).half(), (k / k.abs().max() * scale).float()
    y = convolve(x, in_gate, out_gate, k, plan_of(kind))
    exact = reference.oracle(x, in_gate, out_gate, k)
    assert y.isfinite().all()
    assert (y.double() - exact).norm() <= 2e-3 * exact.norm() + 1e-7 * math.sqrt(y.numel())


@pytest.mark.parametrize("value", [0.0, 1e-40, -1e-45])
def test_vanishing_kernels(value):
    x, in_gate, out_gate, k = inputs(2, 1, 2, FULL)
    y = convolve(x, in_gate, out_gate, torch.full_like(k, value), plan_of(ONE))
    assert torch.equal(y.abs(), torch.zeros_like(y))


def test_kernel_keeps_its_precision():
    """k in FP32 is not rounded to FP16 on the way in: 1 + 2^-13 is seen in a kernel that is constant otherwise."""
    length = size(ONE)
    gates = ones(1, 1, 1, length)
    x = torch.zeros_like(gates)
    x[..., 0], x[..., 1] = 1, -1
    k = torch.ones(1, 1, length, device=DEVICE)
    k[..., 128:] += 2.0 ** -6
    y = convolve(x, gates, gates, k, plan_of(ONE))
    assert y[0, 0, 0, 128].item() == pytest.approx(2.0 ** -6, abs=4e-3)


def test_plans_differ_in_rounding_only():
    problem = inputs(2, 1, 1, 512)
    plans = [plan_of(kind) for kind in ((32, 16, 1, ""), (16, 16, 2, ""), (16, 16, 2, "unroll"))]
    first, looped, unrolled = (convolve(*problem, plan).double() for plan in plans)
    assert torch.equal(looped, unrolled)
    assert (first - looped).norm() <= 2e-3 * first.norm()
    assert dataclasses.replace(plans[1], unroll=True) == plans[2]
