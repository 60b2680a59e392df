"""The right-angle convolution by FFTs of size L in FP32: no padding, any length, any device.

    w[n] = exp(i pi n / 2L)
    y    = out_gate * Re(ifft(fft(x * in_gate * w) * fft(k * w)) * conj(w))

The product is taken modulo z^L - i, so the linear convolution's first half is the real part and its second half, which
wraps around, the imaginary part. Source: Crandall & Fagin 1994. Inductor makes no complex kernels, so the compiled form
takes the halves apart by two real products instead, modulo z^L - 1 and z^L - c, each by real FFTs of size L:

    a[n] = c^(n/L)                                  c = 1/4
    P    = irfft(rfft(u) * rfft(k))                 first half + second half,     u = x * in_gate
    Q    = irfft(rfft(u * a) * rfft(k * a)) / a     first half + c * second half
    y    = out_gate * (Q - c * P) / (1 - c)

Every intermediate is FP32 or complex64 and the result is rounded to FP16 once (relative L2 about 2.1e-4, all of it that
rounding; the second form has about 3 times the first one's FP32 rounding).

Tensors are worked through slab by slab: a slab's rows pass through all steps while they are in cache, before the next
slab starts. An FFT of this size costs less than a pass over main memory, so that is what makes the difference: on two
cores of an AMD EPYC with 1 MiB of L2 each, medians of 30 calls, 2.3 times eager at [1, 768, 2048] and 3.7 at [4, 768,
2048]. What fits the caches as a whole gains nothing: 0.65 at [1, 96, 2048].
"""
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import dft
from ..compiled import Function, compile_graph, missing_toolchain
from ..config import SolverConfig

Operator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Elements of a slab for each thread: 0.75 MiB in complex64. With a third of it calls take a third more; with twice of
# it temporaries leave a cache of 1 MiB, and malloc gives their pages back at every call: [1, 192, 2048] took twice as
# long.
SLAB = 3 << 15
FLOAT_EXPONENT_BITS = 0x7F800000
WRAPPED = 0.25          # c: what is left of the second half in Q


def power_of_two(magnitude: torch.Tensor) -> torch.Tensor:
    """The largest power of two not above each FP32 magnitude, kept within 2^-126 .. 2^126 so that it and its
    reciprocal are both normal numbers. A NaN or an infinity gives 2^126."""
    bits = magnitude.view(torch.int32) & FLOAT_EXPONENT_BITS
    return bits.view(torch.float32).clamp(2.0**-126, 2.0**126)


def kernel_scale(k: torch.Tensor) -> torch.Tensor:
    """FP32 [channels, 1] for k [channels, length]: a power of two near max |k|, so dividing by it is exact and no
    finite k overflows or vanishes in a transform."""
    return power_of_two(k.abs().amax(-1, keepdim=True))


@functools.lru_cache(maxsize=64)
def complex_weights(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """w and conj(w), complex64 [length] each, rounded once from float64.

    Both are real copies: a lazy conj() is resolved by a dispatch key that is switched off where AOTAutograd runs an
    operator, which then multiplies by w instead.
    """
    with torch.inference_mode(False):       # they are kept, and outlive a caller's inference mode
        w = dft.weight(length).to(torch.complex64)
        return w.to(device), torch.conj_physical(w).to(device)


def complex_spectrum(k: torch.Tensor, w: torch.Tensor, w_conj: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted spectrum, complex64 [channels, length], of k [channels, length] over its scale, FP32 [channels, 1]."""
    scale = kernel_scale(k)
    return torch.fft.fft(k / scale * w), scale


def complex_rows(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, spectrum: torch.Tensor,
                 scale: torch.Tensor, w: torch.Tensor, w_conj: torch.Tensor, y: torch.Tensor) -> None:
    """Writes y, FP16 [batch, channels, length], of a slab; `spectrum` and `scale` as `complex_spectrum` gives them."""
    u = torch.fft.fft(x.float() * in_gate.float() * w)
    u *= spectrum       # in place: a new buffer for each product costs a fifth of the time in cache misses
    product = torch.fft.ifft(u)
    product *= w_conj
    y.copy_(product.real * out_gate.float() * scale)


@functools.lru_cache(maxsize=64)
def real_weights(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """a and 1 / (a (1 - c)), FP32 [length] each, rounded once from float64."""
    with torch.inference_mode(False):
        a = WRAPPED ** (torch.arange(length, dtype=torch.float64) / length)
        return a.float().to(device), (1 / (a * (1 - WRAPPED))).float().to(device)


def real_spectrum(k: torch.Tensor, weight: torch.Tensor, unweight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both spectra, complex64 [channels, 2, length // 2 + 1], of k [channels, length] over its scale; and that scale
    over the length, by which the inverse is not divided, FP32 [channels, 1]."""
    scale = kernel_scale(k)
    k = k / scale
    return torch.fft.rfft(torch.stack((k, k * weight), -2)), scale / k.shape[-1]


def real_rows(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, spectrum: torch.Tensor,
              scale: torch.Tensor, weight: torch.Tensor, unweight: torch.Tensor, y: torch.Tensor) -> None:
    """Writes y, FP16 [batch, channels, length], of a slab; `spectrum` and `scale` as `real_spectrum` gives them."""
    u = x.float() * in_gate.float()
    product = torch.fft.rfft(torch.stack((u, u * weight), -2)) * spectrum
    plain, weighted = torch.fft.irfft(product, n=x.shape[-1], norm="forward").unbind(-2)
    y.copy_((weighted * unweight - plain * (WRAPPED / (1 - WRAPPED))) * (out_gate.float() * scale))


class Form(NamedTuple):
    """One of the two formulas: weights(length, device), what they make of k, and of the rows of a slab."""

    weights: Callable[[int, torch.device], tuple[torch.Tensor, torch.Tensor]]
    spectrum: Function
    rows: Function


COMPLEX = Form(complex_weights, complex_spectrum, complex_rows)
REAL = Form(real_weights, real_spectrum, real_rows)


def convolve(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor,
             form: Form = COMPLEX) -> torch.Tensor:
    """y of the contract, FP16 as x [batch, streams, heads, length], newly allocated; arguments as `check` wants
    them."""
    batch, streams, heads, length = x.shape
    channels = streams * heads
    y = torch.empty_like(x)
    if batch == 0:
        return y
    x, in_gate, out_gate, result = (t.view(batch, channels, length) for t in (x, in_gate, out_gate, y))
    k = k.view(channels, length)
    weights = form.weights(length, k.device)
    elements = SLAB * torch.get_num_threads()
    rows = slab_step(channels, elements // length)
    depth = slab_step(batch, elements // (length * rows))
    # Autocast would send the FFTs through casts of its own.
    with torch.autocast(x.device.type, enabled=False):
        for channel in slab_starts(channels, rows):
            lanes = slice(channel, channel + rows)
            spectrum, scale = form.spectrum(k[lanes], *weights)
            for sequence in slab_starts(batch, depth):
                slab = (slice(sequence, sequence + depth), lanes)
                form.rows(x[slab], in_gate[slab], out_gate[slab], spectrum, scale, *weights, result[slab])
    return y


def slab_step(size: int, most: int) -> int:
    """The step, at most `most` and at least 1, that cuts `size` into the fewest slabs of nearly equal size."""
    count = -(-size // max(1, most))
    return -(-size // count)


def slab_starts(size: int, step: int) -> list[int]:
    """Where slabs of exactly `step` start so that they cover `size`: the last one overlaps the one before rather than
    being shorter, so that one compiled graph serves them all."""
    return [min(start, size - step) for start in range(0, size, step)]


@functools.cache
def build(config: SolverConfig, device: torch.device) -> Operator:
    """The right-angle path under a config: compiled by Inductor when the config asks for it and a C++ compiler is at
    hand (on a CPU), operator by operator otherwise, which is logged."""
    if not config.compile or missing_toolchain(device):
        return convolve
    form = REAL._replace(spectrum=compile_graph(real_spectrum, config), rows=compile_graph(real_rows, config))
    return functools.partial(convolve, form=form)
