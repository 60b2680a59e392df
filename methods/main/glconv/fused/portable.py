"""The fused gated causal convolution in plain Triton, for sm_80 and later: one launch, every input read once.

What is computed
----------------
The first L outputs of the linear convolution of u = x*in_gate and k, gated by out_gate. Modulo z^N - i the product of
two real signals of N positions is low + i*high, low the first N outputs of their linear convolution and high the rest.
A program holds one channel of k as spectra and streams its share of the batch past them, tile by tile of N = N1*N2
positions, BLOCKS tiles a sequence. With X the row-major [N1, N2] view of a tile and F1, F2, T as in `dft.py`:

    U = ((F1 X) * T) F2                                       forward, FP16 operands, FP32 sums
    P_j = sum over d <= j of U_(j-d) * K'_d                   K'_0 = K_0, K'_d = K_d - i K_(d-1)
    y_j = Re(conj(F1) ((P_j conj(F2)) * conj(T)))             inverse; F1 and F2 are symmetric
    out_j = y_j * out_gate * scale                            FP32, rounded to FP16 once

-i K_(d-1) brings the high half of the products of tiles i and j-i-1, which falls into tile j, to the real part. So a
sequence of m tiles costs m transforms each way, and m (m+1)/2 products. The sums that tile i adds to tiles after it
are what the program carries from tile to tile. Lengths that are no multiple of N are masked.

Range and accuracy
------------------
Every factor is unitary and |T| = 1, so the values of a transform stay below the norm of what went in: for |u| <= c,
below c*sqrt(N), which FP16 holds for c = 1024 and N <= 2048. P is the delicate step: with K scaled so that the largest
bin cannot overflow, the usual bin is far below it and small signals sink into FP16's subnormals (u of 1e-4: relative
L2 of 3e-3 to 3e-2). So there are two passes, and the second one is rare:

  1. k is scaled by a power of two so that the mean square of its spectrum is 4 to 16 (by Parseval that is known from
     the sum of k^2, before the transform, which k enters as two FP16 halves: nothing that matters is lost). u of 1e-4
     keeps 1e-3 to 1.6e-3. Noise of an rms up to about 100 passes; a larger or more coherent signal may overflow.
  2. An overflow cannot hide: inf and NaN never become finite again, and a value that is not finite anywhere before the
     last product fills its whole column of y. So a running sum of half of y's rows, kept a thread, tells after the
     pass whether all was finite. If not, the program goes over its share again with K times LOWER, and replaces the
     elements that were not finite, and no others. LOWER makes the sum over d of max |K'_d| at most one for any k: with
     the scaling above, |K'_d| <= |K_d| + |K_(d-1)| and |K_d| <= norm(k_d) give at most 8 sqrt(m N) by Cauchy-Schwarz
     (4 sqrt(N) for one tile). By Minkowski's inequality norm(P_j) is then at most the largest norm(U_i), so nothing
     overflows while |u| <= 65504/sqrt(N), 1447 at N = 2048, whatever the pattern. Beyond it the result is right or
     not finite.

The choice is made element by element, so a row's result does not depend on its neighbours in the batch, and a NaN in
one row costs its neighbours time only. The scale undoes all powers of two in FP32 after the last sum, together with
out_gate, so the convolution itself may exceed FP16 where the gated result does not. Kernels below 2^-100 and zero
kernels give zeros without a special case: k is scaled by at most 2^100 * 2^9.

Ordinary inputs come out 6e-4 to 9e-4 from float64 in relative L2: 2e-4 to 3e-4 each from rounding the input product,
the factors, and K, and the rest from the roundings of intermediates. Forward sums in FP16 are about 5e-5 of it.

What it takes
-------------
8 L (N1 + 2 N2) FLOP a sequence on the tensor cores. Each warp has whole rows of every tile, so the results of the
first two stages are the operands of the next without leaving the registers. Pointwise products are inline PTX on two
halves at once; written in Triton they would be converted one by one. PACKED=False is the plain formula beside it, for
the interpreter, which runs no PTX. Triton waits for every product: with wgmma a complex product is therefore one of
stacked matrices (STACKED); for mma.sync, which does not wait, stacking would move data through shared memory.
"""
import math

import torch
import triton
import triton.language as tl

from .. import dft
from ..plan import Plan, Row

# Tiles up to this size make their products with twiddles in FP32: rows of so few positions average out too little of
# the packed products' rounding, and some would pass 1e-3 (1.1e-3 of white ones, so 9.5e-4).
PRECISE = tl.constexpr(512)
# Forward sums of tiles up to this many rows are kept in FP16, which saves their conversion.
HALF_SUMS = tl.constexpr(64)


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
            tile = tl.inline_asm_elementwise("mul.rn.f16x2 $0, $2, $4; mul.rn.f16x2 $1, $3, $4;", "=&r,=r,r,r,r",
                                             [tiles[d], tl.full(like.shape, FACTOR, tl.float16)], dtype=tl.int32,
                                             is_pure=True, pack=2)
        else:
            tile = (tiles[d][0] * FACTOR, tiles[d][1] * FACTOR)
        result = result + (tile,)
    return result


@triton.jit
def zeros(like, COUNT: tl.constexpr, PACKED: tl.constexpr):
    """COUNT packed tiles of zeros."""
    result = ()
    for _ in tl.static_range(COUNT):
        if PACKED:
            tile = tl.zeros(like.shape, tl.int32)
        else:
            tile = (tl.zeros(like.shape, tl.float16), tl.zeros(like.shape, tl.float16))
        result = result + (tile,)
    return result


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
def conjugate_product(a, w, PACKED: tl.constexpr):
    """conj(a w), packed tiles."""
    if PACKED:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, s, n;
            mul.rn.f16x2 t, $3, $5; neg.f16x2 t, t; fma.rn.f16x2 $0, $2, $4, t;
            mul.rn.f16x2 s, $3, $4; neg.f16x2 s, s; neg.f16x2 n, $2; fma.rn.f16x2 $1, n, $5, s; }""",
            "=&r,=&r,r,r,r,r", [a, w], dtype=tl.int32, is_pure=True, pack=2)
    else:
        return a[0] * w[0] - a[1] * w[1], -(a[0] * w[1] + a[1] * w[0])


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
def columns(r, i, minus_i, f2, STACKED: tl.constexpr, dtype: tl.constexpr):
    """(r + ii) F2 of FP16 parts, summed in `dtype`: four products, or one of matrices put together."""
    if STACKED:
        rows: tl.constexpr = r.shape[0]
        length: tl.constexpr = r.shape[1]
        both = tl.dot(tl.reshape(tl.permute(tl.join(r, i), (0, 2, 1)), (rows, 2 * length)), f2[0], out_dtype=dtype)
        return tl.split(tl.permute(tl.reshape(both, (rows, 2, length)), (0, 2, 1)))
    else:
        re = tl.dot(r, f2[0], out_dtype=dtype)
        re = tl.dot(minus_i, f2[1], re, out_dtype=dtype)
        im = tl.dot(r, f2[1], out_dtype=dtype)
        im = tl.dot(i, f2[0], im, out_dtype=dtype)
        return re, im


@triton.jit
def forward(u, f1, f2, twiddle, PACKED: tl.constexpr, STACKED: tl.constexpr):
    """Packed spectrum ((F1 u) T) F2 of a real FP16 tile."""
    N1: tl.constexpr = u.shape[0]
    N2: tl.constexpr = u.shape[1]
    if N1 * N2 <= PRECISE:
        wr, wi = rotate(tl.dot(f1[0], u), tl.dot(f1[1], u), twiddle, PACKED)
        ar, ai = columns(wr, wi, -wi, f2, STACKED, tl.float32)
        return narrow(ar, ai, PACKED)
    elif N1 > HALF_SUMS:
        w = multiply(narrow(tl.dot(f1[0], u), tl.dot(f1[1], u), PACKED), twiddle, PACKED)
        wr, wi = parts(w, PACKED)
        ar, ai = columns(wr, wi, -wi, f2, STACKED, tl.float32)
        return narrow(ar, ai, PACKED)
    else:
        ur = tl.dot(f1[0], u, out_dtype=tl.float16)
        ui = tl.dot(f1[1], u, out_dtype=tl.float16)
        wr, wi = parts(multiply(pack(ur, ui, PACKED), twiddle, PACKED), PACKED)
        ar, ai = columns(wr, wi, -wi, f2, STACKED, tl.float16)
        return pack(ar, ai, PACKED)


@triton.jit
def inverse(p, f1, f2, twiddle, PACKED: tl.constexpr, STACKED: tl.constexpr):
    """FP32 Re(conj(F1) ((p conj(F2)) conj(T))) of a packed tile, through conj(p) F2 = conj(p conj(F2))."""
    pr, pi = parts(p, PACKED)
    vr, vi = columns(pr, -pi, pi, f2, STACKED, tl.float32)
    if pr.shape[0] * pr.shape[1] <= PRECISE:
        zr, zi = rotate(vr, vi, twiddle, PACKED)
        zi = -zi
    else:
        zr, zi = parts(conjugate_product(narrow(vr, vi, PACKED), twiddle, PACKED), PACKED)
    y = tl.dot(f1[0], zr)
    return tl.dot(f1[1], zi, y)


@triton.jit
def spectrum(k, f1, f2, twiddle, PACKED: tl.constexpr, STACKED: tl.constexpr):
    """FP32 spectrum of a tile of k, |k| <= 8, which goes in as two FP16 halves."""
    high = k.to(tl.float16)
    low = (k - high.to(tl.float32)).to(tl.float16)
    ur = tl.dot(f1[0], high)
    ur = tl.dot(f1[0], low, ur)
    ui = tl.dot(f1[1], high)
    ui = tl.dot(f1[1], low, ui)
    wr, wi = rotate(ur, ui, twiddle, PACKED)
    return columns(wr, wi, -wi, f2, STACKED, tl.float32)


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
    """Sums of half of y's rows over what one thread holds of them: no data moves between threads.

    A value that is not finite fills its whole column of y, so half of the rows see it.
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
def finish(p, og_p, y_p, at, row, scale, again, f1, f2, twiddle, PACKED: tl.constexpr, STACKED: tl.constexpr,
           FULL: tl.constexpr):
    """From a tile's packed sum of products to its stored output. Returns a sum that is finite when every y is."""
    y = inverse(p, f1, f2, twiddle, PACKED, STACKED)
    out_gate = fetch(og_p, at, row, FULL)
    put(y_p, at, row, (y * out_gate.to(tl.float32) * scale).to(tl.float16), again, FULL)
    return sample(y)


@triton.jit
def sequences(again, x_p, ig_p, og_p, y_p, start, count, channels, c, row, kernel, scale, f1, f2, twiddle,
              o12, BLOCKS: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr,
              STACKED: tl.constexpr, UNROLL: tl.constexpr):
    """Rows start, ..., start + count - 1 of the batch in channel c. Returns a sum that is finite when every y is."""
    N: tl.constexpr = o12.shape[0] * o12.shape[1]
    total = tl.zeros([o12.shape[0] // 2, 4], tl.float32)
    if UNROLL:      # a sequence an iteration
        for i in tl.range(0, count, num_stages=STAGES):
            base = ((start + i).to(tl.int64) * channels + c) * row
            ahead = ()
            for j in tl.static_range(BLOCKS):
                at = j * N + o12
                x = fetch(x_p + base, at, row, FULL) * fetch(ig_p + base, at, row, FULL)
                u = forward(x, f1, f2, twiddle, PACKED, STACKED)
                sums = ()
                for d in tl.static_range(BLOCKS - j):
                    if j == 0:
                        sums = sums + (multiply(u, kernel[d], PACKED),)
                    else:
                        sums = sums + (multiply_add(u, kernel[d], ahead[d], PACKED),)
                ahead = sums[1:]
                total += finish(sums[0], og_p + base, y_p + base, at, row, scale, again, f1, f2, twiddle,
                                PACKED, STACKED, FULL)
    else:           # a tile an iteration
        ahead = zeros(o12, BLOCKS - 1, PACKED)
        for i in tl.range(0, count * BLOCKS, num_stages=STAGES):
            base = ((start + i // BLOCKS).to(tl.int64) * channels + c) * row
            j = i % BLOCKS
            at = j * N + o12
            x = fetch(x_p + base, at, row, FULL) * fetch(ig_p + base, at, row, FULL)
            u = forward(x, f1, f2, twiddle, PACKED, STACKED)
            sums = ()
            for d in tl.static_range(BLOCKS - 1):
                sums = sums + (multiply_add(u, kernel[d], reset(j == 0, ahead[d], PACKED), PACKED),)
            sums = sums + (multiply(u, kernel[BLOCKS - 1], PACKED),)
            ahead = sums[1:]
            total += finish(sums[0], og_p + base, y_p + base, at, row, scale, again, f1, f2, twiddle,
                            PACKED, STACKED, FULL)
    return total


@triton.jit(do_not_specialize=["batch", "channels", "units"])
def right_angle_kernel(
        x_p, ig_p, og_p, k_p, y_p, f1r_p, f1i_p, f2r_p, f2i_p, tr_p, ti_p, batch, channels, units, gain,
        N1: tl.constexpr, N2: tl.constexpr, BLOCKS: tl.constexpr, FULL: tl.constexpr, ALIGN: tl.constexpr,
        STAGES: tl.constexpr, PACKED: tl.constexpr, STACKED: tl.constexpr, UNROLL: tl.constexpr,
        LOWER: tl.constexpr):
    """One program: a contiguous share of the channel-major list of sequences. The length is units*ALIGN."""
    i1 = tl.arange(0, N1)
    i2 = tl.arange(0, N2)
    o11 = i1[:, None] * N1 + i1[None, :]
    o22 = i2[:, None] * N2 + i2[None, :]
    o12 = i1[:, None] * N2 + i2[None, :]
    f1 = (tl.load(f1r_p + o11), tl.load(f1i_p + o11))
    if STACKED:
        # [[F2 real, F2 imaginary], [-F2 imaginary, F2 real]]
        i22 = tl.arange(0, 2 * N2)
        inner = i22 % N2
        o44 = inner[:, None] * N2 + inner[None, :]
        real = tl.load(f2r_p + o44)
        imaginary = tl.load(f2i_p + o44)
        below = i22[:, None] >= N2
        right = i22[None, :] >= N2
        f2 = (tl.where(below == right, real, tl.where(below, -imaginary, imaginary)),)
    else:
        f2 = (tl.load(f2r_p + o22), tl.load(f2i_p + o22))
    twiddle = pack(tl.load(tr_p + o12), tl.load(ti_p + o12), PACKED)

    N: tl.constexpr = N1 * N2
    if FULL:
        row = N * BLOCKS
    else:
        row = units * ALIGN
    if BLOCKS > 1:
        # A number that the compiler cannot know to be BLOCKS: it would unroll the loops over k, and spill.
        tiles = tl.maximum(BLOCKS, units * ALIGN // N)
    else:
        tiles = 1
    # Shares in closed form: the bound of an inner loop that an outer loop carries, and nothing else uses, is dead to
    # Triton's layout pass (3.6 to 3.9), and every program would run whole channels.
    total = batch.to(tl.int64) * channels
    begin = tl.program_id(0) * total // tl.num_programs(0)
    end = (tl.program_id(0) + 1) * total // tl.num_programs(0)
    first_channel = (begin // batch).to(tl.int32)
    met = ((end - 1) // batch).to(tl.int32) - first_channel + 1
    for step in tl.range(0, met, num_stages=1):
        c = first_channel + step
        origin = c.to(tl.int64) * batch
        start = (tl.maximum(begin, origin) - origin).to(tl.int32)
        count = (tl.minimum(end, origin + batch) - origin).to(tl.int32) - start
        taps = k_p + c.to(tl.int64) * row
        peak = largest(tl.abs(fetch(taps, o12, row, FULL)))
        for d in tl.range(1, tiles, num_stages=1):
            peak = tl.maximum(peak, largest(tl.abs(fetch(taps, d * N + o12, row, FULL))))
        # Biased exponents 27 to 252 keep the reciprocal a normal number.
        height = tl.minimum(tl.maximum(biased_exponent(peak), 27), 252)
        energy = 0.0
        for d in tl.range(0, tiles, num_stages=1):
            k = fetch(taps, d * N + o12, row, FULL) * power_of_two(254 - height)
            energy += tl.sum(tl.sum(k * k, 1), 0)
        level = tl.minimum(height + tl.maximum(biased_exponent(tl.sqrt(energy * (1.0 / N))), 119) - 128, 252)
        kernel = zeros(o12, BLOCKS, PACKED)
        before_r = tl.zeros([N1, N2], tl.float32)
        before_i = before_r
        for d in tl.range(0, tiles, num_stages=1):
            k = fetch(taps, d * N + o12, row, FULL) * power_of_two(254 - level)
            kr, ki = spectrum(k, f1, f2, twiddle, PACKED, STACKED)
            kernel = kernel[1:] + (narrow(kr + before_i, ki - before_r, PACKED),)
            before_r = kr
            before_i = ki
        scale = power_of_two(level) * gain

        # The second time for the values that were not finite, if there are any: see the module's text.
        again = 0
        attempts = 1
        while attempts > 0:
            seen = sequences(again > 0, x_p, ig_p, og_p, y_p, start, count, channels, c, row, kernel,
                             tl.minimum(scale, 3e38), f1, f2, twiddle, o12, BLOCKS, FULL, STAGES, PACKED,
                             STACKED, UNROLL)
            attempts = largest(tl.where(seen - seen == 0.0, 0, 1)) * (1 - again)
            again = 1
            kernel = rescale(kernel, LOWER, o12, BLOCKS, PACKED)
            scale *= 1.0 / LOWER


def lower(size: int, blocks: int) -> float:
    """The power of two that brings sum over d of max |K'_d| to at most one, whatever k: see the module's text."""
    bound = 4 * math.sqrt(size) if blocks == 1 else 8 * math.sqrt(size * blocks)
    return 2.0 ** -math.ceil(math.log2(bound))


def constants(plan: Row | Plan, full: bool, align: int) -> dict[str, int | float | bool]:
    """The kernel's compile-time arguments.

    Args:
        full: the length is blocks*n1*n2, so nothing is masked.
        align: a power of two that divides the length: 8 or more make loads of 16 bytes, 2 or more asynchronous ones.
    """
    return {"N1": plan.n1, "N2": plan.n2, "BLOCKS": plan.blocks, "FULL": full, "ALIGN": align, "STAGES": plan.stages,
            "PACKED": getattr(plan, "packed", True), "STACKED": plan.stacked, "UNROLL": plan.unroll,
            "LOWER": lower(plan.n1 * plan.n2, plan.blocks)}


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
