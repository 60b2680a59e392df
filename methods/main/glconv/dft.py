"""DFT factors and twiddles of the right-angle convolution, computed in float64 on the CPU, rounded once, kept a device.

The transform modulo z^L - i of u is U[k] = sum over n of u[n] exp(-2 pi i n (k - 1/4) / L): the -1/4 is the right-angle
weight exp(i pi n / 2L). With L = N1*N2, n = n1*N2 + n2 and k = k1 + N1*k2 it is (F1 X * T) F2 / unitary scale, X the
row-major [N1, N2] view of u. The factor of stage one is kept symmetric by writing n1 - 1/4 for n1 and giving the
difference, which depends on k1 alone, to the twiddle; the inverse, which needs the transpose, then reads the same
matrix:

    F1[k1, n1] = exp(-2 pi i (n1 - 1/4) (k1 - 1/4) / N1) / sqrt(N1)
    T [k1, n2] = exp(-2 pi i (k1 - 1/4) (n2 + N2/4) / L)
    F2[n2, k2] = exp(-2 pi i n2 k2 / N2) / sqrt(N2)

F1 and F2 are symmetric and unitary and |T| = 1. See `fused/portable.py` for the whole formula.
Source: weighted (right-angle) convolution, Crandall & Fagin 1994; the two-level split is Cooley-Tukey.
"""
import functools
import math

import torch


def unit(angle: torch.Tensor) -> torch.Tensor:
    """exp(i*angle) for a float64 angle in radians, as complex128."""
    return torch.polar(torch.ones_like(angle), angle)


def row_factor(n1: int) -> torch.Tensor:
    """F1, complex128 [k1, n1]; symmetric. Exact phase reduction: (4*n1 - 1)*(4*k1 - 1) modulo 16*N1 in integers."""
    n = 4 * torch.arange(n1) - 1
    return unit(-2 * math.pi * ((n[:, None] * n[None, :]) % (16 * n1)).double() / (16 * n1)) / math.sqrt(n1)


def column_factor(n2: int) -> torch.Tensor:
    """F2, complex128 [n2, k2]; symmetric."""
    n = torch.arange(n2)
    return unit(-2 * math.pi * ((n[:, None] * n[None, :]) % n2).double() / n2) / math.sqrt(n2)


def twiddle(n1: int, n2: int) -> torch.Tensor:
    """T, complex128 [k1, n2]. Exact phase reduction: (4*k1 - 1)*(4*n2 + N2) modulo 16*L in integers."""
    k, n = 4 * torch.arange(n1)[:, None] - 1, 4 * torch.arange(n2)[None, :] + n2
    return unit(-2 * math.pi * ((k * n) % (16 * n1 * n2)).double() / (16 * n1 * n2))


def weight(length: int) -> torch.Tensor:
    """exp(i pi n / 2L), complex128 [length]: turns a cyclic transform of size L into one modulo z^L - i."""
    return unit(torch.arange(length, dtype=torch.float64) * (math.pi / (2 * length)))


def halves(matrix: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Real and imaginary parts in FP16, contiguous, on `device`."""
    return matrix.real.half().contiguous().to(device), matrix.imag.half().contiguous().to(device)


@functools.lru_cache(maxsize=64)
def factors(n1: int, n2: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """(F1 real, F1 imaginary, F2 real, F2 imaginary, T real, T imaginary) in FP16 on one device."""
    return (*halves(row_factor(n1), device), *halves(column_factor(n2), device), *halves(twiddle(n1, n2), device))


@functools.lru_cache(maxsize=64)
def gain(n1: int, n2: int) -> float:
    """What the inverse transform of (unitary spectrum of u) * (unitary spectrum of k) lacks to be the convolution.

    sqrt(N1*N2), corrected for what rounding to FP16 does to the mean magnitude of the factors, each of which takes part
    three times: 1/sqrt(32) alone is off by 3e-4.
    """
    kept = 1.0
    for matrix in (row_factor(n1), column_factor(n2), twiddle(n1, n2)):
        rounded = torch.complex(matrix.real.half().double(), matrix.imag.half().double())
        kept *= ((rounded * matrix.conj()).real.sum() / matrix.abs().square().sum()).item()
    return math.sqrt(n1 * n2) / kept ** 3
