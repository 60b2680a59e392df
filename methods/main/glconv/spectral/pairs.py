"""Pair packing: two real results as the real and imaginary part of one complex inverse transform.

For two batch rows with half spectra U0, U1 and their channel's kernel spectrum K, both of real signals of size 2L,

    A = U0 K,  B = U1 K                       bins 0 .. L, by conjugate symmetry all there is
    Z[j]      = A[j] + i B[j]                 0 <= j <= L
    Z[2L - j] = conj(A[j]) + i conj(B[j])     1 <= j <  L

and the complex inverse of Z is ifft(A) + i ifft(B) with both parts real. This file holds the formula in plain PyTorch,
which is the CPU implementation of `glconv::pair_spectra`; `kernels.py` holds the Triton kernel, and `Packing` how that
is laid out. Complex numbers are real tensors with a last axis of 2 (real, imaginary).
"""
from dataclasses import dataclass

import torch

LAYOUTS = ("planes", "interleaved", "word")
EMITS = ("output", "pair")
NYQUIST = ("lane", "dc")
SCALE_AT = ("kernel", "output")
POLICIES = ("", ".cg", "evict_first", "evict_last")


@dataclass(frozen=True)
class Packing:
    """How the pair kernel is tiled and how it touches memory; none of it changes the formula."""

    tile_pairs: int = 1         # batch pairs a program; more than one reuses each kernel bin
    tile_bins: int = 512        # frequency bins a program, a power of two
    warps: int = 8
    stages: int = 3             # Triton's num_stages
    emit: str = "pair"          # a lane makes: "output" one bin of Z; "pair" Z[j] and Z[2L - j] from one load
    nyquist: str = "dc"         # with emit "pair", bin L is done by: "lane" one of its own; "dc" the lane of bin 0
    layout: str = "interleaved" # a complex number moves as: "planes" two parts; "interleaved" a run of 2; "word" one
    scale_at: str = "kernel"    # the scale multiplies: "kernel" K before the products; "output" Z after them
    signal_policy: str = ""     # cache hint of loads of U: "", ".cg", "evict_first", "evict_last"
    kernel_policy: str = ""     # the same for K
    static_sizes: bool = False  # length and channels as constants of the kernel: one kernel a shape

    def __post_init__(self) -> None:
        for name, allowed in (("layout", LAYOUTS), ("emit", EMITS), ("nyquist", NYQUIST), ("scale_at", SCALE_AT),
                              ("signal_policy", POLICIES), ("kernel_policy", POLICIES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; want one of {', '.join(map(repr, allowed))}")
        for name in ("tile_pairs", "tile_bins", "warps"):
            value = getattr(self, name)
            if type(value) is not int or value < 1 or value & (value - 1):
                raise ValueError(f"{name} is {value!r}; want a power of two, at least 1")


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The complex product of two real tensors [..., 2], broadcast, in their dtype."""
    ar, ai, br, bi = a[..., 0], a[..., 1], b[..., 0], b[..., 1]
    return torch.stack((ar * br - ai * bi, ar * bi + ai * br), -1)


def pair_spectra(spectra: torch.Tensor, kernel: torch.Tensor, scale: float) -> torch.Tensor:
    """Z [ceil(batch/2), channels, 2L, 2] of half spectra [batch, channels, L + 1, 2] and kernel [channels, L + 1, 2],
    times `scale`, in the dtype of `spectra` (FP16, FP32 or FP64; FP16 is widened and rounded once). An odd last row is
    paired with zeros."""
    batch, bins = spectra.shape[0], spectra.shape[2]
    wide = torch.promote_types(spectra.dtype, torch.float32)
    product = multiply(spectra.to(wide), kernel.to(wide) * scale)
    if batch % 2:
        product = torch.cat((product, torch.zeros_like(product[:1])))
    ar, ai, br, bi = product[0::2, ..., 0], product[0::2, ..., 1], product[1::2, ..., 0], product[1::2, ..., 1]
    positive = torch.stack((ar - bi, ai + br), -1)
    negative = torch.stack((ar + bi, br - ai), -1)[:, :, 1:bins - 1].flip(2)
    return torch.cat((positive, negative), 2).to(spectra.dtype)
