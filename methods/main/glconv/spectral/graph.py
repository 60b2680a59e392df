"""The spectral path: native FFTs of size 2L, two batch rows to one complex inverse. What the published solver does.

    u = x * in_gate                                    FP16, each row over a power of two near its largest magnitude
    U = rfft(u, 2L)                                    FP16
    K = rfft(k, 2L)                                    FP32, k over a power of two near its norm; K rounded to FP16 once
    Z = pair_spectra(U, K)                             one Triton kernel; K is scaled before the products
    z = unnormalised complex inverse of Z              rows 2p and 2p + 1 are its real and imaginary part
    y = out_gate * z, rescaled                         unpacking, gate and cast in one Inductor kernel

Range. An FFT of size 2L grows a constant signal by L, so FP16 transforms of plain inputs overflow early (x = 40 at
L = 2048) and lose small ones to subnormals. All scales are powers of two, so they cost no accuracy: with

    |u| < 2^14 / L,   |k|_2 < 32,   K scaled by 2^-(7 + ceil(log2(L) / 2))

partial sums of the forward transform stay below 2^15 (|u|_1 <= L max|u|) and those of the inverse below 2^15 as well
(|Z|_1 <= |U|_2 |K|_2 for each of two rows, Cauchy-Schwarz): nothing overflows for any finite input whose result fits
FP16, and small inputs are as accurate as large ones. A row's own scale also keeps a loud row of a pair from drowning a
quiet one, and a row with a NaN or an infinity becomes NaN alone: zeros stand in for it in the transform it shares.

Accuracy. k's transform is 1/batch of the work, so it is in FP32 and K has one rounding; the errors left are those of
the transforms of u and back. With k cast and transformed in FP16 an H200 gave a relative L2 of 2.21e-3 at L = 2048
(uniform gates, decaying kernel). An emulation that reproduces this (tests/half_fft.py) gives 1.8e-3 with k in FP32, and
with normal gates and a white kernel 2.3e-3, before 3.0e-3: white noise of 2L positions leaves half of the result's
energy and half of the errors' in the L that are kept, a decaying kernel all of the result's. Butterflies with exact
twiddles give 1.1e-3 and 1.5e-3; cuFFT's half transforms err more. With k in FP32 the H200 gives
1.78e-3 where the emulation gives 1.8e-3.

FP16 transforms exist on CUDA and for powers of two only; other sizes, and the CPU, use FP32 throughout.
"""
import functools
import math

import torch

from ..compiled import Function, compile_graph, missing_toolchain
from ..config import SolverConfig
from .pairs import Packing, multiply
from .right_angle import Operator, power_of_two

# Lengths with FP16 transforms under transform_dtype: auto. FP16 rounding grows with the number of FFT stages.
SHORTEST_FP16, LONGEST_FP16 = 32, 32768
PACKING = Packing()


def normalised_rows(x: torch.Tensor, in_gate: torch.Tensor, peak: float,
                    dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x * in_gate of [batch, channels, length] in `dtype`, each row brought below `peak` by a power of two, and the
    FP32 factors [batch, channels, 1] that undo it. A row that is not finite gives zeros and the factor NaN."""
    u = x.float() * in_gate.float()
    largest = u.abs().amax(-1, keepdim=True)
    finite = largest < math.inf
    factor = power_of_two(largest).clamp(2.0**-60, 2.0**60) * (2 / peak)
    u = torch.where(finite, u / factor, 0.0).to(dtype)
    return u, torch.where(finite, factor, math.nan)


def normalised_kernel(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 k [channels, length], each channel over powers of two so that its norm is below 32, and the FP32 factors
    [channels, 1] that undo it."""
    largest = power_of_two(k.abs().amax(-1, keepdim=True))
    k = k / largest
    norm = power_of_two((k * k).sum(-1, keepdim=True).sqrt()).clamp_min(2.0**-60)   # k = 0 divides by no zero
    return k * (16 / norm), largest * (norm / 16)


def half_spectrum(u: torch.Tensor) -> torch.Tensor:
    """rfft of size twice the length, zero-padded: [..., length] -> [..., length + 1, 2] in the dtype of u."""
    return torch.view_as_real(torch.fft.rfft(u, n=2 * u.shape[-1]))


def scales(length: int) -> tuple[float, float, float]:
    """(peak of a normalised row, scale of the kernel spectrum, factor that undoes that scale and the missing 1/2L)."""
    peak = 2.0**(14 - math.ceil(math.log2(length)))
    scale = 2.0**-(7 + math.ceil(math.log2(length) / 2))
    return peak, scale, 1 / (2 * length * scale)


def spectral(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor, dtype: torch.dtype,
             packing: Packing = PACKING) -> torch.Tensor:
    """y of the contract, with transforms in `dtype`, torch.float16 or torch.float32."""
    batch, streams, heads, length = x.shape
    channels = streams * heads
    x, in_gate, out_gate = (t.view(batch, channels, length) for t in (x, in_gate, out_gate))
    peak, scale, undo = scales(length)

    u, row_factor = normalised_rows(x, in_gate, peak, dtype)
    kernel, kernel_factor = normalised_kernel(k.view(channels, length))
    u_spectrum, k_spectrum = half_spectrum(u), half_spectrum(kernel).to(dtype)
    if batch == 1:      # no second row: one real inverse
        product = torch.view_as_complex(multiply(u_spectrum, k_spectrum * scale))
        y = torch.fft.irfft(product, n=2 * length, norm="forward")[..., :length]
    else:
        packed = pack(u_spectrum, k_spectrum, scale, packing)
        z = torch.view_as_real(torch.fft.ifft(torch.view_as_complex(packed), norm="forward"))
        y = z[:, :, :length].permute(0, 3, 1, 2).reshape(-1, channels, length)[:batch]
    y = y.float() * out_gate.float() * row_factor * (kernel_factor * undo)
    return y.to(x.dtype).contiguous().view(batch, streams, heads, length)


def spectral_graph(dtype: torch.dtype, packing: Packing = PACKING) -> Function:
    """`spectral` with its transforms in `dtype`, as a function of the four tensors."""
    def spectral_in(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return spectral(x, in_gate, out_gate, k, dtype, packing)

    return spectral_in


@functools.cache
def compiled(config: SolverConfig) -> Function:
    """`spectral` compiled under a config: one for every length and precision, so recompile_limit counts them all."""
    return compile_graph(spectral, config)


def pack(spectra: torch.Tensor, kernel: torch.Tensor, scale: float, packing: Packing) -> torch.Tensor:
    """`glconv::pair_spectra` laid out as `packing` says. See `pairs.pair_spectra`."""
    return torch.ops.glconv.pair_spectra(
        spectra, kernel, scale, packing.tile_pairs, packing.tile_bins, packing.warps, packing.stages, packing.emit,
        packing.nyquist, packing.layout, packing.scale_at, packing.signal_policy, packing.kernel_policy,
        packing.static_sizes)


def transform_dtype(length: int, device: torch.device, config: SolverConfig) -> torch.dtype:
    """The precision of the transforms. Raises ValueError where config asks for FP16 and it does not exist."""
    power = length & (length - 1) == 0
    if config.transform_dtype == "float16":
        if device.type != "cuda" or not power:
            raise ValueError(f"transform_dtype is float16 with length {length} on {device}; want a CUDA device and a "
                             "length that is a power of two, or transform_dtype: auto, float32")
        return torch.float16
    suited = device.type == "cuda" and power and SHORTEST_FP16 <= length <= LONGEST_FP16
    return torch.float16 if config.transform_dtype == "auto" and suited else torch.float32


def build(config: SolverConfig, length: int, device: torch.device) -> Operator:
    """The spectral path for one length and device: one compiled graph a shape, or uncompiled where the config says so
    or Inductor has no C++ compiler (on a CPU). Raises ValueError as `transform_dtype` does."""
    dtype = transform_dtype(length, device, config)
    graph = spectral if missing_toolchain(device) else compiled(config)

    def call(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        if not torch.is_autocast_enabled(x.device.type):
            return graph(x, in_gate, out_gate, k, dtype)
        with torch.autocast(x.device.type, enabled=False):      # its casts refuse FP16 transforms
            return graph(x, in_gate, out_gate, k, dtype)

    return call
