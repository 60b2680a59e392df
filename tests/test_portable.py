"""The portable kernel through Triton's interpreter, which must be chosen before Triton is imported: in a process of its
own. And its arithmetic as the GPU does it, emulated: packed half-precision products, FP32 sums."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from glconv import dft, reference
from glconv.fused.portable import HALF_SUMS, PRECISE, lower

TESTS = Path(__file__).parent


def test_interpreted():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                          str(TESTS / "interpreted" / "test_portable_kernel.py")],
                         cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout


def half(value):
    return value.half().double()


def emulate(u, k, n1, n2, blocks):
    """FP64 [rows, length] of the convolution as the GPU rounds it. u, k: FP16 and FP32 of blocks*n1*n2 positions.

    Complex products: conversion, one product, one fused product and sum in FP16. Sums of dots: exact where the kernel
    has FP32, rounded after every 16 terms where it has FP16.
    """
    def rounded(matrix):
        return torch.complex(half(matrix.real), half(matrix.imag))

    def product(a, b, add=None):
        zero = torch.zeros_like(a.real)
        ar, ai, br, bi = a.real, a.imag, b.real, b.imag
        pr, pi = (zero, zero) if add is None else (add.real, add.imag)
        return torch.complex(half(ar * br + half(pr - ai * bi)), half(ar * bi + half(pi + ai * br)))

    parts = [part.double() for part in dft.factors(n1, n2, torch.device("cpu"))]
    f1, f2, t = (torch.complex(*pair) for pair in zip(parts[::2], parts[1::2]))

    def dot(a, b, total=None):
        for start in range(0, a.shape[-1], 16):
            terms = a[..., start:start + 16] @ b[..., start:start + 16, :]
            total = half(terms if total is None else total + terms)
        return total

    def forward(u):
        if n1 * n2 <= PRECISE.value:
            return rounded(rounded((f1 @ u.to(f1)) * t) @ f2)
        if n1 > HALF_SUMS.value:
            return rounded(product(rounded(f1 @ u.to(f1)), t) @ f2)
        w = product(torch.complex(dot(f1.real, u), dot(f1.imag, u)), t)
        return torch.complex(dot(-w.imag, f2.imag, dot(w.real, f2.real)), dot(w.imag, f2.real, dot(w.real, f2.imag)))

    tiles = (-1, blocks, n1, n2)
    # The kernel: a power of two, an exact transform but for W, then FP16.
    level = 2.0 ** (torch.floor(torch.log2(k.double().square().sum(-1, keepdim=True).div(n1 * n2).sqrt())) - 1)
    spectra = rounded((f1 @ (k.double() / level).reshape(tiles).to(f1)) * t) @ f2
    spectra[:, 1:] -= 1j * spectra[:, :-1].clone()
    spectra = rounded(spectra)
    u = forward(u.double().reshape(tiles))
    out, ahead = [], [None] * blocks
    for j in range(blocks):
        sums = [product(u[:, j], spectra[:, d], ahead[d]) for d in range(blocks - j)]
        ahead = sums[1:]
        v = sums[0] @ f2.conj()
        z = rounded(v * t.conj()) if n1 * n2 <= PRECISE.value else product(rounded(v), t.conj())
        out.append((f1.conj() @ z).real)
    return torch.stack(out, 1).reshape(len(u), -1) * level * dft.gain(n1, n2)


@pytest.mark.parametrize(("n1", "n2", "blocks", "bound"), [
    (64, 32, 1, 9e-4), (64, 16, 2, 9.2e-4), (64, 32, 2, 9.2e-4), (64, 16, 8, 1e-3), (128, 16, 8, 9.2e-4),
    (32, 32, 1, 9e-4), (32, 16, 1, 9e-4), (16, 16, 1, 1e-3)])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
@pytest.mark.parametrize("shape", ["decaying", "white"])
def test_accuracy_of_packed_arithmetic(n1, n2, blocks, bound, scale, shape):
    """Every tile of the tables at its whole length, ordinary inputs and small ones."""
    torch.manual_seed(0)
    length = n1 * n2 * blocks
    u = (torch.randn(6, length) * scale).half()
    k = torch.randn(6, length)
    if shape == "decaying":
        k *= torch.exp(-torch.arange(length) * (8 / length))
    exact = reference.causal_conv(u.double(), k.double())
    error = ((emulate(u, k, n1, n2, blocks) - exact).norm(dim=-1) / exact.norm(dim=-1)).max()
    assert error <= (bound if scale == 1 else 2e-3)


@pytest.mark.parametrize(("n1", "n2", "blocks"), [(64, 32, 1), (64, 16, 8), (128, 16, 8)])
def test_second_pass_bounds_any_kernel(n1, n2, blocks):
    """The kernels that come closest to the bound: all energy in one bin, of one tile or of all."""
    size = n1 * n2
    for length in (size, size * blocks):
        k = torch.cos(2 * torch.pi * (torch.arange(size * blocks) + 0.5) * (3 - 0.25) / size).double()
        k[length:] = 0
        k /= (k.square().sum() / size).sqrt() / 4      # the largest level the first pass leaves
        spectra = (dft.row_factor(n1) @ k.reshape(blocks, n1, n2).to(torch.complex128) * dft.twiddle(n1, n2)
                   ) @ dft.column_factor(n2)
        spectra[1:] -= 1j * spectra[:-1].clone()
        largest = spectra.abs().flatten(1).amax(1).sum().item()
        assert largest * lower(size, blocks) <= 1
        assert size <= 2048
