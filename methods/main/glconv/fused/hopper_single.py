"""The Hopper kernel for a batch of one, in Gluon: every step has a channel of its own, so the kernel's spectrum is made
beside the signal's, in the same stages: 15.1 us at 768 channels of 2048 on an H200, one after the other 15.8.

Mathematics, scales, ranges and layouts are those of `hopper.py`; a row is the same to the bit. What differs: a step is
one tile; k arrives, is measured and split into FP16 parts while the tensor cores end the step before.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_parts import (
    async_load,
    async_store,
    barrier,
    columns_of_eight,
    expect,
    finish_stores,
    half_product,
    half_rows,
    high_low,
    join_columns,
    keep_finite,
    load_barriers,
    load_constants,
    load_signals,
    measure,
    operand,
    over,
    reinterpret,
    round_and_multiply_conjugate,
    spectrum_scale,
    split_columns,
    split_rows,
    twiddled,
    watch,
)


@gluon.jit(do_not_specialize=["x_row", "in_row", "out_row", "y_row", "share", "extra"])
def single_kernel(
        window, origin_ptr, x_row, in_row, out_row, k_ptr, y_row, f1_ptr, f2_ptr, tr_ptr, ti_ptr, share, extra, gain,
        N1: gl.constexpr, N2: gl.constexpr):
    """One program: `share` consecutive channels, the first `extra` programs one more. The signals are seen through one
    window, as in `hopper.py`."""
    N: gl.constexpr = N1 * N2
    BYTES: gl.constexpr = N * 2
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // N2, N2 // 8], [4, 1], [1, 0])
    mma_tile: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N2, 16])
    mma_seq: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * N2, 16])
    dot_a: gl.constexpr = gl.DotOperandLayout(0, mma_seq, 2)
    tile: gl.constexpr = window.layout
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * N2, element_bitwidth=16, rank=2)

    x_t = gl.allocate_shared_memory(gl.float16, [1, N1, N2], tile)
    in_t = gl.allocate_shared_memory(gl.float16, [1, N1, N2], tile)
    out_t = gl.allocate_shared_memory(gl.float16, [1, N1, N2], tile)
    u_all = gl.allocate_shared_memory(gl.float16, [1, N1, N2], flat)
    k_all = gl.allocate_shared_memory(gl.float16, [1, N1, 2 * N2], flat)      # high and low parts
    zr_all = gl.allocate_shared_memory(gl.float16, [1, N1, N2], flat)
    zi_all = gl.allocate_shared_memory(gl.float16, [1, N1, N2], flat)
    x_s = reinterpret(x_t, gl.float16, [N1, N2], flat)
    in_s = reinterpret(in_t, gl.float16, [N1, N2], flat)
    out_s = reinterpret(out_t, gl.float16, [N1, N2], flat)
    x_bar, in_bar, out_bar = load_barriers()

    program = gl.program_id(0)
    first = program * share + gl.minimum(program, extra)
    count = share + (program < extra).to(gl.int32)
    row = first * N1
    expect(x_bar, in_bar, out_bar, BYTES)
    load_signals(window, x_row + row, in_row + row, out_row + row, x_bar, in_bar, out_bar, x_t, in_t, out_t)

    zero_u = gl.zeros([2 * N1, N2], gl.float16, mma_tile)
    zero_k = gl.zeros([2 * N1, 2 * N2], gl.float32, mma_seq)
    zero_y = gl.zeros([N1, N2], gl.float32, mma_tile)
    zero_v = gl.zeros([N1, 2 * N2], gl.float32, mma_seq)
    zero_a = gl.zeros([N1, 2 * N2], gl.float16, mma_seq)
    rw = gl.arange(0, N1, gl.SliceLayout(1, wide))
    qw = gl.arange(0, N2, gl.SliceLayout(0, wide))
    ow = rw[:, None] * N2 + qw[None, :]
    seq: gl.constexpr = split_columns(zero_v)[0].type.layout
    k = gl.load(k_ptr + first.to(gl.int64) * N + ow)
    f1_all, f2_all, tr, ti = load_constants(f1_ptr, f2_ptr, tr_ptr, ti_ptr, seq, N1, N2)

    seq8: gl.constexpr = columns_of_eight(half_rows(zero_y)).type.layout
    base = 0
    attempts = 1
    careful = False
    while attempts > 0:
        flag = gl.zeros([N1 // 2, 8], gl.float16, seq8)
        kmax, power = measure(k)
        high, low = high_low(over(k, kmax))
        k_all.index(0).store(join_columns(high, low))
        mbarrier.wait(x_bar, base & 1)
        mbarrier.wait(in_bar, base & 1)
        u_all.index(0).store(x_s.load(wide) * in_s.load(wide))
        fence_async_shared()
        mbarrier.expect(x_bar, BYTES, pred=count > 1)
        mbarrier.expect(in_bar, BYTES, pred=count > 1)
        barrier()
        for i in range(0, count):
            # i >> 30: an index that the compiler cannot know to be zero; see `right_angle_kernel`.
            f1 = f1_all.index(i >> 30)
            f2 = f2_all.index(i >> 30)
            u_s = u_all.index(i >> 30)
            k_s = k_all.index(i >> 30)
            zr_s = zr_all.index(i >> 30)
            zi_s = zi_all.index(i >> 30)
            f2t = f2.permute([1, 0])
            row = (first + i) * N1
            more = i + 1 < count
            k_sum = warpgroup_mma(f1, k_s, zero_k, use_acc=False, is_async=True)
            u_sum = warpgroup_mma(f1, u_s, zero_u, use_acc=False, is_async=True)
            if i > 0:
                async_store(window, [0, y_row + row - N1, 0], reinterpret(zr_s, gl.float16, [1, N1, N2], tile))
            async_load(window, [0, x_row + row + N1, 0], x_bar, x_t, pred=more)
            async_load(window, [0, in_row + row + N1, 0], in_bar, in_t, pred=more)
            async_load(window, [0, out_row + row, 0], out_bar, out_t, pred=i > 0)
            k = gl.load(k_ptr + (first + gl.minimum(i + 1, count - 1)).to(gl.int64) * N + ow)
            scale = spectrum_scale(power, careful, N, 1)
            undo = gl.minimum(gain / scale * kmax, 3e38)
            k_high, k_low = split_columns(warpgroup_mma_wait(1, [k_sum]))
            kr, ki = twiddled(k_high + k_low, tr, ti)
            k_sum2 = warpgroup_mma(operand(kr, ki, dot_a), f2, zero_v, use_acc=False, is_async=True)
            ur, ui = split_rows(warpgroup_mma_wait(1, [u_sum]))
            wr, wi = half_product(ur, ui, tr, ti)
            u_sum2 = warpgroup_mma(operand(wr, wi, dot_a), f2, zero_a, use_acc=False, is_async=True)
            kr, ki = split_columns(warpgroup_mma_wait(1, [k_sum2]))
            kr = (kr * scale).to(gl.float16)
            ki = (ki * scale).to(gl.float16)
            ar, ai = split_columns(warpgroup_mma_wait(0, [u_sum2]))
            pr, pi = half_product(ar, ai, kr, ki)
            v = warpgroup_mma(operand(pr, pi, dot_a), f2t, zero_v, use_acc=False, is_async=True)
            tma.store_wait(0)
            barrier()
            vr, vi = split_columns(warpgroup_mma_wait(0, [v]))
            zr, zi = round_and_multiply_conjugate(vr, vi, tr, ti)
            zr_s.store(zr)
            zi_s.store(zi)
            fence_async_shared()
            barrier()
            y = warpgroup_mma(f1.slice(0, N1), zr_s, zero_y, use_acc=False, is_async=True)
            y = warpgroup_mma(f1.slice(N1, N1), zi_s, y, is_async=True)
            # The next channel's operands, while the tensor cores end this one.
            kmax, power = measure(k)
            high, low = high_low(over(k, kmax))
            k_s.store(join_columns(high, low))
            mbarrier.wait(x_bar, (base + i + 1) & 1, pred=more)
            mbarrier.wait(in_bar, (base + i + 1) & 1, pred=more)
            u_s.store(x_s.load(wide) * in_s.load(wide))
            mbarrier.wait(out_bar, (base + i) & 1)
            gate = out_s.load(mma_tile)
            y = warpgroup_mma_wait(0, [y])
            y_h = (y * undo * gate.to(gl.float32)).to(gl.float16)
            flag = watch(half_rows(y_h), flag)
            barrier()
            zr_s.store(y_h)
            if careful:
                barrier()
                keep_finite(zr_s, origin_ptr + (y_row + row).to(gl.int64) * N2, 0, wide, N1, N2, N2)
            more2 = i + 2 < count
            mbarrier.expect(x_bar, BYTES, pred=more2)
            mbarrier.expect(in_bar, BYTES, pred=more2)
            mbarrier.expect(out_bar, BYTES, pred=more)
            fence_async_shared()
            barrier()
        async_store(window, [0, y_row + (first + count - 1) * N1, 0],
                    reinterpret(zr_all.index(0), gl.float16, [1, N1, N2], tile))
        tma.store_wait(0)
        attempts -= 1
        bad = gl.max(gl.max((flag != flag).to(gl.int32), 1), 0)
        if (bad > 0) & (not careful):
            # Something was not finite: once more with a spectrum of at most 1, keeping what was finite.
            finish_stores()
            attempts = 1
            careful = True
            k = gl.load(k_ptr + first.to(gl.int64) * N + ow)
            base = count
            expect(x_bar, in_bar, out_bar, BYTES)
            barrier()
            row = first * N1
            load_signals(window, x_row + row, in_row + row, out_row + row, x_bar, in_bar, out_bar, x_t, in_t, out_t)
