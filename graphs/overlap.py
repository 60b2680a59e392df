"""Overlap-add over two blocks with FFTs of the sequence's length instead of twice it: v07.

Half the FFT size, but four forward and two inverse transforms of it instead of two and one of the full size.
"""
import torch
from glconv.spectral.pairs import multiply

from .common import half_spectrum, real_inverse, transform_dtype


def overlap_add(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """With u = [u0, u1] and k = [k0, k1] cut at half the length:

        y0 = head(u0 * k0),  y1 = tail(u0 * k0) + head(u0 * k1 + u1 * k0)
    """
    length, dtype = x.shape[-1], transform_dtype(x)
    block = (length + 1) // 2
    u, k = (x * in_gate).to(dtype), k.to(dtype)
    if length % 2:
        u, k = torch.nn.functional.pad(u, (0, 1)), torch.nn.functional.pad(k, (0, 1))
    u0, u1, k0, k1 = (half_spectrum(part) for part in (*u.split(block, -1), *k.split(block, -1)))
    first = torch.fft.irfft(torch.view_as_complex(multiply(u0, k0)), n=2 * block, norm="forward").float()
    second = real_inverse(multiply(u0, k1) + multiply(u1, k0)).float()
    y = torch.cat((first[..., :block], first[..., block:] + second), -1)[..., :length]
    return (y * (1 / (2 * block)) * out_gate.float()).to(x.dtype).contiguous()
