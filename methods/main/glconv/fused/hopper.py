"""The fused right-angle convolution for sm_90, in Gluon."""
import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (fence_async_shared, mbarrier, tma, warpgroup_mma,
                                                              warpgroup_mma_wait)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .. import dft

# Gluon's names differ between Triton versions; this is the one place that knows.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


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
def join_rows(a, b):
    """[M, N] over [M, N]: [2*M, N]."""
    return gl.join(a, b).permute([2, 0, 1]).reshape([2 * a.shape[0], a.shape[1]])


@gluon.jit
def multiply(r, i, c, d):
    """(r + i*1j) * (c + d*1j): FP32 accumulators rounded to FP16 pairs first, then packed products."""
    return gl.inline_asm_elementwise("""{ .reg .b32 a, b, t, s;
    cvt.rn.f16x2.f32 a, $3, $2; cvt.rn.f16x2.f32 b, $5, $4;
    mul.rn.f16x2 t, b, $7; neg.f16x2 t, t; fma.rn.f16x2 $0, a, $6, t;
    mul.rn.f16x2 s, b, $6; fma.rn.f16x2 $1, a, $7, s; }""", "=&r,=&r,f,f,f,f,r,r", [r, i, c, d],
                                     dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def multiply_conjugate(r, i, c, d):
    """(r + i*1j) * (c - d*1j), as `multiply`."""
    return gl.inline_asm_elementwise("""{ .reg .b32 a, b, t, s;
    cvt.rn.f16x2.f32 a, $3, $2; cvt.rn.f16x2.f32 b, $5, $4;
    mul.rn.f16x2 t, b, $7; fma.rn.f16x2 $0, a, $6, t;
    mul.rn.f16x2 s, a, $7; neg.f16x2 s, s; fma.rn.f16x2 $1, b, $6, s; }""", "=&r,=&r,f,f,f,f,r,r", [r, i, c, d],
                                     dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def half_product(r, i, c, d):
    """(r + i*1j) * (c + d*1j) of packed FP16."""
    return gl.inline_asm_elementwise("""{ .reg .b32 t;
    mul.rn.f16x2 t, $3, $5; neg.f16x2 t, t; fma.rn.f16x2 $0, $2, $4, t;
    mul.rn.f16x2 t, $3, $4; fma.rn.f16x2 $1, $2, $5, t; }""", "=&r,=&r,r,r,r,r", [r, i, c, d],
                                     dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def half_product_add(r, i, c, d, pr, pi):
    """(pr + pi*1j) + (r + i*1j) * (c + d*1j) of packed FP16."""
    return gl.inline_asm_elementwise("""{ .reg .b32 t;
    fma.rn.f16x2 $0, $2, $4, $6; neg.f16x2 t, $3; fma.rn.f16x2 $0, t, $5, $0;
    fma.rn.f16x2 $1, $3, $4, $7; fma.rn.f16x2 $1, $2, $5, $1; }""", "=&r,=&r,r,r,r,r,r,r", [r, i, c, d, pr, pi],
                                     dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def to_halves(r, i):
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $3, $2; cvt.rn.f16x2.f32 $1, $5, $4;", "=&r,=&r,f,f,f,f",
                                     [r, i], dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def first_channel(unit, C, CHANNELS: gl.constexpr):
    """An odd count of channels ends with a pair that overlaps the one before: same inputs, same values."""
    if CHANNELS == 1:
        return unit
    else:
        return gl.minimum(unit * CHANNELS, C - CHANNELS)


@gluon.jit
def first_row(unit, step, B, C, N1: gl.constexpr, TILES: gl.constexpr, BLOCKS: gl.constexpr, CHANNELS: gl.constexpr):
    """Row of a step's first tile. An odd batch, too, ends with a pair that overlaps the one before."""
    if BLOCKS * CHANNELS == 1:
        return (gl.minimum(step * TILES, B - TILES) * C + unit) * N1
    else:
        return (step * C + first_channel(unit, C, CHANNELS)) * (BLOCKS * N1)


@gluon.jit
def advance(unit, step, steps):
    """The (unit, step) after this one."""
    wrap = step + 1 == steps
    return gl.where(wrap, unit + 1, unit), gl.where(wrap, 0, step + 1)


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
def magnitude(k):
    """Largest magnitude, from below 2^-100: with a smaller kernel every output is less than half the least FP16 number."""
    return gl.maximum(gl.max(gl.max(gl.abs(k), 1), 0), 7.888609052210118e-31)


@gluon.jit
def over(k, kmax):
    """k / kmax in two steps, so that the reciprocal is never subnormal."""
    return k * 0.0625 * (1.0 / (kmax * 0.0625))


@gluon.jit
def energy(k):
    return gl.sum(gl.sum(k * k, 1), 0)


@gluon.jit
def high_low(k):
    high = k.to(gl.float16)
    return high, (k - high.to(gl.float32)).to(gl.float16)


@gluon.jit
def load_kernel(k_ptr, c, ow, N: gl.constexpr, KERNELS: gl.constexpr):
    """The FP32 kernels a unit of work needs: its blocks or its channels, one after the other in memory."""
    base = k_ptr + c.to(gl.int64) * N
    if KERNELS == 1:
        return (gl.load(base + ow), )
    else:
        return (gl.load(base + ow), gl.load(base + N + ow))


@gluon.jit
def second_stage(u, b2, tr, ti, zero_seq, dot_a: gl.constexpr):
    """Twiddles in FP32 and the product with F2: the spectrum of one tile, FP32."""
    ur, ui = split_rows(u)
    w = operand((ur * tr - ui * ti).to(gl.float16), (ur * ti + ui * tr).to(gl.float16), dot_a)
    return split_columns(warpgroup_mma_wait(0, [warpgroup_mma(w, b2, zero_seq, use_acc=False, is_async=True)]))


@gluon.jit
def spectrum_scale(power, careful, N: gl.constexpr, BLOCKS: gl.constexpr):
    """Scale of the packed spectrum from the kernel's energy over time, which is the spectrum's own (Parseval).

    To a root mean square of 3, where small signals keep their precision; careful: so that the sum over d of max |K'_d| is
    at most 1 whatever the kernel, by max |K| <= ||K|| = ||k|| and (two blocks) 2 ||k_0|| + ||k_1|| <= sqrt(5) ||k||.
    """
    level = 3.0 * gl.sqrt(float(N)) * (1.0 / gl.sqrt(gl.maximum(power, 1e-20)))
    lower: gl.constexpr = 1.0 / (3.0 * (BLOCKS * 2.5 - 1.5) * N**0.5)
    return gl.where(careful, level * lower, level)


@gluon.jit
def kernel_spectrum(k, a1, b2, scratch, low, tr, ti, gain, careful, mma_tile: gl.constexpr, mma_seq: gl.constexpr,
                    dot_a: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, TILES: gl.constexpr, BLOCKS: gl.constexpr,
                    CHANNELS: gl.constexpr):
    """Spectra of the unit's kernels in packed FP16, and the factors that undo their scale."""
    N: gl.constexpr = N1 * N2
    zero_u = gl.zeros([2 * N1, TILES * N2], gl.float32, mma_tile)
    zero_seq = gl.zeros([N1, 2 * N2], gl.float32, mma_seq)
    kmax0 = magnitude(k[0])
    if BLOCKS * CHANNELS == 2:
        kmax1 = magnitude(k[1])
        if BLOCKS == 2:
            kmax0 = gl.maximum(kmax0, kmax1)
            kmax1 = kmax0
        k1 = over(k[1], kmax1)
        h1, l1 = high_low(k1)
    k0 = over(k[0], kmax0)
    h0, l0 = high_low(k0)
    barrier()
    if BLOCKS * CHANNELS == 2:
        scratch.store(join_columns(h0, h1))
    elif TILES == 2:
        scratch.store(join_columns(h0, l0))
    else:
        scratch.store(h0)
        low.store(l0)
    fence_async_shared()
    acc = warpgroup_mma(a1, scratch, zero_u, use_acc=False, is_async=True)
    if TILES == 1:
        acc = warpgroup_mma(a1, low, acc, is_async=True)
    power0 = energy(k0)
    if BLOCKS * CHANNELS == 2:
        power1 = energy(k1)
        acc = warpgroup_mma_wait(0, [acc])
        scratch.store(join_columns(l0, l1))
        fence_async_shared()
        acc = warpgroup_mma(a1, scratch, acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    if TILES == 2 and BLOCKS * CHANNELS == 1:
        acc_h, acc_l = split_columns(acc)
        parts = (acc_h + acc_l, )
    else:
        parts = columns(acc, TILES)
    trf = tr.to(gl.float32)
    tif = ti.to(gl.float32)
    kr, ki = second_stage(parts[0], b2, trf, tif, zero_seq, dot_a)
    if BLOCKS * CHANNELS == 2:
        lr, li = second_stage(parts[1], b2, trf, tif, zero_seq, dot_a)
        if BLOCKS == 2:
            lr += ki
            li -= kr
            power0 = power0 + power1
            power1 = power0
        s0 = spectrum_scale(power0, careful, N, BLOCKS)
        s1 = spectrum_scale(power1, careful, N, BLOCKS)
        spectrum = ((kr * s0).to(gl.float16), (ki * s0).to(gl.float16), (lr * s1).to(gl.float16), (li * s1).to(gl.float16))
        return spectrum, (gl.minimum(gain / s0 * kmax0, 3e38), gl.minimum(gain / s1 * kmax1, 3e38))
    else:
        s0 = spectrum_scale(power0, careful, N, BLOCKS)
        spectrum = ((kr * s0).to(gl.float16), (ki * s0).to(gl.float16))
        return spectrum, (gl.minimum(gain / s0 * kmax0, 3e38), )


@gluon.jit
def nan_where_bad(y, flag):
    """flag + 0*y of packed FP16: NaN once y was infinite or NaN."""
    return gl.inline_asm_elementwise("{ .reg .b32 z; mov.b32 z, 0; fma.rn.f16x2 $0, $1, z, $2; }", "=r,r,r", [y, flag],
                                     dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def watch(y, flag):
    """Folds y [N1, TILES*N2] into flag [N1, 8]; all within a thread's own registers."""
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
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r,r", [gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))],
                              dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def scratch_low(N1: gl.constexpr, N2: gl.constexpr, TILES: gl.constexpr, flat: gl.constexpr):
    """Room for k's low halves where the low and the high do not lie side by side."""
    if TILES == 1:
        return gl.allocate_shared_memory(gl.float16, [N1, N2], flat)
    else:
        return gl.allocate_shared_memory(gl.float16, [8, N2], flat)


@gluon.jit
def columns_of_eight(a):
    """The first eight columns."""
    if a.shape[1] == 8:
        return a
    else:
        return columns_of_eight(split_columns(a)[0])


@gluon.jit(do_not_specialize=["x_row", "in_row", "out_row", "y_row", "B", "C", "stride", "steps", "share", "extra"])
def fused_kernel(x_desc, in_desc, out_desc, y_desc, x_row, in_row, out_row, y_row, y_ptr, k_ptr, a1_ptr, b2_ptr, tr_ptr, ti_ptr,
                 B, C, stride, steps, share, extra, gain,
                 N1: gl.constexpr, N2: gl.constexpr, TILES: gl.constexpr, BLOCKS: gl.constexpr, CHANNELS: gl.constexpr):
    N: gl.constexpr = N1 * N2
    KERNELS: gl.constexpr = BLOCKS * CHANNELS
    W: gl.constexpr = TILES * N2
    BYTES: gl.constexpr = N1 * W * 2
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // N2, N2 // 8], [4, 1], [1, 0])
    constant: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    mma_tile: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    mma_seq: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * N2, 16])
    dot_a: gl.constexpr = gl.DotOperandLayout(0, mma_seq, 2)
    # TILES tiles [N1, N2] one after the other are, in this layout, one matrix [N1, TILES*N2].
    tile: gl.constexpr = x_desc.layout
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * N2, element_bitwidth=16, rank=2)

    x_t = gl.allocate_shared_memory(gl.float16, [TILES, N1, N2], tile)
    in_t = gl.allocate_shared_memory(gl.float16, [TILES, N1, N2], tile)
    out_t = gl.allocate_shared_memory(gl.float16, [TILES, N1, N2], tile)
    u_all = gl.allocate_shared_memory(gl.float16, [1, N1, W], flat)
    zr_all = gl.allocate_shared_memory(gl.float16, [1, N1, W], flat)
    zi_all = gl.allocate_shared_memory(gl.float16, [1, N1, W], flat)
    x_s = x_t._reinterpret(gl.float16, [N1, W], flat)
    in_s = in_t._reinterpret(gl.float16, [N1, W], flat)
    out_s = out_t._reinterpret(gl.float16, [N1, W], flat)
    low = scratch_low(N1, N2, TILES, flat)
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
    first_unit = start // steps
    first_step = start % steps
    unit = first_unit
    step = first_step
    mbarrier.expect(x_bar, BYTES)
    mbarrier.expect(in_bar, BYTES)
    mbarrier.expect(out_bar, BYTES)
    row = first_row(unit, step, B, C, N1, TILES, BLOCKS, CHANNELS)
    async_load(x_desc, [0, x_row + row, 0], x_bar, x_t)
    async_load(in_desc, [0, in_row + row, 0], in_bar, in_t)
    async_load(out_desc, [0, out_row + row, 0], out_bar, out_t)

    zero_u = gl.zeros([2 * N1, W], gl.float32, mma_tile)
    zero_y = gl.zeros([N1, W], gl.float32, mma_tile)
    zero_seq = gl.zeros([N1, 2 * N2], gl.float32, mma_seq)
    rw = gl.arange(0, N1, gl.SliceLayout(1, wide))
    qw = gl.arange(0, N2, gl.SliceLayout(0, wide))
    ow = rw[:, None] * N2 + qw[None, :]
    seq: gl.constexpr = split_columns(zero_seq)[0].type.layout
    rs = gl.arange(0, N1, gl.SliceLayout(1, seq))
    qs = gl.arange(0, N2, gl.SliceLayout(0, seq))
    os = rs[:, None] * N2 + qs[None, :]
    k = load_kernel(k_ptr, first_channel(unit, C, CHANNELS) * BLOCKS, ow, N, KERNELS)
    ra = gl.arange(0, 2 * N1, gl.SliceLayout(1, constant))
    qa = gl.arange(0, N1, gl.SliceLayout(0, constant))
    rb = gl.arange(0, 2 * N2, gl.SliceLayout(1, constant))
    qb = gl.arange(0, 2 * N2, gl.SliceLayout(0, constant))
    a1_all = gl.allocate_shared_memory(gl.float16, [1, 2 * N1, N1], gl.NVMMASharedLayout.get_default_for([2 * N1, N1], gl.float16))
    b2_all = gl.allocate_shared_memory(gl.float16, [1, 2 * N2, 2 * N2], gl.NVMMASharedLayout.get_default_for([2 * N2, 2 * N2], gl.float16))
    a1_value = gl.load(a1_ptr + ra[:, None] * N1 + qa[None, :])
    b2_value = gl.load(b2_ptr + rb[:, None] * (2 * N2) + qb[None, :])
    tr = gl.load(tr_ptr + os)
    ti = gl.load(ti_ptr + os)
    a1_all.index(0).store(a1_value)
    b2_all.index(0).store(b2_value)

    seq8: gl.constexpr = columns_of_eight(zero_y).type.layout
    base = 0
    attempts = 1
    careful = False
    while attempts > 0:
        flag = gl.zeros([N1, 8], gl.float16, seq8)
        mbarrier.wait(x_bar, base & 1)
        mbarrier.wait(in_bar, base & 1)
        u_all.index(0).store(x_s.load(wide) * in_s.load(wide))
        fence_async_shared()
        unit = first_unit
        step = first_step
        unit1, step1 = advance(unit, step, steps)
        row = first_row(unit, step, B, C, N1, TILES, BLOCKS, CHANNELS)
        row1 = first_row(unit1, step1, B, C, N1, TILES, BLOCKS, CHANNELS)
        mbarrier.expect(x_bar, BYTES, pred=count > 1)
        mbarrier.expect(in_bar, BYTES, pred=count > 1)
        barrier()
        last_row = row * 0  # its own value: the frontend takes two names of one value for one loop-carried variable
        unit2, step2 = advance(unit1, step1, steps)
        i = 0
        while i < count:
            spectrum, g = kernel_spectrum(k, a1_all.index(i >> 30), b2_all.index(i >> 30), zi_all.index(i >> 30), low, tr, ti,
                                          gain, careful,
                                          mma_tile, mma_seq, dot_a, N1, N2, TILES, BLOCKS, CHANNELS)
            n = gl.minimum(count - i, steps - step)
            if n < count - i:
                prefetch(k_ptr + first_channel(unit + 1, C, CHANNELS).to(gl.int64) * (BLOCKS * N), KERNELS * N)
            for _ in range(0, n):
                # An index the compiler cannot know to be zero: it would otherwise keep every operand's 64-bit shared-memory
                # descriptor in registers over the loop (226 registers instead of 176).
                a1 = a1_all.index(i >> 30)
                b2 = b2_all.index(i >> 30)
                u_s = u_all.index(i >> 30)
                zr_s = zr_all.index(i >> 30)
                zi_s = zi_all.index(i >> 30)
                b3 = b2.permute([1, 0])
                acc = warpgroup_mma(a1, u_s, zero_u, use_acc=False, is_async=True)
                # The copies of the step before, issued while the tensor cores are busy: 6 % of the time otherwise.
                more = i + 1 < count
                if i > 0:
                    async_store(y_desc, [0, y_row + last_row, 0], zr_s._reinterpret(gl.float16, [TILES, N1, N2], tile))
                async_load(x_desc, [0, x_row + row1, 0], x_bar, x_t, pred=more)
                async_load(in_desc, [0, in_row + row1, 0], in_bar, in_t, pred=more)
                async_load(out_desc, [0, out_row + row, 0], out_bar, out_t, pred=i > 0)
                parts = columns(warpgroup_mma_wait(0, [acc]), TILES)
                a = ()
                for j in gl.static_range(TILES):
                    ur, ui = split_rows(parts[j])
                    wr, wi = multiply(ur, ui, tr, ti)
                    a = a + (warpgroup_mma(operand(wr, wi, dot_a), b2, zero_seq, use_acc=False, is_async=True), )
                tma.store_wait(0)
                barrier()
                v = ()
                for j in gl.static_range(TILES):
                    ar, ai = split_columns(warpgroup_mma_wait(TILES - 1, [a[j]]))
                    if BLOCKS == 1:
                        pr, pi = multiply(ar, ai, spectrum[2 * j % (2 * KERNELS)], spectrum[(2 * j + 1) % (2 * KERNELS)])
                    elif j == 0:
                        hr, hi = to_halves(ar, ai)
                        pr, pi = half_product(hr, hi, spectrum[0], spectrum[1])
                    else:
                        pr, pi = multiply(ar, ai, spectrum[0], spectrum[1])
                        pr, pi = half_product_add(hr, hi, spectrum[2], spectrum[3], pr, pi)
                    v = v + (warpgroup_mma(operand(pr, pi, dot_a), b3, zero_seq, use_acc=False, is_async=True), )
                more2 = i + 2 < count
                zr = ()
                zi = ()
                for j in gl.static_range(TILES):
                    vr, vi = split_columns(warpgroup_mma_wait(TILES - 1 - j, [v[j]]))
                    zr1, zi1 = multiply_conjugate(vr, vi, tr, ti)
                    zr = zr + (zr1, )
                    zi = zi + (zi1, )
                zr_s.store(join_tiles(zr, TILES))
                zi_s.store(join_tiles(zi, TILES))
                fence_async_shared()
                barrier()
                y = warpgroup_mma(a1.slice(0, N1), zr_s, zero_y, use_acc=False, is_async=True)
                y = warpgroup_mma(a1.slice(N1, N1), zi_s, y, is_async=True)
                # The next step's input, while the tensor cores end this one.
                mbarrier.wait(x_bar, (base + i + 1) & 1, pred=more)
                mbarrier.wait(in_bar, (base + i + 1) & 1, pred=more)
                u_s.store(x_s.load(wide) * in_s.load(wide))
                mbarrier.wait(out_bar, (base + i) & 1)
                gate = out_s.load(mma_tile)
                y = warpgroup_mma_wait(0, [y])
                if CHANNELS == 2:
                    y0, y1 = split_columns(y)
                    y = join_columns(y0 * g[0], y1 * g[1])
                else:
                    y = y * g[0]
                y_h = (y * gl.convert_layout(gate.to(gl.float32), y.type.layout, assert_trivial=True)).to(gl.float16)
                y_h = gl.convert_layout(y_h, mma_tile, assert_trivial=True)
                flag = watch(y_h, flag)
                barrier()
                zr_s.store(y_h)
                if careful:
                    barrier()
                    keep_finite(zr_s, y_ptr + row.to(gl.int64) * N2, stride, wide, N1, N2, W)
                mbarrier.expect(x_bar, BYTES, pred=more2)
                mbarrier.expect(in_bar, BYTES, pred=more2)
                mbarrier.expect(out_bar, BYTES, pred=more)
                fence_async_shared()
                barrier()
                i = i + 1
                last_row = row
                row = row1
                row1 = first_row(unit2, step2, B, C, N1, TILES, BLOCKS, CHANNELS)
                unit2, step2 = advance(unit2, step2, steps)
            step = 0
            unit = unit + 1
            k = load_kernel(k_ptr, gl.minimum(first_channel(unit, C, CHANNELS), C - CHANNELS) * BLOCKS, ow, N, KERNELS)
        async_store(y_desc, [0, y_row + last_row, 0], zr_all.index(0)._reinterpret(gl.float16, [TILES, N1, N2], tile))
        tma.store_wait(0)
        attempts -= 1
        bad = gl.max(gl.max((flag != flag).to(gl.int32), 1), 0)
        if (bad > 0) & (not careful):
            # Something was not finite: once more with the spectrum's peak at 1, keeping what was finite.
            finish_stores()
            attempts = 1
            careful = True
            k = load_kernel(k_ptr, first_channel(first_unit, C, CHANNELS) * BLOCKS, ow, N, KERNELS)
            base = count
            row = first_row(first_unit, first_step, B, C, N1, TILES, BLOCKS, CHANNELS)
            mbarrier.expect(x_bar, BYTES)
            mbarrier.expect(in_bar, BYTES)
            mbarrier.expect(out_bar, BYTES)
            barrier()
            async_load(x_desc, [0, x_row + row, 0], x_bar, x_t)
            async_load(in_desc, [0, in_row + row, 0], in_bar, in_t)
            async_load(out_desc, [0, out_row + row, 0], out_bar, out_t)


@functools.lru_cache(maxsize=64)
def constants(n1: int, n2: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """F1 with its real rows over its imaginary ones [2*n1, n1], F2 as a real matrix of complex columns [2*n2, 2*n2], and
    the twiddles' two parts [n1, n2], FP16."""
    f1r, f1i, f2r, f2i, tr, ti = dft.factors(n1, n2, device)
    f2 = torch.cat([torch.cat([f2r, f2i], 1), torch.cat([-f2i, f2r], 1)])
    return torch.cat([f1r, f1i]), f2, tr, ti


class Window:
    """Stands for a tensor where only an address and a dtype are asked for."""

    dtype = torch.float16

    def data_ptr(self) -> int:
        return 0


def compiled(plan, device: torch.device, matrices: tuple[torch.Tensor, ...], numbers: tuple[int, ...], gain: float):
    """The kernel of a plan, compiled for the current device, not launched."""
    shape = [plan.tiles, plan.n1, plan.n2]
    layout = gl.NVMMASharedLayout.get_default_for(shape, gl.float16)
    window = TensorDescriptor(Window(), shape, [plan.n1 * plan.n2, plan.n2, 1], shape, layout)
    y, k = (torch.empty(1, dtype=dtype, device=device) for dtype in (torch.float16, torch.float32))
    return fused_kernel.warmup(window, window, window, window, 0, 0, 0, 0, y, k, *matrices, *numbers, gain,
                               N1=plan.n1, N2=plan.n2, TILES=plan.tiles, BLOCKS=plan.blocks, CHANNELS=plan.kernels,
                               grid=(plan.programs,), num_warps=plan.warps, maxnreg=plan.maxnreg)
