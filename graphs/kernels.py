"""Triton kernels of single ladder steps; the pair kernel, which most steps share, is glconv's own.

Complex numbers are real tensors with a last axis of 2. Every kernel is a 1-D grid over flat elements, `TILE` a program,
with 64-bit offsets.
"""
import torch
import triton
import triton.language as tl
from glconv.spectral.kernels import load_complex, store_complex


@triton.jit
def multiply_kernel(u, k, product, total, middle, bins, CHANNEL_MAJOR: tl.constexpr, TILE: tl.constexpr):
    """product[i] = u[i] * k[channel of i, bin of i]: u flat over [batch, channels, bins], `middle` = channels, or over
    [channels, batch, bins], `middle` = batch; complex."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = index < total
    if CHANNEL_MAJOR:
        source = index // (middle * bins) * bins + index % bins
    else:
        source = index % (middle * bins)
    ur, ui = load_complex(u, index, mask, "planes", "")
    kr, ki = load_complex(k, source, mask, "planes", "")
    store_complex(product, index, mask, ur * kr - ui * ki, ur * ki + ui * kr, "planes")


@triton.jit
def gate_kernel(x, in_gate, packed, total, row, length, TILE: tl.constexpr):
    """packed[p, c, n] = (x * in_gate)[2p, c, n] + i (x * in_gate)[2p + 1, c, n] for n < length, zero up to 2 * length;
    `row` = channels * length, an even batch."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    n = index % (2 * length)
    sequence = index // (2 * length)            # p * channels + c
    channels = row // length
    first = sequence // channels * 2 * row + sequence % channels * length + n
    mask = (index < total) & (n < length)
    re = tl.load(x + first, mask, 0.0) * tl.load(in_gate + first, mask, 0.0)
    im = tl.load(x + first + row, mask, 0.0) * tl.load(in_gate + first + row, mask, 0.0)
    store_complex(packed, index, index < total, re, im, "planes")


@triton.jit
def unpack_kernel(packed, out_gate, y, total, row, length, rows, factor, TILE: tl.constexpr):
    """y[2p] and y[2p + 1] = out_gate * factor * (real, imaginary part of packed[p]), first `length` positions; y has
    `rows` = batch rows of `row` = channels * length."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)      # over [pairs, channels, length]
    mask = index < total
    pair, within = index // row, index % row
    source = (pair * (row // length) + within // length) * (2 * length) + within % length
    re, im = load_complex(packed, source, mask, "planes", "")
    first = 2 * pair * row + within
    both = mask & (2 * pair + 1 < rows)
    tl.store(y + first, (re * factor * tl.load(out_gate + first, mask, 0.0)).to(y.dtype.element_ty), mask)
    tl.store(y + first + row, (im * factor * tl.load(out_gate + first + row, both, 0.0)).to(y.dtype.element_ty), both)


def launch_multiply(u: torch.Tensor, k: torch.Tensor, product: torch.Tensor, channel_major: bool, tile: int,
                    warps: int) -> None:
    """product = u * k, complex, contiguous, into `product` (which may be u)."""
    total = u.numel() // 2
    multiply_kernel[(triton.cdiv(total, tile),)](u, k, product, total, u.shape[1], u.shape[2],
                                                 CHANNEL_MAJOR=channel_major, TILE=tile, num_warps=warps)


def launch_gate(x: torch.Tensor, in_gate: torch.Tensor, dtype: torch.dtype, tile: int = 1024) -> torch.Tensor:
    """Packed pairs [batch / 2, channels, 2L, 2] of x, in_gate [batch, channels, L]."""
    batch, channels, length = x.shape
    packed = torch.empty((batch // 2, channels, 2 * length, 2), dtype=dtype, device=x.device)
    total = packed.numel() // 2
    gate_kernel[(triton.cdiv(total, tile),)](x, in_gate, packed, total, channels * length, length, TILE=tile)
    return packed


def launch_unpack(packed: torch.Tensor, out_gate: torch.Tensor, factor: float, tile: int = 1024) -> torch.Tensor:
    """y [batch, channels, L] of packed [pairs, channels, 2L, 2] and out_gate [batch, channels, L]."""
    y = torch.empty_like(out_gate)
    batch, channels, length = out_gate.shape
    total = packed.shape[0] * channels * length
    unpack_kernel[(triton.cdiv(total, tile),)](packed, out_gate, y, total, channels * length, length, batch, factor,
                                               TILE=tile)
    return y
