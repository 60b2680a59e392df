"""The Triton kernel of the spectral path: complex product, Hermitian completion and pair packing in one pass.

The formula is in `pairs.py`. Spectra come as real tensors with a last axis of 2, FP16 or FP32; arithmetic is FP32, and
each result is rounded once, to the dtype of the spectra. One program takes `tile_pairs` batch pairs by `tile_bins` bins
of one channel, so that each kernel bin it loads serves all its pairs. Traffic a pair and channel: 2(L+1) complex
numbers read, 2L written, plus the kernel's L+1, which stays in L2.
"""
import torch
import triton
import triton.language as tl

from .pairs import Packing


@triton.jit
def load_complex(pointer, offset, mask, LAYOUT: tl.constexpr, POLICY: tl.constexpr):
    """Complex numbers at complex `offset` as FP32 (real, imaginary); zeros where masked off."""
    CACHE: tl.constexpr = POLICY if POLICY == ".cg" else ""
    EVICT: tl.constexpr = POLICY if POLICY != ".cg" else ""
    HALF: tl.constexpr = pointer.dtype.element_ty == tl.float16
    if LAYOUT == "planes":
        re = tl.load(pointer + 2 * offset, mask, 0.0, cache_modifier=CACHE, eviction_policy=EVICT)
        im = tl.load(pointer + 2 * offset + 1, mask, 0.0, cache_modifier=CACHE, eviction_policy=EVICT)
    elif LAYOUT == "interleaved":
        part = tl.arange(0, 2)
        both = tl.load(pointer + (2 * offset[:, :, None] + part[None, None, :]),
                       tl.broadcast_to(mask[:, :, None], (mask.shape[0], mask.shape[1], 2)), 0.0,
                       cache_modifier=CACHE, eviction_policy=EVICT)
        re, im = tl.split(both)
    elif HALF:
        word = tl.load(pointer.to(tl.pointer_type(tl.uint32)) + offset, mask, 0, cache_modifier=CACHE,
                       eviction_policy=EVICT)
        re = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        im = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        word = tl.load(pointer.to(tl.pointer_type(tl.uint64)) + offset, mask, 0, cache_modifier=CACHE,
                       eviction_policy=EVICT)
        re = (word & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
        im = (word >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return re.to(tl.float32), im.to(tl.float32)


@triton.jit
def store_complex(pointer, offset, mask, re, im, LAYOUT: tl.constexpr):
    """The inverse of `load_complex`."""
    HALF: tl.constexpr = pointer.dtype.element_ty == tl.float16
    re = re.to(pointer.dtype.element_ty)
    im = im.to(pointer.dtype.element_ty)
    if LAYOUT == "planes":
        tl.store(pointer + 2 * offset, re, mask)
        tl.store(pointer + 2 * offset + 1, im, mask)
    elif LAYOUT == "interleaved":
        part = tl.arange(0, 2)
        tl.store(pointer + (2 * offset[:, :, None] + part[None, None, :]), tl.join(re, im),
                 tl.broadcast_to(mask[:, :, None], (mask.shape[0], mask.shape[1], 2)))
    elif HALF:
        low = re.to(tl.uint16, bitcast=True).to(tl.uint32)
        high = im.to(tl.uint16, bitcast=True).to(tl.uint32)
        tl.store(pointer.to(tl.pointer_type(tl.uint32)) + offset, low | (high << 16), mask)
    else:
        low = re.to(tl.uint32, bitcast=True).to(tl.uint64)
        high = im.to(tl.uint32, bitcast=True).to(tl.uint64)
        tl.store(pointer.to(tl.pointer_type(tl.uint64)) + offset, low | (high << 32), mask)


@triton.jit
def _products(spectra, kernel, row, second, bins, source, valid, channel, channels, scale, SCALE_KERNEL: tl.constexpr,
              LAYOUT: tl.constexpr, SIGNAL: tl.constexpr, KERNEL: tl.constexpr):
    """A = U0 K and B = U1 K at half-spectrum bins `source`; B is zero where there is no second row."""
    kr, ki = load_complex(kernel, channel * bins + source, source < bins, LAYOUT, KERNEL)
    if SCALE_KERNEL:
        kr *= scale
        ki *= scale
    first = (row * channels + channel) * bins + source
    ur, ui = load_complex(spectra, first, valid, LAYOUT, SIGNAL)
    vr, vi = load_complex(spectra, first + channels * bins, valid & second, LAYOUT, SIGNAL)
    ar, ai = ur * kr - ui * ki, ur * ki + ui * kr
    br, bi = vr * kr - vi * ki, vr * ki + vi * kr
    if not SCALE_KERNEL:
        ar, ai, br, bi = ar * scale, ai * scale, br * scale, bi * scale
    return ar, ai, br, bi


@triton.jit
def pair_kernel(spectra, kernel, packed, batch, channels, length, scale,
                STATIC_CHANNELS: tl.constexpr, STATIC_LENGTH: tl.constexpr, TILE_PAIRS: tl.constexpr,
                TILE_BINS: tl.constexpr, EMIT: tl.constexpr, NYQUIST: tl.constexpr, LAYOUT: tl.constexpr,
                SCALE_KERNEL: tl.constexpr, SIGNAL: tl.constexpr, KERNEL: tl.constexpr):
    """spectra [batch, channels, L + 1, 2], kernel [channels, L + 1, 2] -> packed [pairs, channels, 2L, 2]; 1-D grid of
    bin tiles (fastest), channels, pair tiles."""
    if STATIC_LENGTH:
        length = STATIC_LENGTH
        channels = STATIC_CHANNELS
    bins = length + 1
    lanes = length if NYQUIST == "dc" else bins
    if EMIT == "output":
        lanes = 2 * length
    tiles = tl.cdiv(lanes, TILE_BINS)
    program = tl.program_id(0)
    channel = ((program // tiles) % channels).to(tl.int64)
    pair = (program // tiles // channels).to(tl.int64) * TILE_PAIRS + tl.arange(0, TILE_PAIRS)[:, None]
    lane = (program % tiles) * TILE_BINS + tl.arange(0, TILE_BINS)[None, :]
    row = 2 * pair
    valid = (lane < lanes) & (row < batch)
    second = row + 1 < batch
    target = (pair * channels + channel) * (2 * length)
    if EMIT == "output":
        source = tl.where(lane <= length, lane, 2 * length - lane)
        ar, ai, br, bi = _products(spectra, kernel, row, second, bins, source, valid, channel, channels, scale,
                                   SCALE_KERNEL, LAYOUT, SIGNAL, KERNEL)
        sign = tl.where(lane <= length, 1.0, -1.0)
        store_complex(packed, target + lane, valid, ar - sign * bi, sign * ai + br, LAYOUT)
    else:
        ar, ai, br, bi = _products(spectra, kernel, row, second, bins, lane, valid, channel, channels, scale,
                                   SCALE_KERNEL, LAYOUT, SIGNAL, KERNEL)
        store_complex(packed, target + lane, valid, ar - bi, ai + br, LAYOUT)
        mirrored = valid & (lane > 0) & (lane < length)
        store_complex(packed, target + 2 * length - lane, mirrored, ar + bi, br - ai, LAYOUT)
        if NYQUIST == "dc":
            is_dc = valid & (lane == 0)
            ar, ai, br, bi = _products(spectra, kernel, row, second, bins, tl.where(lane == 0, length, bins), is_dc,
                                       channel, channels, scale, SCALE_KERNEL, LAYOUT, SIGNAL, KERNEL)
            store_complex(packed, target + length + lane, is_dc, ar - bi, ai + br, LAYOUT)


def launch_pairs(spectra: torch.Tensor, kernel: torch.Tensor, scale: float, packing: Packing) -> torch.Tensor:
    """Z [ceil(batch/2), channels, 2L, 2] of contiguous spectra [batch, channels, L + 1, 2] and kernel [channels, L + 1,
    2] of one dtype (FP16 or FP32), on the current stream of their device. See `pairs.pair_spectra`."""
    batch, channels, bins, _ = spectra.shape
    length, pairs = bins - 1, (batch + 1) // 2
    packed = torch.empty((pairs, channels, 2 * length, 2), dtype=spectra.dtype, device=spectra.device)
    lanes = 2 * length if packing.emit == "output" else length + (packing.nyquist == "lane")
    grid = (triton.cdiv(lanes, packing.tile_bins) * channels * triton.cdiv(pairs, packing.tile_pairs),)
    pair_kernel[grid](
        spectra, kernel, packed, batch, channels, length, scale,
        STATIC_CHANNELS=channels if packing.static_sizes else 0, STATIC_LENGTH=length if packing.static_sizes else 0,
        TILE_PAIRS=packing.tile_pairs, TILE_BINS=packing.tile_bins, EMIT=packing.emit, NYQUIST=packing.nyquist,
        LAYOUT=packing.layout, SCALE_KERNEL=packing.scale_at == "kernel", SIGNAL=packing.signal_policy,
        KERNEL=packing.kernel_policy, num_warps=packing.warps, num_stages=packing.stages)
    return packed
