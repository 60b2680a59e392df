"""Two batch rows in one complex inverse transform: v13 to v53. The formula is in glconv/spectral/pairs.py.

`complex_pairs` packs before the forward transform, so everything between is complex (v13, v27). `packed_pairs` keeps
real forward transforms and packs the products (v14 on): in plain PyTorch, or in the Triton kernel that `packing` lays
out. What does not come in pairs, or is too long, takes the real transforms of `real.real_fft`.
"""
from typing import Literal

import torch
from glconv.spectral.graph import PACKING, pack
from glconv.spectral.pairs import Packing, multiply, pair_spectra

from . import ops  # noqa: F401  (registers the operators)
from .common import complex_inverse, half_spectrum, is_power_of_two, rows, transform_dtype
from .real import real_fft


def complex_pairs(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor, *,
                  pack_in: Literal["torch", "triton"] = "torch") -> torch.Tensor:
    """ifft(fft(u0 + i u1) * fft(k)) = (u0 * k) + i (u1 * k): the product needs no unpacking, for k is real.

    pack_in: who gates, pads with zeros and packs the pairs. Odd batches take real transforms.
    """
    batch, length, dtype = x.shape[0], x.shape[-1], transform_dtype(x)
    if batch % 2:
        return real_fft(x, in_gate, out_gate, k)
    shape = x.shape
    x, in_gate, out_gate, k = rows(x, in_gate, out_gate, k)
    if pack_in == "triton":
        z = torch.ops.glconv_graphs.gate_pairs(x, in_gate, dtype)
    else:
        u = (x * in_gate).to(dtype)
        z = torch.nn.functional.pad(torch.stack((u[0::2], u[1::2]), -1), (0, 0, 0, length))
    k = torch.nn.functional.pad(torch.stack((k, torch.zeros_like(k)), -1).to(dtype), (0, 0, 0, length))
    z, k = (torch.view_as_real(torch.fft.fft(torch.view_as_complex(t))) for t in (z, k))
    z = complex_inverse(multiply(z, k))
    y = unpacked(z, length).float() * (1 / (2 * length)) * out_gate.float()
    return y.to(x.dtype).contiguous().view(shape)


def packed_pairs(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor, *,
                 product: Literal["torch", "triton"] = "triton", scale: Literal["gate", "kernel"] = "kernel",
                 gate_precision: Literal["float16", "float32"] = "float32", odd: Literal["real", "pad"] = "pad",
                 longest: int = 8192, long_scale: Literal["gate", "spectrum"] = "spectrum", exact: bool = True,
                 unpack: Literal["inductor", "triton"] = "inductor", contiguous: bool = True,
                 packing: Packing = PACKING) -> torch.Tensor:
    """Real transforms forward, products packed in pairs, one complex inverse a pair.

    product: who multiplies, completes the Hermitian spectrum and packs. scale: 1/2L in the output gate, or in the pair
    kernel (at packing.scale_at). gate_precision: of the last multiplication. odd: odd batches above one take real
    transforms, or are padded by one signal. longest: FFT size above which real transforms are taken, 0 for none;
    long_scale: their scale. exact: sizes that are no power of two take the FP32 baseline formula. unpack: who takes the
    pair apart, gates and writes. contiguous: an explicit final .contiguous(); without it the layout of the result is
    that of out_gate, which comes first in the product.
    """
    shape, batch, length = x.shape, x.shape[0], x.shape[-1]
    size = 2 * length
    if exact and not is_power_of_two(length):
        return real_fft(x, in_gate, out_gate, k, transform="float32", product="complex", scale="inverse")
    if longest and size > longest:
        return real_fft(x, in_gate, out_gate, k, scale=long_scale)
    if batch == 1 or (batch % 2 and odd == "real"):
        return real_fft(x, in_gate, out_gate, k)

    x, in_gate, out_gate, k = rows(x, in_gate, out_gate, k)
    dtype = transform_dtype(x)
    u = (x * in_gate).to(dtype)
    if batch % 2:
        u = torch.cat((u, torch.zeros_like(u[:1])))
    u_spectrum, k_spectrum = half_spectrum(u), half_spectrum(k.to(dtype))
    factor = 1 / size if scale == "kernel" else 1.0
    if product == "triton":
        packed = pack(u_spectrum, k_spectrum, factor, packing)
    else:
        packed = pair_spectra(u_spectrum, k_spectrum, factor)
    z = complex_inverse(packed)

    factor = 1 / size if scale == "gate" else 1.0
    if unpack == "triton":
        return torch.ops.glconv_graphs.unpack_pairs(z, out_gate, factor).view(shape)
    y = unpacked(z, length)[:batch]
    if gate_precision == "float32":
        y = (out_gate.float() * (y.float() * factor)).to(x.dtype)
    else:
        y = out_gate * (y.to(x.dtype) * factor)
    return y.contiguous().view(shape) if contiguous else y.reshape(shape)


def unpacked(z: torch.Tensor, length: int) -> torch.Tensor:
    """[pairs, channels, 2L, 2] -> [2 pairs, channels, L]: real parts are even rows, imaginary parts odd ones."""
    return z[:, :, :length].permute(0, 3, 1, 2).reshape(-1, z.shape[1], length)
