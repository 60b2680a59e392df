"""Fused gated causal convolution in plain Triton, sm_80 and later: one launch, every input read once.

Draft docstring, replaced below.
"""
import math

import torch
import triton
import triton.language as tl

from .. import dft
from ..plan import Plan, Row


@triton.jit
def pack(r, i, PACKED: tl.constexpr):
    """A complex FP16 tile as one value: int32 words when packed, a tuple otherwise.

    In a packed tile the first of two neighbouring elements holds both real parts, the second both imaginary parts.
    Kept as FP16, each element would take a whole register wherever a loop carries it.
    """
    if PACKED:
        return tl.inline_asm_elementwise("mov.b32 $0, $2; mov.b32 $1, $3;", "=&r,=r,r,r", [r, i], dtype=tl.int32,
                                         is_pure=True, pack=2)
    else:
        return r, i


@triton.jit
def narrow(r, i, PACKED: tl.constexpr):
    """FP32 parts to a packed FP16 tile."""
    if PACKED:
        return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $3, $2; cvt.rn.f16x2.f32 $1, $5, $4;", "=&r,=r,f,f,f,f",
                                         [r, i], dtype=tl.int32, is_pure=True, pack=2)
    else:
        return r.to(tl.float16), i.to(tl.float16)


@triton.jit
def rescale(tiles, FACTOR: tl.constexpr, like, COUNT: tl.constexpr, PACKED: tl.constexpr):
    """COUNT packed tiles, each times a power of two that FP16 holds."""
    result = ()
    for d in tl.static_range(COUNT):
        if PACKED:
            halves = tl.full(like.shape, FACTOR, tl.float16)
            result = result + (tl.inline_asm_elementwise("mul.rn.f16x2 $0, $2, $4; mul.rn.f16x2 $1, $3, $4;", "=&r,=r,r,r,r",
                                                         [tiles[d], halves], dtype=tl.int32, is_pure=True, pack=2),)
        else:
            result = result + ((tiles[d][0] * FACTOR, tiles[d][1] * FACTOR),)
    return result


@triton.jit
def zeros(like, PACKED: tl.constexpr):
    """A packed tile of zeros."""
    if PACKED:
        return tl.zeros(like.shape, tl.int32)
    else:
        return tl.zeros(like.shape, tl.float16), tl.zeros(like.shape, tl.float16)


@triton.jit
def reset(condition, w, PACKED: tl.constexpr):
    """Zeros where the scalar condition holds; a product would let NaN through."""
    if PACKED:
        return tl.where(condition, 0, w)
    else:
        return tl.where(condition, 0.0, w[0]), tl.where(condition, 0.0, w[1])


@triton.jit
def parts(w, PACKED: tl.constexpr):
    """A packed tile as FP16 (real, imaginary), the operands of a dot."""
    if PACKED:
        return tl.inline_asm_elementwise("mov.b32 $0, $2; mov.b32 $1, $3;", "=&r,=r,r,r", [w],
                                         dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        return w


@triton.jit
def multiply(a, w, PACKED: tl.constexpr):
    """a w, packed tiles."""
    if PACKED:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, s;
            mul.rn.f16x2 t, $3, $5; neg.f16x2 t, t; fma.rn.f16x2 $0, $2, $4, t;
            mul.rn.f16x2 s, $3, $4; fma.rn.f16x2 $1, $2, $5, s; }""",
            "=&r,=&r,r,r,r,r", [a, w], dtype=tl.int32, is_pure=True, pack=2)
    else:
        return a[0] * w[0] - a[1] * w[1], a[0] * w[1] + a[1] * w[0]


@triton.jit
def multiply_conjugate(a, w, PACKED: tl.constexpr):
    """a conj(w), packed tiles."""
    if PACKED:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, s;
            mul.rn.f16x2 t, $3, $5; fma.rn.f16x2 $0, $2, $4, t;
            mul.rn.f16x2 s, $2, $5; neg.f16x2 s, s; fma.rn.f16x2 $1, $3, $4, s; }""",
            "=&r,=&r,r,r,r,r", [a, w], dtype=tl.int32, is_pure=True, pack=2)
    else:
        return a[0] * w[0] + a[1] * w[1], a[1] * w[0] - a[0] * w[1]


@triton.jit
def multiply_add(a, w, p, PACKED: tl.constexpr):
    """p + a w, packed tiles."""
    if PACKED:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, n;
            neg.f16x2 n, $3;
            fma.rn.f16x2 t, n, $5, $6; fma.rn.f16x2 $0, $2, $4, t;
            fma.rn.f16x2 t, $3, $4, $7; fma.rn.f16x2 $1, $2, $5, t; }""",
            "=&r,=&r,r,r,r,r,r,r", [a, w, p], dtype=tl.int32, is_pure=True, pack=2)
    else:
        return p[0] + (a[0] * w[0] - a[1] * w[1]), p[1] + (a[0] * w[1] + a[1] * w[0])


@triton.jit
def rotate(r, i, w, PACKED: tl.constexpr):
    """(r + ii) w of FP32 parts and a packed tile: the product in FP32, then FP16 parts.

    Unpacked inside the assembly, w cannot be hoisted out of a loop as FP32, where it would take twice the registers.
    """
    if PACKED:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 h, l; .reg .f32 c0, c1, d0, d1, x0, x1, y0, y1;
            mov.b32 {l, h}, $6; cvt.f32.f16 c0, l; cvt.f32.f16 c1, h;
            mov.b32 {l, h}, $7; cvt.f32.f16 d0, l; cvt.f32.f16 d1, h;
            mul.f32 x0, $4, d0; neg.f32 x0, x0; fma.rn.f32 x0, $2, c0, x0;
            mul.f32 x1, $5, d1; neg.f32 x1, x1; fma.rn.f32 x1, $3, c1, x1;
            mul.f32 y0, $4, c0; fma.rn.f32 y0, $2, d0, y0;
            mul.f32 y1, $5, c1; fma.rn.f32 y1, $3, d1, y1;
            cvt.rn.f16x2.f32 $0, x1, x0; cvt.rn.f16x2.f32 $1, y1, y0; }""",
            "=&r,=&r,f,f,f,f,r,r", [r, i, w], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        c = w[0].to(tl.float32)
        d = w[1].to(tl.float32)
        return (r * c - i * d).to(tl.float16), (r * d + i * c).to(tl.float16)


@triton.jit
def columns(r, i, f2r, f2i):
    """(r + ii) F2 of FP16 parts, FP32 sums."""
    re = tl.dot(r, f2r)
    re = tl.dot(-i, f2i, re)
    im = tl.dot(r, f2i)
    im = tl.dot(i, f2r, im)
    return re, im


@triton.jit
def forward(u, f1r, f1i, f2r, f2i, twiddle, PACKED: tl.constexpr):
    """Packed spectrum ((F1 u) T) F2 of a real FP16 tile."""
    ur = tl.dot(f1r, u)
    ui = tl.dot(f1i, u)
    wr, wi = parts(multiply(narrow(ur, ui, PACKED), twiddle, PACKED), PACKED)
    ar, ai = columns(wr, wi, f2r, f2i)
    return narrow(ar, ai, PACKED)


@triton.jit
def inverse(p, f1r, f1i, f2r, f2i, twiddle, PACKED: tl.constexpr):
    """FP32 Re(conj(F1) ((p conj(F2)) conj(T))) of a packed tile."""
    pr, pi = parts(p, PACKED)
    vr = tl.dot(pr, f2r)
    vr = tl.dot(pi, f2i, vr)
    vi = tl.dot(-pr, f2i)
    vi = tl.dot(pi, f2r, vi)
    zr, zi = parts(multiply_conjugate(narrow(vr, vi, PACKED), twiddle, PACKED), PACKED)
    y = tl.dot(f1r, zr)
    return tl.dot(f1i, zi, y)


@triton.jit
def spectrum(k, f1r, f1i, f2r, f2i, twiddle, PACKED: tl.constexpr):
    """FP32 spectrum of a tile of k, |k| <= 8, which goes in as two FP16 halves."""
    high = k.to(tl.float16)
    low = (k - high.to(tl.float32)).to(tl.float16)
    ur = tl.dot(f1r, high)
    ur = tl.dot(f1r, low, ur)
    ui = tl.dot(f1i, high)
    ui = tl.dot(f1i, low, ui)
    wr, wi = rotate(ur, ui, twiddle, PACKED)
    return columns(wr, wi, f2r, f2i)


@triton.jit
def largest(tile):
    """Maximum of a tile, a scalar."""
    return tl.max(tl.max(tile, 1), 0)


@triton.jit
def fetch(pointer, offsets, row, FULL: tl.constexpr):
    """Values of a row at `offsets`, zeros past its end."""
    if FULL:
        return tl.load(pointer + offsets)
    else:
        return tl.load(pointer + offsets, mask=offsets < row, other=0.0)


@triton.jit
def power_of_two(exponent):
    """FP32 2^(exponent - 127) of a biased exponent from 1 to 254."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def biased_exponent(value):
    """Of a positive FP32 scalar, rounded down."""
    return value.to(tl.int32, bitcast=True) >> 23


@triton.jit
def sample(y):
    """Sums of y [N1, N2] over eight-column groups and pairs, for every other group of eight rows.

    All the summands lie in one thread's registers. A value that is not finite fills its whole column of y, so half of
    the rows see it.
    """
    N1: tl.constexpr = y.shape[0]
    N2: tl.constexpr = y.shape[1]
    half, _ = tl.split(tl.permute(tl.reshape(y, (N1 // 16, 2, 8, N2)), (0, 2, 3, 1)))
    return tl.sum(tl.sum(tl.reshape(half, (N1 // 2, N2 // 8, 4, 2)), 1), 2)


@triton.jit
def put(pointer, offsets, row, value, again, FULL: tl.constexpr):
    """Stores the row's part of a tile; the second time only where the value there is not finite."""
    if again:
        before = fetch(pointer, offsets, row, FULL)
        value = tl.where(before - before == 0.0, before, value)
        if FULL:
            tl.store(pointer + offsets, value)
        else:
            tl.store(pointer + offsets, value, mask=offsets < row)
    else:
        if FULL:
            tl.store(pointer + offsets, value)
        else:
            tl.store(pointer + offsets, value, mask=offsets < row)


@triton.jit
def sequences(again, x_p, ig_p, og_p, y_p, start, count, channels, c, row, kernel, scale, f1r, f1i, f2r, f2i, twiddle, o12,
              BLOCKS: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr,
              UNROLL: tl.constexpr):
    """Rows start, ..., start + count - 1 of the batch in channel c. Returns a sum that is finite when every y is."""
    N: tl.constexpr = f1r.shape[0] * f2r.shape[0]
    total = tl.zeros([f1r.shape[0] // 2, 4], tl.float32)
    if UNROLL:
        for i in tl.range(0, count, num_stages=STAGES):
            base = ((start + i).to(tl.int64) * channels + c) * row
            ahead = ()
            for j in tl.static_range(BLOCKS):
                at = j * N + o12
                x = fetch(x_p + base, at, row, FULL)
                ig = fetch(ig_p + base, at, row, FULL)
                og = fetch(og_p + base, at, row, FULL)
                u = forward(x * ig, f1r, f1i, f2r, f2i, twiddle, PACKED)
                sums = ()
                for d in tl.static_range(BLOCKS - j):
                    if j == 0:
                        sums = sums + (multiply(u, kernel[d], PACKED),)
                    else:
                        sums = sums + (multiply_add(u, kernel[d], ahead[d], PACKED),)
                ahead = sums[1:]
                y = inverse(sums[0], f1r, f1i, f2r, f2i, twiddle, PACKED)
                total += sample(y)
                put(y_p + base, at, row, (y * og.to(tl.float32) * scale).to(tl.float16), again, FULL)
    else:
        ahead = ()
        for d in tl.static_range(1, BLOCKS):
            ahead = ahead + (zeros(o12, PACKED),)
        for i in tl.range(0, count * BLOCKS, num_stages=STAGES):
            base = ((start + i // BLOCKS).to(tl.int64) * channels + c) * row
            j = i % BLOCKS
            at = j * N + o12
            x = fetch(x_p + base, at, row, FULL)
            ig = fetch(ig_p + base, at, row, FULL)
            og = fetch(og_p + base, at, row, FULL)
            u = forward(x * ig, f1r, f1i, f2r, f2i, twiddle, PACKED)
            sums = ()
            for d in tl.static_range(BLOCKS - 1):
                sums = sums + (multiply_add(u, kernel[d], reset(j == 0, ahead[d], PACKED), PACKED),)
            sums = sums + (multiply(u, kernel[BLOCKS - 1], PACKED),)
            ahead = sums[1:]
            y = inverse(sums[0], f1r, f1i, f2r, f2i, twiddle, PACKED)
            total += sample(y)
            put(y_p + base, at, row, (y * og.to(tl.float32) * scale).to(tl.float16), again, FULL)
    return total


@triton.jit(do_not_specialize=["batch", "channels", "units"])
def right_angle_kernel(
        x_p, ig_p, og_p, k_p, y_p, f1r_p, f1i_p, f2r_p, f2i_p, tr_p, ti_p, batch, channels, units, gain,
        N1: tl.constexpr, N2: tl.constexpr, BLOCKS: tl.constexpr, FULL: tl.constexpr, ALIGN: tl.constexpr,
        STAGES: tl.constexpr, PACKED: tl.constexpr, UNROLL: tl.constexpr, LOWER: tl.constexpr):
    """One program: a contiguous share of the channel-major list of sequences. The length is units*ALIGN."""
    i1 = tl.arange(0, N1)
    i2 = tl.arange(0, N2)
    o11 = i1[:, None] * N1 + i1[None, :]
    o22 = i2[:, None] * N2 + i2[None, :]
    o12 = i1[:, None] * N2 + i2[None, :]
    f1r = tl.load(f1r_p + o11)
    f1i = tl.load(f1i_p + o11)
    f2r = tl.load(f2r_p + o22)
    f2i = tl.load(f2i_p + o22)
    twiddle = pack(tl.load(tr_p + o12), tl.load(ti_p + o12), PACKED)

    N: tl.constexpr = N1 * N2
    if FULL:
        row = N * BLOCKS
    else:
        row = units * ALIGN
    total = batch.to(tl.int64) * channels
    begin = tl.program_id(0) * total // tl.num_programs(0)
    end = (tl.program_id(0) + 1) * total // tl.num_programs(0)
    first_channel = (begin // batch).to(tl.int32)
    start = (begin % batch).to(tl.int32)
    left = (end - begin).to(tl.int32)
    for step in tl.range(0, (start + left + batch - 1) // batch, num_stages=1):
        c = first_channel + step
        count = tl.minimum(batch - start, left)
        left -= count
        taps = k_p + c.to(tl.int64) * row
        peak = largest(tl.abs(fetch(taps, o12, row, FULL)))
        for d in tl.range(1, BLOCKS, num_stages=1):     # not unrolled: all of k would then stay in registers
            peak = tl.maximum(peak, largest(tl.abs(fetch(taps, d * N + o12, row, FULL))))
        # Biased exponents 27 to 252 keep the reciprocal a normal number.
        height = tl.minimum(tl.maximum(biased_exponent(peak), 27), 252)
        energy = 0.0
        for d in tl.range(0, BLOCKS, num_stages=1):
            k = fetch(taps, d * N + o12, row, FULL) * power_of_two(254 - height)
            energy += tl.sum(tl.sum(k * k, 1), 0)
        level = tl.minimum(height + tl.maximum(biased_exponent(tl.sqrt(energy * (1.0 / N))), 119) - 128, 252)
        kernel = ()
        for d in tl.static_range(BLOCKS):
            kernel = kernel + (zeros(o12, PACKED),)
        before_r = tl.zeros([N1, N2], tl.float32)
        before_i = before_r
        for d in tl.range(0, BLOCKS, num_stages=1):
            k = fetch(taps, d * N + o12, row, FULL) * power_of_two(254 - level)
            kr, ki = spectrum(k, f1r, f1i, f2r, f2i, twiddle, PACKED)
            kernel = kernel[1:] + (narrow(kr + before_i, ki - before_r, PACKED),)
            before_r = kr
            before_i = ki
        scale = power_of_two(level) * gain

        # The second time for the values that were not finite, if there are any: see the module's text.
        for attempt in tl.range(0, 2, num_stages=1):
            seen = sequences(attempt > 0, x_p, ig_p, og_p, y_p, start, count, channels, c, row, kernel,
                             tl.minimum(scale, 3e38), f1r, f1i, f2r, f2i, twiddle, o12, BLOCKS, FULL, STAGES, PACKED, UNROLL)
            count *= largest(tl.where(seen - seen == 0.0, 0, 1))
            kernel = rescale(kernel, LOWER, o12, BLOCKS, PACKED)
            scale *= 1.0 / LOWER
        start = 0


def lower(size: int, blocks: int) -> float:
    """The power of two that brings sum over d of max |K'_d| to at most one, whatever k: see the module's text."""
    bound = 4 * math.sqrt(size) if blocks == 1 else 8 * math.sqrt(size * blocks)
    return 2.0 ** -math.ceil(math.log2(bound))


def constants(plan: Row | Plan, full: bool, align: int) -> dict[str, int | float | bool]:
    """The kernel's compile-time arguments.

    Args:
        full: the length is blocks*n1*n2, so nothing is masked.
        align: a power of two that divides the length: 8 and above make loads of 16 bytes, 2 and above asynchronous ones.
    """
    return {"N1": plan.n1, "N2": plan.n2, "BLOCKS": plan.blocks, "FULL": full, "ALIGN": align, "STAGES": plan.stages,
            "PACKED": getattr(plan, "packed", True), "UNROLL": plan.unroll, "LOWER": lower(plan.n1 * plan.n2, plan.blocks)}


def run(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor, plan: Plan,
        y: torch.Tensor) -> None:
    """Writes y, on the current stream of the current device.

    Args:
        x, in_gate, out_gate: FP16 [batch, streams, heads, length], contiguous.
        k: FP32 [streams, heads, length], contiguous.
        plan: a plan with path "portable" for these sizes.
        y: as x; every element is written.
    """
    batch, streams, heads, length = x.shape
    align = math.gcd(length, 16)
    right_angle_kernel[(plan.programs,)](
        x, in_gate, out_gate, k, y, *dft.factors(plan.n1, plan.n2, x.device), batch, streams * heads, length // align,
        dft.gain(plan.n1, plan.n2), **constants(plan, length == plan.blocks * plan.n1 * plan.n2, align),
        num_warps=plan.warps, maxnreg=plan.registers)
