"""Real FFTs, one row at a time: v01 to v06, and what the pair families fall back to.

v01 compiles the baseline as it stands; v02 to v05 take it to FP16 transforms, explicit products and a scale that costs
no pass of its own.
"""
from typing import Literal

import torch
from glconv.spectral.pairs import multiply

from .common import Precision, half_spectrum, real_inverse, transform_dtype


def real_fft(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor, *,
             transform: Precision = "float16", product: Literal["complex", "explicit"] = "explicit",
             scale: Literal["inverse", "gate", "spectrum"] = "gate") -> torch.Tensor:
    """y = out_gate * irfft(rfft(x * in_gate, 2L) * rfft(k, 2L)), first L positions.

    transform: precision of the FFTs. product: complex arithmetic, or real and imaginary parts spelled out, which
    Inductor can fuse. scale: where 1/2L is applied: by the inverse FFT, in the output gate, or to k's small spectrum.
    """
    dtype, size = transform_dtype(x, transform), 2 * x.shape[-1]
    u = (x * in_gate).to(dtype)
    u_spectrum, k_spectrum = half_spectrum(u), half_spectrum(k.to(dtype))
    if scale == "spectrum":
        k_spectrum = k_spectrum * (1 / size)
    if product == "complex":
        spectrum = torch.view_as_real(torch.view_as_complex(u_spectrum) * torch.view_as_complex(k_spectrum))
    else:
        spectrum = multiply(u_spectrum, k_spectrum)
    y = real_inverse(spectrum, "backward" if scale == "inverse" else "forward").float()
    if scale == "gate":
        y = y * (1 / size)
    return (y * out_gate.float()).to(x.dtype).contiguous()
