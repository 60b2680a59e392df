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


# What each factor is multiplied by before it is rounded to FP16, so that its values lie well among FP16's: found by
# search over [0.7, 1], for the least root mean square of what rounding leaves (column factor of 32: 3.4e-5 of its
# values' instead of 1.0e-4). `gain` takes it back.
ROW_SCALES = {16: 0.954, 32: 0.7072, 64: 0.959, 128: 0.7057}
COLUMN_SCALES = {16: 0.9302, 32: 0.7885, 64: 0.9185, 128: 0.7582}


def rounded(n1: int, n2: int) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """(F1, F2, T), each as its FP16 (real, imaginary) parts and the complex128 matrix they stand for."""
    matrices = row_factor(n1), column_factor(n2), twiddle(n1, n2)
    scales = ROW_SCALES.get(n1, 1.0), COLUMN_SCALES.get(n2, 1.0), 1.0
    return tuple((torch.view_as_real(scale * matrix).half(), matrix) for matrix, scale in zip(matrices, scales))


@functools.lru_cache(maxsize=64)
def factors(n1: int, n2: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """(F1 real, F1 imaginary, F2 real, F2 imaginary, T real, T imaginary) in FP16 on one device."""
    return tuple(part.contiguous().to(device) for parts, _ in rounded(n1, n2) for part in parts.unbind(-1))


@functools.lru_cache(maxsize=64)
def gain(n1: int, n2: int) -> float:
    """What the inverse transform of (unitary spectrum of u) * (unitary spectrum of k) lacks to be the convolution.

    sqrt(N1*N2), corrected for what their scale and the rounding to FP16 do to the mean magnitude of the factors, each
    of which takes part three times.
    """
    kept = 1.0
    for parts, matrix in rounded(n1, n2):
        product = torch.view_as_complex(parts.double()) * matrix.conj()
        kept *= (product.real.sum() / matrix.abs().square().sum()).item()
    return math.sqrt(n1 * n2) / kept ** 3
