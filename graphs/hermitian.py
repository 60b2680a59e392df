"""The full Hermitian spectrum and a complex inverse for each row: v11. Twice the inverse work, for no packing yet."""
import torch
from glconv.spectral.pairs import multiply

from .common import complex_inverse, half_spectrum, transform_dtype


def full_spectrum(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """As `real.real_fft` with scale in the gate; the product's bins past L are conjugates of those below."""
    length, dtype = x.shape[-1], transform_dtype(x)
    product = multiply(half_spectrum((x * in_gate).to(dtype)), half_spectrum(k.to(dtype)))
    mirrored = product[..., 1:length, :].flip(-2)
    conjugate = torch.stack((mirrored[..., 0], -mirrored[..., 1]), -1)
    z = complex_inverse(torch.cat((product, conjugate), -2))[..., :length, 0]
    return (z.float() * (1 / (2 * length)) * out_gate.float()).to(x.dtype).contiguous()
