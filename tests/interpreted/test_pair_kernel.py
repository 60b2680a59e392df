"""The pair kernel itself against float64: through Triton's interpreter where TRITON_INTERPRET=1 is set before Triton is
imported (tests/test_spectral.py starts this file so), natively on a CUDA device otherwise."""
import itertools
import os

import pytest
import torch
from glconv.spectral.pairs import LAYOUTS, Packing, pair_spectra

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(),
                                reason="needs TRITON_INTERPRET=1 or a CUDA device")

SHAPES = ((1, 1, 1), (3, 2, 5), (5, 2, 129))     # batch, channels, length
LANES = (("output", "lane"), ("pair", "lane"), ("pair", "dc"))           # emit, nyquist
DTYPES = {torch.float32: 1e-6, torch.float16: 1e-3}


@pytest.fixture
def poisoned(monkeypatch):
    """torch.empty gives NaN, so that an element the kernel does not write cannot pass."""
    native = torch.empty

    def empty(*args, **options):
        tensor = native(*args, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", empty)


def spectra(batch, channels, length, dtype):
    torch.manual_seed(length)
    u, k = torch.randn(batch, channels, 2 * length), torch.randn(channels, 2 * length)
    return tuple(torch.view_as_real(torch.fft.rfft(signal)).to(dtype).contiguous().to(DEVICE) for signal in (u, k))


def error(packed, u, k, scale):
    exact = pair_spectra(u.double(), k.double(), scale)
    return ((packed.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("emit", "nyquist"), LANES)
def test_every_layout_gives_the_formula(poisoned, emit, nyquist, layout, dtype):
    from glconv.spectral.kernels import launch_pairs

    for shape, tile_pairs in itertools.product(SHAPES, (1, 4)):
        u, k = spectra(*shape, dtype)
        packing = Packing(tile_pairs=tile_pairs, tile_bins=64, warps=4, emit=emit, nyquist=nyquist, layout=layout)
        assert error(launch_pairs(u, k, 0.25, packing), u, k, 0.25) < DTYPES[dtype], (shape, packing)


@pytest.mark.parametrize("packing", [
    Packing(tile_bins=16, scale_at="output"), Packing(tile_bins=16, static_sizes=True),
    Packing(tile_bins=32, signal_policy=".cg", kernel_policy="evict_last"),
    Packing(tile_bins=32, signal_policy="evict_first", layout="word", warps=1, stages=1)], ids=str)
def test_scale_sizes_and_cache_hints(poisoned, packing):
    from glconv.spectral.kernels import launch_pairs

    u, k = spectra(3, 2, 37, torch.float32)
    assert error(launch_pairs(u, k, 0.25, packing), u, k, 0.25) < 1e-6


def test_scale_before_the_products_keeps_large_spectra_in_range():
    from glconv.spectral.kernels import launch_pairs

    u, k = (torch.full(shape, 200.0, dtype=torch.float16, device=DEVICE) for shape in ((2, 1, 9, 2), (1, 9, 2)))
    assert launch_pairs(u, k, 2.0**-8, Packing(tile_bins=16)).isfinite().all()
