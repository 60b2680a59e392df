"""Fused gated causal convolution for sm_90, in Gluon: one launch, every input read once, wgmma and bulk copies.

The mathematics is that of `portable.py`: with X the [N1, N2] view of u = x*in_gate (one block of N = N1*N2 positions),

    A = ((F1 X) * T) F2        P = sum over earlier blocks of A_i K'_(j-i)        y = Re(F1^H ((P F2^H) * conj(T)))

and out = y * scale * out_gate in FP32, rounded to FP16 once. What differs is the machine it is written for:

- A step is two tiles: two sequences of a channel side by side in the columns of one product (one tile for a batch of
  one), or both blocks of one sequence of 2*N. The real and imaginary parts are stacked in the rows of F1 and in the
  columns of F2, so that each stage is one wgmma a tile and all changes of layout between stages rename registers.
- The programs are persistent, three to a multiprocessor: x and in_gate of the next step arrive, and are multiplied into
  shared memory, while the tensor cores end this one.
- The forward stages accumulate in FP16 in the tensor cores, what the packed products that follow would round to anyway:
  9 % fewer instructions, 3 % less time. The inverse ones accumulate in FP32: with FP16 in its first too, rows of white
  kernels would pass 1e-3. Relative L2 6.8e-4 with decaying kernels, 8.8e-4 with white ones, whose convolution leaves
  half its energy, and none of the error, past the end of the row.

Range. The transforms are unitary, so every intermediate of u is at most ||u|| <= sqrt(N) max |u|: 46341 for |u| <= 1024
and N = 2048, whatever the pattern. P and what follows are bounded so only if |K'| is; but a spectrum scaled to a peak
of 1 leaves too little of small signals (u of 1e-4: 3e-3). So K' has a root mean square of 3, and an overflow, possible
for large coherent signals only, is seen: infinity and NaN never turn finite again, and a non-finite Z fills its column
of y. A program that has seen one does its share a second time with sum_d max |K'_d| <= 1, and keeps what was finite.
Values are chosen element by element, so a row never depends on its neighbours. Beyond the range the result is infinite
or NaN.

What was tried, predicted and measured stands in hopper.md beside this file.
"""
import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .. import dft
from ..plan import Plan

# Gluon's names differ between Triton versions; this is the one place that knows.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
descriptor = gl.shared_memory_descriptor
reinterpret = descriptor.reinterpret if hasattr(descriptor, "reinterpret") else descriptor._reinterpret


@gluon.jit
def split_rows(a):
    """[2*M, N] -> two [M, N]: the real and the imaginary rows."""
    return gl.split(a.reshape([2, a.shape[0] // 2, a.shape[1]]).permute([1, 2, 0]))


@gluon.jit
def split_columns(a):
    """[M, 2*N] -> two [M, N]."""
    return gl.split(a.reshape([a.shape[0], 2, a.shape[1] // 2]).permute([0, 2, 1]))


@gluon.jit
def join_columns(a, b):
    """Two [M, N] side by side: [M, 2*N]."""
    return gl.join(a, b).permute([0, 2, 1]).reshape([a.shape[0], 2 * a.shape[1]])


@gluon.jit
def columns(a, TILES: gl.constexpr):
    """[M, TILES*N] -> TILES tensors [M, N]."""
    if TILES == 1:
        return (a, )
    else:
        return split_columns(a)


@gluon.jit
def join_tiles(parts, TILES: gl.constexpr):
    """TILES tensors [M, N] -> [M, TILES*N]."""
    if TILES == 1:
        return parts[0]
    else:
        return join_columns(parts[0], parts[1])


@gluon.jit
def to_halves(r, i):
    """FP32 sums rounded to FP16 pairs."""
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $3, $2; cvt.rn.f16x2.f32 $1, $5, $4;", "=&r,=&r,f,f,f,f",
                                     [r, i], dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def half_product(r, i, c, d):
    """(r + i*1j) * (c + d*1j) of packed FP16."""
    return gl.inline_asm_elementwise("""{ .reg .b32 t;
    mul.rn.f16x2 t, $3, $5; neg.f16x2 t, t; fma.rn.f16x2 $0, $2, $4, t;
    mul.rn.f16x2 t, $3, $4; fma.rn.f16x2 $1, $2, $5, t; }""", "=&r,=&r,r,r,r,r", [r, i, c, d],
                                     dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def round_and_multiply_conjugate(r, i, c, d):
    """(r + i*1j) * (c - d*1j): FP32 sums rounded to FP16 pairs, then packed products."""
    return gl.inline_asm_elementwise("""{ .reg .b32 a, b, t;
    cvt.rn.f16x2.f32 a, $3, $2; cvt.rn.f16x2.f32 b, $5, $4;
    mul.rn.f16x2 t, b, $7; fma.rn.f16x2 $0, a, $6, t;
    mul.rn.f16x2 t, a, $7; neg.f16x2 t, t; fma.rn.f16x2 $1, b, $6, t; }""", "=&r,=&r,f,f,f,f,r,r", [r, i, c, d],
                                     dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def half_product_add(r, i, c, d, pr, pi):
    """(pr + pi*1j) + (r + i*1j) * (c + d*1j) of packed FP16."""
    return gl.inline_asm_elementwise("""{ .reg .b32 t;
    fma.rn.f16x2 $0, $2, $4, $6; neg.f16x2 t, $3; fma.rn.f16x2 $0, t, $5, $0;
    fma.rn.f16x2 $1, $3, $4, $7; fma.rn.f16x2 $1, $2, $5, $1; }""", "=&r,=&r,r,r,r,r,r,r", [r, i, c, d, pr, pi],
                                     dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def first_row(channel, step, B, C, N1: gl.constexpr, TILES: gl.constexpr, BLOCKS: gl.constexpr):
    """Row of a step's first tile. An odd batch ends with a pair that overlaps the one before, with the same values."""
    if BLOCKS == 1:
        return (gl.minimum(step * TILES, B - TILES) * C + channel) * N1
    else:
        return (step * C + channel) * (BLOCKS * N1)


@gluon.jit
def advance(channel, step, steps):
    """The (channel, step) after this one."""
    wrap = step + 1 == steps
    return gl.where(wrap, channel + 1, channel), gl.where(wrap, 0, step + 1)


@gluon.jit
def prefetch(k_ptr, SIZE: gl.constexpr):
    """Asks L2 for SIZE consecutive FP32 values, a line of 128 bytes a lane."""
    lines = gl.arange(0, SIZE // 32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [k_ptr + lines * 32],
                              dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def operand(r, i, layout: gl.constexpr):
    """Real and imaginary columns as the register operand of the next product; a renaming of registers only."""
    return gl.convert_layout(join_columns(r, i), layout, assert_trivial=True)


@gluon.jit
def larger_and_sum(a, p, b, q):
    return gl.maximum(a, b), p + q


@gluon.jit
def measure(k):
    """Largest magnitude and energy of a tile in one reduction.

    The magnitude from below 2^-100: with a smaller kernel every output is less than half the least FP16 number. The
    energy over the square of the magnitude; where squares leave FP32's range it is summed again from scaled values.
    """
    peak, power = gl.reduce((gl.abs(k), k * k), 1, larger_and_sum)
    peak, power = gl.reduce((peak, power), 0, larger_and_sum)
    kmax = gl.maximum(peak, 7.888609052210118e-31)
    over_kmax = 1.0 / (kmax * 0.0625)
    power = power * (0.0625 * over_kmax) * (0.0625 * over_kmax)
    if (kmax > 1e17) | (kmax < 1e-15):
        scaled = over(k, kmax)
        power = gl.sum(gl.sum(scaled * scaled, 1), 0)
    return kmax, power


@gluon.jit
def over(k, kmax):
    """k / kmax in two steps, so that the reciprocal is never subnormal."""
    return k * 0.0625 * (1.0 / (kmax * 0.0625))


@gluon.jit
def high_low(k):
    high = k.to(gl.float16)
    return high, (k - high.to(gl.float32)).to(gl.float16)


@gluon.jit
def load_kernel(k_ptr, channel, offsets, N: gl.constexpr, BLOCKS: gl.constexpr):
    """A channel's FP32 kernel, a tile a block."""
    base = k_ptr + channel.to(gl.int64) * (N * BLOCKS)
    tiles = (gl.load(base + offsets), )
    if BLOCKS == 2:
        tiles = tiles + (gl.load(base + N + offsets), )
    return tiles


@gluon.jit
def second_stage(u, f2, tr, ti, N1: gl.constexpr, N2: gl.constexpr, dot_a: gl.constexpr):
    """(U * T) F2 of one tile in FP32: the kernel's spectrum."""
    ur, ui = split_rows(u)
    w = operand((ur * tr - ui * ti).to(gl.float16), (ur * ti + ui * tr).to(gl.float16), dot_a)
    mma_seq: gl.constexpr = dot_a.parent
    zero = gl.zeros([N1, 2 * N2], gl.float32, mma_seq)
    return split_columns(warpgroup_mma_wait(0, [warpgroup_mma(w, f2, zero, use_acc=False, is_async=True)]))


@gluon.jit
def kernel_spectrum(k, f1, f2, scratch, low_scratch, tr, ti, gain, careful, mma_tile: gl.constexpr, dot_a: gl.constexpr,
                    N1: gl.constexpr, N2: gl.constexpr, TILES: gl.constexpr, BLOCKS: gl.constexpr):
    """K'_0, K'_1, ... in packed FP16 (real, imaginary, real, ...), and the factor that undoes their scale.

    The scale comes from the kernel's energy over time, which is its spectrum's (Parseval): to a root mean square of 3,
    where small signals keep their precision; careful: so that the sum over d of max |K'_d| is at most 1 whatever the
    kernel, by max |K| <= ||K|| = ||k|| and, for two blocks, 2 ||k_0|| + ||k_1|| <= sqrt(5) ||k||.
    """
    zero = gl.zeros([2 * N1, TILES * N2], gl.float32, mma_tile)
    kmax, power = measure(k[0])
    if BLOCKS == 2:
        kmax1, power1 = measure(k[1])
        both = gl.maximum(kmax, kmax1)
        power = power * (kmax / both) * (kmax / both) + power1 * (kmax1 / both) * (kmax1 / both)
        kmax = both
        high1, low1 = high_low(over(k[1], kmax))
    high, low = high_low(over(k[0], kmax))
    barrier()
    if BLOCKS == 2:
        scratch.store(join_columns(high, high1))
    elif TILES == 2:
        scratch.store(join_columns(high, low))
    else:
        scratch.store(high)
        low_scratch.store(low)
    fence_async_shared()
    u = warpgroup_mma(f1, scratch, zero, use_acc=False, is_async=True)
    if TILES == 1:      # a sum of its own, so that a row is the same to the bit in a step of two
        u_low = warpgroup_mma(f1, low_scratch, zero, use_acc=False, is_async=True)
    if BLOCKS == 2:
        u = warpgroup_mma_wait(0, [u])
        scratch.store(join_columns(low, low1))
        fence_async_shared()
        u = warpgroup_mma(f1, scratch, u, is_async=True)
    parts = columns(warpgroup_mma_wait(0, [u]), TILES)
    if TILES == 1:
        parts = (parts[0] + warpgroup_mma_wait(0, [u_low]), )
    elif BLOCKS == 1:
        parts = (parts[0] + parts[1], )
    trf = tr.to(gl.float32)
    tif = ti.to(gl.float32)
    root: gl.constexpr = (N1 * N2)**0.5
    scale = 3.0 * root / gl.sqrt(gl.maximum(power, 1e-20))
    scale = gl.where(careful, scale * (1.0 / (3.0 * root * (1.0 if BLOCKS == 1 else 2.25))), scale)
    kr, ki = second_stage(parts[0], f2, trf, tif, N1, N2, dot_a)
    spectrum = ((kr * scale).to(gl.float16), (ki * scale).to(gl.float16))
    if BLOCKS == 2:
        lr, li = second_stage(parts[1], f2, trf, tif, N1, N2, dot_a)
        spectrum = spectrum + (((lr + ki) * scale).to(gl.float16), ((li - kr) * scale).to(gl.float16))
    return spectrum, gl.minimum(gain / scale * kmax, 3e38)


@gluon.jit
def nan_where_bad(y, flag):
    """flag + 0*y of packed FP16: NaN once y was infinite or NaN."""
    return gl.inline_asm_elementwise("{ .reg .b32 z; mov.b32 z, 0; fma.rn.f16x2 $0, $1, z, $2; }", "=r,r,r", [y, flag],
                                     dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def half_rows(y):
    """Every other group of eight rows of y [N1, W]: a thread's first of its two rows."""
    half, _ = gl.split(y.reshape([y.shape[0] // 16, 2, 8, y.shape[1]]).permute([0, 2, 3, 1]))
    return half.reshape([y.shape[0] // 2, y.shape[1]])


@gluon.jit
def watch(y, flag):
    """Folds y [N1 / 2, TILES*N2] into flag [N1 / 2, 8]; all within a thread's own registers."""
    if y.shape[1] == 8:
        return nan_where_bad(y, flag)
    else:
        a, b = split_columns(y)
        return watch(b, watch(a, flag))


@gluon.jit
def keep_finite(y_s, y_ptr, stride, layout: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, W: gl.constexpr):
    """Puts back into y_s what the first attempt wrote, where that was finite."""
    r = gl.arange(0, N1, gl.SliceLayout(1, layout))[:, None]
    q = gl.arange(0, W, gl.SliceLayout(0, layout))[None, :]
    before = gl.load(y_ptr + r * N2 + q % N2 + q // N2 * stride)
    y_s.store(gl.where(gl.abs(before.to(gl.float32)) < float("inf"), before, y_s.load(layout)))


@gluon.jit
def finish_stores():
    """Waits until this thread's bulk stores are in memory, not only read out of shared memory."""
    threads = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r,r", [threads], dtype=gl.int32,
                              is_pure=False, pack=1)


@gluon.jit
def columns_of_eight(a):
    """The first eight columns."""
    if a.shape[1] == 8:
        return a
    else:
        return columns_of_eight(split_columns(a)[0])


@gluon.jit(do_not_specialize=["x_row", "in_row", "out_row", "y_row", "B", "C", "stride", "steps", "share", "extra"])
def right_angle_kernel(
        window, origin_ptr, x_row, in_row, out_row, k_ptr, y_row, f1_ptr, f2_ptr, tr_ptr, ti_ptr,
        B, C, stride, steps, share, extra, gain,
        N1: gl.constexpr, N2: gl.constexpr, TILES: gl.constexpr, BLOCKS: gl.constexpr):
    """One program: a contiguous share of the channel-major list of steps, `share` long, the first `extra` one longer.

    A step is TILES tiles: as many sequences of one channel, or (BLOCKS 2) the two blocks of one sequence. `stride`
    elements lie between the tiles of a step. All signals are seen through one window of rows of N2 elements that begins
    at `origin_ptr`: x in its row x_row, and so on.
    """
    N: gl.constexpr = N1 * N2
    W: gl.constexpr = TILES * N2
    BYTES: gl.constexpr = N1 * W * 2
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // N2, N2 // 8], [4, 1], [1, 0])
    constant: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    mma_tile: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    mma_seq: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * N2, 16])
    dot_a: gl.constexpr = gl.DotOperandLayout(0, mma_seq, 2)
    # TILES tiles [N1, N2] one after the other are, in this layout, one matrix [N1, TILES*N2].
    tile: gl.constexpr = window.layout
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * N2, element_bitwidth=16, rank=2)

    x_t = gl.allocate_shared_memory(gl.float16, [TILES, N1, N2], tile)
    in_t = gl.allocate_shared_memory(gl.float16, [TILES, N1, N2], tile)
    out_t = gl.allocate_shared_memory(gl.float16, [TILES, N1, N2], tile)
    u_all = gl.allocate_shared_memory(gl.float16, [1, N1, W], flat)
    zr_all = gl.allocate_shared_memory(gl.float16, [1, N1, W], flat)
    zi_all = gl.allocate_shared_memory(gl.float16, [1, N1, W], flat)
    x_s = reinterpret(x_t, gl.float16, [N1, W], flat)
    in_s = reinterpret(in_t, gl.float16, [N1, W], flat)
    out_s = reinterpret(out_t, gl.float16, [N1, W], flat)
    if TILES == 1:
        low = gl.allocate_shared_memory(gl.float16, [N1, N2], flat)
    else:
        low = zi_all.index(0)
    x_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    in_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    out_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(x_bar, count=1)
    mbarrier.init(in_bar, count=1)
    mbarrier.init(out_bar, count=1)
    fence_async_shared()

    program = gl.program_id(0)
    start = program * share + gl.minimum(program, extra)
    count = share + (program < extra).to(gl.int32)
    first_channel = start // steps
    first_step = start % steps
    channel = first_channel
    step = first_step
    mbarrier.expect(x_bar, BYTES)
    mbarrier.expect(in_bar, BYTES)
    mbarrier.expect(out_bar, BYTES)
    row = first_row(channel, step, B, C, N1, TILES, BLOCKS)
    async_load(window, [0, x_row + row, 0], x_bar, x_t)
    async_load(window, [0, in_row + row, 0], in_bar, in_t)
    async_load(window, [0, out_row + row, 0], out_bar, out_t)

    zero_u = gl.zeros([2 * N1, W], gl.float16, mma_tile)
    zero_y = gl.zeros([N1, W], gl.float32, mma_tile)
    zero_v = gl.zeros([N1, 2 * N2], gl.float32, mma_seq)
    zero_a = zero_v
    if BLOCKS == 1:     # two blocks' products are summed in FP16 already, and rows would pass 1e-3
        zero_a = gl.zeros([N1, 2 * N2], gl.float16, mma_seq)
    rw = gl.arange(0, N1, gl.SliceLayout(1, wide))
    qw = gl.arange(0, N2, gl.SliceLayout(0, wide))
    ow = rw[:, None] * N2 + qw[None, :]
    seq: gl.constexpr = split_columns(zero_v)[0].type.layout
    rs = gl.arange(0, N1, gl.SliceLayout(1, seq))
    qs = gl.arange(0, N2, gl.SliceLayout(0, seq))
    os = rs[:, None] * N2 + qs[None, :]
    k = load_kernel(k_ptr, channel, ow, N, BLOCKS)
    ra = gl.arange(0, 2 * N1, gl.SliceLayout(1, constant))
    qa = gl.arange(0, N1, gl.SliceLayout(0, constant))
    rb = gl.arange(0, 2 * N2, gl.SliceLayout(1, constant))
    qb = gl.arange(0, 2 * N2, gl.SliceLayout(0, constant))
    f1_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * N1, N1], gl.float16)
    f2_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * N2, 2 * N2], gl.float16)
    f1_all = gl.allocate_shared_memory(gl.float16, [1, 2 * N1, N1], f1_layout)
    f2_all = gl.allocate_shared_memory(gl.float16, [1, 2 * N2, 2 * N2], f2_layout)
    f1_value = gl.load(f1_ptr + ra[:, None] * N1 + qa[None, :])
    f2_value = gl.load(f2_ptr + rb[:, None] * (2 * N2) + qb[None, :])
    tr = gl.load(tr_ptr + os)
    ti = gl.load(ti_ptr + os)
    f1_all.index(0).store(f1_value)
    f2_all.index(0).store(f2_value)

    seq8: gl.constexpr = columns_of_eight(half_rows(zero_y)).type.layout
    base = 0
    attempts = 1
    careful = False
    while attempts > 0:
        flag = gl.zeros([N1 // 2, 8], gl.float16, seq8)
        mbarrier.wait(x_bar, base & 1)
        mbarrier.wait(in_bar, base & 1)
        u_all.index(0).store(x_s.load(wide) * in_s.load(wide))
        fence_async_shared()
        channel = first_channel
        step = first_step
        channel1, step1 = advance(channel, step, steps)
        row = first_row(channel, step, B, C, N1, TILES, BLOCKS)
        row1 = first_row(channel1, step1, B, C, N1, TILES, BLOCKS)
        mbarrier.expect(x_bar, BYTES, pred=count > 1)
        mbarrier.expect(in_bar, BYTES, pred=count > 1)
        barrier()
        last_row = row * 0  # its own value: two names of one are not both carried around a loop
        channel2, step2 = advance(channel1, step1, steps)
        i = 0
        while i < count:
            # i >> 30: an index the compiler cannot know to be zero. It would otherwise keep every operand's 64-bit
            # shared-memory descriptor in registers over the loop (226 registers instead of 176).
            spectrum, scale = kernel_spectrum(
                k, f1_all.index(i >> 30), f2_all.index(i >> 30), zi_all.index(i >> 30), low, tr, ti, gain, careful,
                mma_tile, dot_a, N1, N2, TILES, BLOCKS)
            n = gl.minimum(count - i, steps - step)
            if n < count - i:
                prefetch(k_ptr + (channel + 1).to(gl.int64) * (BLOCKS * N), BLOCKS * N)
            for _ in range(0, n):
                f1 = f1_all.index(i >> 30)
                f2 = f2_all.index(i >> 30)
                u_s = u_all.index(i >> 30)
                zr_s = zr_all.index(i >> 30)
                zi_s = zi_all.index(i >> 30)
                f2t = f2.permute([1, 0])
                acc = warpgroup_mma(f1, u_s, zero_u, use_acc=False, is_async=True)
                # The copies of the step before, issued while the tensor cores are busy: 6 % of the time otherwise.
                more = i + 1 < count
                if i > 0:
                    async_store(window, [0, y_row + last_row, 0], reinterpret(zr_s, gl.float16, [TILES, N1, N2], tile))
                async_load(window, [0, x_row + row1, 0], x_bar, x_t, pred=more)
                async_load(window, [0, in_row + row1, 0], in_bar, in_t, pred=more)
                async_load(window, [0, out_row + row, 0], out_bar, out_t, pred=i > 0)
                parts = columns(warpgroup_mma_wait(0, [acc]), TILES)
                a = ()
                for j in gl.static_range(TILES):
                    ur, ui = split_rows(parts[j])
                    wr, wi = half_product(ur, ui, tr, ti)
                    a = a + (warpgroup_mma(operand(wr, wi, dot_a), f2, zero_a, use_acc=False, is_async=True), )
                tma.store_wait(0)
                barrier()
                before = ()
                v = ()
                for j in gl.static_range(TILES):
                    ar, ai = split_columns(warpgroup_mma_wait(TILES - 1, [a[j]]))
                    if BLOCKS == 2:
                        ar, ai = to_halves(ar, ai)
                    pr, pi = half_product(ar, ai, spectrum[0], spectrum[1])
                    if BLOCKS == 2 and j == 1:
                        pr, pi = half_product_add(before[0], before[1], spectrum[2], spectrum[3], pr, pi)
                    before = (ar, ai)
                    v = v + (warpgroup_mma(operand(pr, pi, dot_a), f2t, zero_v, use_acc=False, is_async=True), )
                more2 = i + 2 < count
                zr = ()
                zi = ()
                for j in gl.static_range(TILES):
                    vr, vi = split_columns(warpgroup_mma_wait(TILES - 1 - j, [v[j]]))
                    zr1, zi1 = round_and_multiply_conjugate(vr, vi, tr, ti)
                    zr = zr + (zr1, )
                    zi = zi + (zi1, )
                zr_s.store(join_tiles(zr, TILES))
                zi_s.store(join_tiles(zi, TILES))
                fence_async_shared()
                barrier()
                y = warpgroup_mma(f1.slice(0, N1), zr_s, zero_y, use_acc=False, is_async=True)
                y = warpgroup_mma(f1.slice(N1, N1), zi_s, y, is_async=True)
                # The next step's input, while the tensor cores end this one.
                mbarrier.wait(x_bar, (base + i + 1) & 1, pred=more)
                mbarrier.wait(in_bar, (base + i + 1) & 1, pred=more)
                u_s.store(x_s.load(wide) * in_s.load(wide))
                mbarrier.wait(out_bar, (base + i) & 1)
                gate = out_s.load(mma_tile)
                y = warpgroup_mma_wait(0, [y])
                y_h = (y * scale * gate.to(gl.float32)).to(gl.float16)
                flag = watch(half_rows(y_h), flag)
                barrier()
                zr_s.store(y_h)
                if careful:
                    barrier()
                    keep_finite(zr_s, origin_ptr + (y_row + row).to(gl.int64) * N2, stride, wide, N1, N2, W)
                mbarrier.expect(x_bar, BYTES, pred=more2)
                mbarrier.expect(in_bar, BYTES, pred=more2)
                mbarrier.expect(out_bar, BYTES, pred=more)
                fence_async_shared()
                barrier()
                i = i + 1
                last_row = row
                row = row1
                row1 = first_row(channel2, step2, B, C, N1, TILES, BLOCKS)
                channel2, step2 = advance(channel2, step2, steps)
            step = 0
            channel = channel + 1
            k = load_kernel(k_ptr, gl.minimum(channel, C - 1), ow, N, BLOCKS)
        async_store(window, [0, y_row + last_row, 0], reinterpret(zr_all.index(0), gl.float16, [TILES, N1, N2], tile))
        tma.store_wait(0)
        attempts -= 1
        bad = gl.max(gl.max((flag != flag).to(gl.int32), 1), 0)
        if (bad > 0) & (not careful):
            # Something was not finite: once more with a spectrum of at most 1, keeping what was finite.
            finish_stores()
            attempts = 1
            careful = True
            k = load_kernel(k_ptr, first_channel, ow, N, BLOCKS)
            base = count
            row = first_row(first_channel, first_step, B, C, N1, TILES, BLOCKS)
            mbarrier.expect(x_bar, BYTES)
            mbarrier.expect(in_bar, BYTES)
            mbarrier.expect(out_bar, BYTES)
            barrier()
            async_load(window, [0, x_row + row, 0], x_bar, x_t)
            async_load(window, [0, in_row + row, 0], in_bar, in_t)
            async_load(window, [0, out_row + row, 0], out_bar, out_t)


@functools.lru_cache(maxsize=64)
def constants(n1: int, n2: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """F1 with its real rows over its imaginary ones [2*n1, n1], F2 as a real matrix of complex columns [2*n2, 2*n2] and
    the twiddles' two parts [n1, n2], FP16."""
    f1r, f1i, f2r, f2i, tr, ti = dft.factors(n1, n2, device)
    f2 = torch.cat([torch.cat([f2r, f2i], 1), torch.cat([-f2i, f2r], 1)])
    return torch.cat([f1r, f1i]), f2, tr, ti


class Window:
    """Stands for a tensor where only an address and a dtype are asked for."""

    dtype = torch.float16

    def data_ptr(self) -> int:
        return 0


def compiled(plan: Plan, device: torch.device, matrices: tuple[torch.Tensor, ...], numbers: tuple[int, ...],
             gain: float) -> Any:
    """The kernel of a plan, compiled for the current device, not launched.

    Args:
        matrices: `constants` on the device.
        numbers: batch, channels, stride, steps, share, extra: see `right_angle_kernel`.
    """
    shape = [plan.tiles, plan.n1, plan.n2]
    layout = gl.NVMMASharedLayout.get_default_for(shape, gl.float16)
    window = TensorDescriptor(Window(), shape, [plan.n1 * plan.n2, plan.n2, 1], shape, layout)
    signal, k = (torch.empty(1, dtype=dtype, device=device) for dtype in (torch.float16, torch.float32))
    return right_angle_kernel.warmup(window, signal, 0, 0, 0, k, 0, *matrices, *numbers, gain,
                                     N1=plan.n1, N2=plan.n2, TILES=plan.tiles, BLOCKS=plan.blocks,
                                     grid=(plan.programs,), num_warps=plan.warps, maxnreg=plan.registers)
