"""Small pieces that every family shares."""
from typing import Literal

import torch

Precision = Literal["float16", "float32"]


def transform_dtype(x: torch.Tensor, wanted: Precision = "float16") -> torch.dtype:
    """The precision a transform of x [..., length] can have: FP16 on CUDA for powers of two; else FP32 stands in."""
    length = x.shape[-1]
    if wanted == "float16" and x.device.type == "cuda" and is_power_of_two(length):
        return torch.float16
    return torch.float32


def is_power_of_two(length: int) -> bool:
    return length & (length - 1) == 0


def half_spectrum(u: torch.Tensor) -> torch.Tensor:
    """rfft of twice the length, zero-padded: [..., L] -> [..., L + 1, 2] (real, imaginary) in the dtype of u."""
    return torch.view_as_real(torch.fft.rfft(u, n=2 * u.shape[-1]))


def complex_inverse(spectrum: torch.Tensor) -> torch.Tensor:
    """Unnormalised inverse FFT of [..., n, 2], as [..., n, 2]."""
    return torch.view_as_real(torch.fft.ifft(torch.view_as_complex(spectrum), norm="forward"))


def real_inverse(spectrum: torch.Tensor, norm: str = "forward") -> torch.Tensor:
    """Inverse real FFT of a half spectrum [..., L + 1, 2], its first L positions; norm "forward" leaves out 1/2L."""
    length = spectrum.shape[-2] - 1
    return torch.fft.irfft(torch.view_as_complex(spectrum), n=2 * length, norm=norm)[..., :length]


def rows(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Streams and heads as one axis of channels: [.., streams, heads, L] -> [.., channels, L]."""
    return tuple(t.flatten(-3, -2) for t in tensors)
