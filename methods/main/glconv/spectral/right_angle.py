"""The right-angle convolution by complex FFTs of size L in FP32: no padding, any length, any device.

    w[n] = exp(i pi n / 2L)
    y    = out_gate * Re(ifft(fft(x * in_gate * w) * fft(k * w)) * conj(w))

The product is taken modulo z^L - i, so what wraps around lands in the imaginary part and the real part is the linear
convolution. Source: Crandall & Fagin 1994. Every intermediate is FP32 or complex64; the result is rounded to FP16 once
(relative L2 about 2.1e-4, all of it that rounding).

Tensors are worked through slab by slab: the rows of a slab pass through all steps while they are in cache, before the
next slab starts. An FFT of this size costs less than a pass over main memory, so that is what makes the difference: at
[4, 768, 2048] on one core 48 ms, where whole tensors take 196 and the eager baseline 156 to 176. Over [1..16, 96..768,
2048] it is 1.3 to 4.6 times as fast as the baseline; under Inductor 1.1 to 3.7 times, since a compiled graph has no
in-place complex product.
"""
import functools
from collections.abc import Callable

import torch

from .. import dft
from ..compiled import Function, compile_graph, missing_toolchain
from ..config import SolverConfig

Operator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Elements of a slab for each thread: 1 MiB in complex64. On one and two cores a quarter to twice of it is within 15 %.
SLAB = 1 << 17
FLOAT_EXPONENT_BITS = 0x7F800000


@functools.lru_cache(maxsize=64)
def weights(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """w and conj(w), complex64 [length] each, rounded once from float64.

    Both are real copies: a lazy conj() is resolved by a dispatch key that is switched off where AOTAutograd runs an
    operator, which then multiplies by w instead.
    """
    w = dft.weight(length).to(torch.complex64)
    return w.to(device), torch.conj_physical(w).to(device)


def power_of_two(magnitude: torch.Tensor) -> torch.Tensor:
    """The largest power of two not above each FP32 magnitude, kept within 2^-126 .. 2^126 so that it and its
    reciprocal are both normal numbers. A NaN or an infinity gives 2^126."""
    bits = magnitude.view(torch.int32) & FLOAT_EXPONENT_BITS
    return bits.view(torch.float32).clamp(2.0**-126, 2.0**126)


def kernel_spectrum(k: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted spectrum, complex64 [channels, length], of k [channels, length] over its scale, FP32 [channels, 1]. The
    scale is a power of two near max |k|, so dividing by it is exact and no finite k overflows or vanishes."""
    scale = power_of_two(k.abs().amax(-1, keepdim=True))
    return torch.fft.fft(k / scale * w), scale


def gated_rows(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, spectrum: torch.Tensor,
               scale: torch.Tensor, w: torch.Tensor, w_conj: torch.Tensor) -> torch.Tensor:
    """y, FP16 [batch, channels, length], of a slab; `spectrum` and `scale` as `kernel_spectrum` gives them."""
    u = torch.fft.fft(x.float() * in_gate.float() * w)
    u *= spectrum       # in place: a new buffer for each product costs a fifth of the time in cache misses
    y = torch.fft.ifft(u)
    y *= w_conj
    return (y.real * out_gate.float() * scale).to(x.dtype)


def convolve(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor,
             spectrum_of: Function = kernel_spectrum, rows_of: Function = gated_rows) -> torch.Tensor:
    """y of the contract, FP16 as x [batch, streams, heads, length], newly allocated; arguments as `check` wants them.

    `spectrum_of` and `rows_of` are `kernel_spectrum` and `gated_rows`, or compiled forms of them.
    """
    batch, streams, heads, length = x.shape
    channels = streams * heads
    y = torch.empty_like(x)
    if batch == 0:
        return y
    x, in_gate, out_gate, result = (t.view(batch, channels, length) for t in (x, in_gate, out_gate, y))
    k = k.view(channels, length)
    w, w_conj = weights(length, k.device)
    slab = SLAB * torch.get_num_threads()
    rows = slab_step(channels, slab // length)
    depth = slab_step(batch, slab // (length * rows))
    # Autocast would send the FFTs through casts of its own.
    with torch.autocast(x.device.type, enabled=False):
        for channel in slab_starts(channels, rows):
            lanes = slice(channel, channel + rows)
            spectrum, scale = spectrum_of(k[lanes], w)
            for sequence in slab_starts(batch, depth):
                part = (slice(sequence, sequence + depth), lanes)
                result[part] = rows_of(x[part], in_gate[part], out_gate[part], spectrum, scale, w, w_conj)
    return y


def slab_step(size: int, most: int) -> int:
    """The step, at most `most` and at least 1, that cuts `size` into the fewest slabs of nearly equal size."""
    count = -(-size // max(1, most))
    return -(-size // count)


def slab_starts(size: int, step: int) -> list[int]:
    """Where slabs of exactly `step` start so that they cover `size`: the last one overlaps the one before rather than
    being shorter, so that one compiled graph serves them all."""
    return [min(start, size - step) for start in range(0, size, step)]


def build(config: SolverConfig, device: torch.device) -> Operator:
    """The right-angle path under a config: compiled by Inductor when the config asks for it and a C++ compiler is at
    hand (on a CPU), operator by operator otherwise, which is logged."""
    if not config.compile or missing_toolchain(device):
        return convolve
    return functools.partial(convolve, spectrum_of=compile_graph(kernel_spectrum, config),
                             rows_of=compile_graph(gated_rows, config))
