"""The fused right-angle convolution for sm_90, in Gluon."""
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (fence_async_shared, mbarrier, tma, warpgroup_mma,
                                                              warpgroup_mma_wait)

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
def first_row(c, step, B, C, N1: gl.constexpr, TILES: gl.constexpr, BLOCKS: gl.constexpr):
    """Row of a step's first tile. An odd batch ends with a pair that overlaps the one before: same inputs, same values."""
    if BLOCKS == 1:
        return (gl.minimum(step * TILES, B - TILES) * C + c) * N1
    else:
        return (step * C + c) * (BLOCKS * N1)


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
def kernel_spectrum(k_ptr, a1, b2, u_s, tr, ti, ow, mma_tile: gl.constexpr, mma_seq: gl.constexpr, dot_a: gl.constexpr,
                    N1: gl.constexpr, N2: gl.constexpr, TILES: gl.constexpr, BLOCKS: gl.constexpr):
    N: gl.constexpr = N1 * N2
    zero_u = gl.zeros([2 * N1, TILES * N2], gl.float32, mma_tile)
    zero_seq = gl.zeros([N1, 2 * N2], gl.float32, mma_seq)
    # The spectrum of k's BLOCKS blocks, scaled by the largest magnitude in it.
    k0 = gl.load(k_ptr + ow)
    kmax = gl.max(gl.max(gl.abs(k0), 1), 0)
    if BLOCKS == 2:
        k1 = gl.load(k_ptr + N + ow)
        kmax = gl.maximum(kmax, gl.max(gl.max(gl.abs(k1), 1), 0))
    kmax = gl.maximum(kmax, 7.888609052210118e-31)
    scale = 1.0 / (kmax * 0.0625)
    k0 = k0 * 0.0625 * scale
    h0 = k0.to(gl.float16)
    l0 = (k0 - h0.to(gl.float32)).to(gl.float16)
    barrier()
    if BLOCKS == 2:
        k1 = k1 * 0.0625 * scale
        h1 = k1.to(gl.float16)
        l1 = (k1 - h1.to(gl.float32)).to(gl.float16)
        u_s.store(join_columns(h0, h1))
    elif TILES == 2:
        u_s.store(join_columns(h0, l0))
    else:
        u_s.store(h0)
    fence_async_shared()
    acc = warpgroup_mma_wait(0, [warpgroup_mma(a1, u_s, zero_u, use_acc=False, is_async=True)])
    if BLOCKS == 2:
        u_s.store(join_columns(l0, l1))
        fence_async_shared()
        acc = warpgroup_mma_wait(0, [warpgroup_mma(a1, u_s, acc, is_async=True)])
        parts = columns(acc, TILES)
    elif TILES == 2:
        acc_h, acc_l = split_columns(acc)
        parts = (acc_h + acc_l, )
    else:
        u_s.store(l0)
        fence_async_shared()
        parts = (warpgroup_mma_wait(0, [warpgroup_mma(a1, u_s, acc, is_async=True)]), )
    trf = tr.to(gl.float32)
    tif = ti.to(gl.float32)
    ur, ui = split_rows(parts[0])
    w = operand((ur * trf - ui * tif).to(gl.float16), (ur * tif + ui * trf).to(gl.float16), dot_a)
    kr, ki = split_columns(warpgroup_mma_wait(0, [warpgroup_mma(w, b2, zero_seq, use_acc=False, is_async=True)]))
    square = kr * kr + ki * ki
    spectrum = ()
    if BLOCKS == 2:
        ur, ui = split_rows(parts[1])
        w = operand((ur * trf - ui * tif).to(gl.float16), (ur * tif + ui * trf).to(gl.float16), dot_a)
        lr, li = split_columns(warpgroup_mma_wait(0, [warpgroup_mma(w, b2, zero_seq, use_acc=False, is_async=True)]))
        lr += ki
        li -= kr
        peak = gl.sqrt(gl.max(gl.max(square, 1), 0)) + gl.sqrt(gl.max(gl.max(lr * lr + li * li, 1), 0))
        peak = gl.maximum(peak, 1e-30)
        lr = (lr * (1.0 / peak)).to(gl.float16)
        spectrum = (lr, (li * (1.0 / peak)).to(gl.float16))
    else:
        peak = gl.maximum(gl.sqrt(gl.max(gl.max(square, 1), 0)), 1e-30)
    spectrum = ((kr * (1.0 / peak)).to(gl.float16), (ki * (1.0 / peak)).to(gl.float16)) + spectrum
    g = gl.minimum(peak * gl.sqrt(float(N)) * kmax, 3e38)
    return spectrum, g


@gluon.jit
def fused_kernel(x_desc, in_desc, out_desc, y_desc, x_row, in_row, out_row, y_row, k_ptr, a1_ptr, b2_ptr, tr_ptr, ti_ptr,
                 B, C, steps, share, extra,
                 N1: gl.constexpr, N2: gl.constexpr, TILES: gl.constexpr, BLOCKS: gl.constexpr):
    N: gl.constexpr = N1 * N2
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
    c = start // steps
    step = start % steps
    prefetch(k_ptr + c.to(gl.int64) * (BLOCKS * N), BLOCKS * N)
    mbarrier.expect(x_bar, BYTES)
    mbarrier.expect(in_bar, BYTES)
    mbarrier.expect(out_bar, BYTES)
    row = first_row(c, step, B, C, N1, TILES, BLOCKS)
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

    i = 0
    while i < count:
        spectrum, g = kernel_spectrum(k_ptr + c.to(gl.int64) * (BLOCKS * N), a1_all.index(i >> 30), b2_all.index(i >> 30),
                                      u_all.index(i >> 30), tr, ti, ow, mma_tile, mma_seq, dot_a, N1, N2, TILES, BLOCKS)
        n = gl.minimum(count - i, steps - step)
        for _ in range(0, n):
            phase = i & 1
            # An index the compiler cannot know to be zero: it would otherwise keep every operand's 64-bit shared-memory
            # descriptor in registers over the loop (226 registers instead of 176).
            a1 = a1_all.index(i >> 30)
            b2 = b2_all.index(i >> 30)
            u_s = u_all.index(i >> 30)
            zr_s = zr_all.index(i >> 30)
            zi_s = zi_all.index(i >> 30)
            b3 = b2.permute([1, 0])
            mbarrier.wait(x_bar, phase)
            mbarrier.wait(in_bar, phase)
            u_s.store(x_s.load(wide) * in_s.load(wide))
            fence_async_shared()
            acc = warpgroup_mma(a1, u_s, zero_u, use_acc=False, is_async=True)
            row = first_row(c, step, B, C, N1, TILES, BLOCKS)
            wrap = step + 1 == steps
            step = gl.where(wrap, 0, step + 1)
            next_c = gl.where(wrap, c + 1, c)
            more = i + 1 < count
            next_row = first_row(next_c, step, B, C, N1, TILES, BLOCKS)
            tma.store_wait(0)
            mbarrier.expect(x_bar, BYTES, pred=more)
            mbarrier.expect(in_bar, BYTES, pred=more)
            async_load(x_desc, [0, x_row + next_row, 0], x_bar, x_t, pred=more)
            async_load(in_desc, [0, in_row + next_row, 0], in_bar, in_t, pred=more)
            if wrap & more:
                prefetch(k_ptr + next_c.to(gl.int64) * (BLOCKS * N), BLOCKS * N)
            parts = columns(warpgroup_mma_wait(0, [acc]), TILES)
            a = ()
            for j in gl.static_range(TILES):
                ur, ui = split_rows(parts[j])
                wr, wi = multiply(ur, ui, tr, ti)
                a = a + (warpgroup_mma(operand(wr, wi, dot_a), b2, zero_seq, use_acc=False, is_async=True), )
            v = ()
            for j in gl.static_range(TILES):
                ar, ai = split_columns(warpgroup_mma_wait(TILES - 1, [a[j]]))
                if BLOCKS == 1:
                    pr, pi = multiply(ar, ai, spectrum[0], spectrum[1])
                elif j == 0:
                    hr, hi = to_halves(ar, ai)
                    pr, pi = half_product(hr, hi, spectrum[0], spectrum[1])
                else:
                    pr, pi = multiply(ar, ai, spectrum[0], spectrum[1])
                    pr, pi = half_product_add(hr, hi, spectrum[2], spectrum[3], pr, pi)
                v = v + (warpgroup_mma(operand(pr, pi, dot_a), b3, zero_seq, use_acc=False, is_async=True), )
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
            y = warpgroup_mma(a1.slice(0, N1), zr_s, zero_y, use_acc=False, is_async=True)
            y = warpgroup_mma(a1.slice(N1, N1), zi_s, y, is_async=True)
            mbarrier.wait(out_bar, phase)
            gate = out_s.load(mma_tile).to(gl.float32)
            y = warpgroup_mma_wait(0, [y])
            y_h = (y * g * gate).to(gl.float16)
            barrier()
            zr_s.store(y_h)
            fence_async_shared()
            mbarrier.expect(out_bar, BYTES, pred=more)
            barrier()
            async_store(y_desc, [0, y_row + row, 0], zr_s._reinterpret(gl.float16, [TILES, N1, N2], tile))
            async_load(out_desc, [0, out_row + next_row, 0], out_bar, out_t, pred=more)
            i = i + 1
        step = 0
        c = c + 1
    tma.store_wait(0)
