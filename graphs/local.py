"""The spectral product in a Triton kernel of its own: v08 to v10. One row at a time, real transforms both ways."""
from typing import Literal

import torch

from . import ops  # noqa: F401  (registers the operators)
from .common import rows, transform_dtype


def local_product(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor, *,
                  in_place: bool = False, order: Literal["batch", "channel"] = "batch", tile: int = 1024,
                  warps: int = 4) -> torch.Tensor:
    """As `real.real_fft` with scale in the gate, and the product in Triton.

    in_place: over the spectrum of u, which the operator then makes itself. order: whether rows inside run batch by
    batch, or channel by channel, so that rows that share a kernel spectrum are neighbours. tile: complex numbers a
    program.
    """
    shape, length = x.shape, x.shape[-1]
    x, in_gate, out_gate, k = rows(x, in_gate, out_gate, k)
    dtype = transform_dtype(x)
    u = (x * in_gate).to(dtype)
    if order == "channel":
        u = u.transpose(0, 1).contiguous()
    k_spectrum = torch.fft.rfft(k.to(dtype), n=2 * length)
    layout = (order == "channel", tile, warps)
    if in_place:
        product = torch.ops.glconv_graphs.multiplied_spectra_of(u, k_spectrum, *layout)
    else:
        product = torch.ops.glconv_graphs.multiply_spectra(torch.fft.rfft(u, n=2 * length), k_spectrum, *layout)
    y = torch.fft.irfft(product, n=2 * length, norm="forward")[..., :length]
    if order == "channel":
        y = y.transpose(0, 1)
    y = y.float() * (1 / (2 * length)) * out_gate.float()
    return y.to(x.dtype).contiguous().view(shape)
