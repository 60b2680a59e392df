"""Fused gated causal convolution for sm_90, in Gluon: one launch, every input read once, wgmma and bulk copies.

The mathematics is that of `portable.py`: with X the [N1, N2] view of u = x*in_gate (one block of N = N1*N2 positions),

    A = ((F1 X) * T) F2        P = sum over earlier blocks of A_i K'_(j-i)        y = Re(F1^H ((P F2^H) * conj(T)))

and out = y * scale * out_gate in FP32, rounded to FP16 once. What differs is the machine it is written for:

- A step is two tiles: two sequences of a channel side by side in the columns of one product, or both blocks of one
  sequence of 2*N. (A batch of one has a kernel of its own: `hopper_single.py`.) The real and imaginary parts are
  stacked in the rows of F1 and in the columns of F2, so that each stage is one wgmma a tile and all changes of layout
  between stages rename registers.
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
from ..plan import Plan, Row
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
from .hopper_single import single_kernel


@gluon.jit
def to_halves(r, i):
    """FP32 sums rounded to FP16 pairs."""
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $3, $2; cvt.rn.f16x2.f32 $1, $5, $4;", "=&r,=&r,f,f,f,f",
                                     [r, i], dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def half_product_add(r, i, c, d, pr, pi):
    """(pr + pi*1j) + (r + i*1j) * (c + d*1j) of packed FP16."""
    return gl.inline_asm_elementwise("""{ .reg .b32 t;
    fma.rn.f16x2 $0, $2, $4, $6; neg.f16x2 t, $3; fma.rn.f16x2 $0, t, $5, $0;
    fma.rn.f16x2 $1, $3, $4, $7; fma.rn.f16x2 $1, $2, $5, $1; }""", "=&r,=&r,r,r,r,r,r,r", [r, i, c, d, pr, pi],
                                     dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def first_row(channel, step, B, C, N1: gl.constexpr, BLOCKS: gl.constexpr):
    """Row of a step's first tile. An odd batch ends with a pair that overlaps the one before, with the same values."""
    if BLOCKS == 1:
        return (gl.minimum(step * 2, B - 2) * C + channel) * N1
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
def load_kernel(k_ptr, channel, offsets, N: gl.constexpr, BLOCKS: gl.constexpr):
    """A channel's FP32 kernel, a tile a block."""
    base = k_ptr + channel.to(gl.int64) * (N * BLOCKS)
    tiles = (gl.load(base + offsets), )
    if BLOCKS == 2:
        tiles = tiles + (gl.load(base + N + offsets), )
    return tiles


@gluon.jit
def second_stage(u, f2, tr, ti, dot_a: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr):
    """(U * T) F2 of one tile in FP32: the kernel's spectrum."""
    wr, wi = twiddled(u, tr, ti)
    mma: gl.constexpr = dot_a.parent
    zero = gl.zeros([N1, 2 * N2], gl.float32, mma)
    w = operand(wr, wi, dot_a)
    return split_columns(warpgroup_mma_wait(0, [warpgroup_mma(w, f2, zero, use_acc=False, is_async=True)]))


@gluon.jit
def kernel_spectrum(k, f1, f2, scratch, tr, ti, gain, careful, dot_a: gl.constexpr, N1: gl.constexpr,
                    N2: gl.constexpr, BLOCKS: gl.constexpr):
    """K'_0, K'_1, ... in packed FP16 (real, imaginary, real, ...), and the factor that undoes their scale."""
    mma: gl.constexpr = dot_a.parent
    zero = gl.zeros([2 * N1, 2 * N2], gl.float32, mma)
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
    else:
        scratch.store(join_columns(high, low))
    fence_async_shared()
    u = warpgroup_mma_wait(0, [warpgroup_mma(f1, scratch, zero, use_acc=False, is_async=True)])
    if BLOCKS == 2:
        scratch.store(join_columns(low, low1))
        fence_async_shared()
        u = warpgroup_mma_wait(0, [warpgroup_mma(f1, scratch, u, is_async=True)])
    first, second = split_columns(u)
    if BLOCKS == 1:
        first = first + second
    scale = spectrum_scale(power, careful, N1 * N2, BLOCKS)
    kr, ki = second_stage(first, f2, tr, ti, dot_a, N1, N2)
    spectrum = ((kr * scale).to(gl.float16), (ki * scale).to(gl.float16))
    if BLOCKS == 2:
        lr, li = second_stage(second, f2, tr, ti, dot_a, N1, N2)
        spectrum = spectrum + (((lr + ki) * scale).to(gl.float16), ((li - kr) * scale).to(gl.float16))
    return spectrum, gl.minimum(gain / scale * kmax, 3e38)


@gluon.jit(do_not_specialize=["x_row", "in_row", "out_row", "y_row", "B", "C", "stride", "steps", "share", "extra"])
def right_angle_kernel(
        window, origin_ptr, x_row, in_row, out_row, k_ptr, y_row, f1_ptr, f2_ptr, tr_ptr, ti_ptr,
        B, C, stride, steps, share, extra, gain,
        N1: gl.constexpr, N2: gl.constexpr, BLOCKS: gl.constexpr):
    """One program: a contiguous share of the channel-major list of steps, `share` long, the first `extra` one longer.

    A step is two tiles: two sequences of one channel, or (BLOCKS 2) the two blocks of one sequence. `stride` elements
    lie between them. All signals are seen through one window of rows of N2 elements that begins at `origin_ptr`: x in
    its row x_row, and so on.
    """
    N: gl.constexpr = N1 * N2
    W: gl.constexpr = 2 * N2
    BYTES: gl.constexpr = N1 * W * 2
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // N2, N2 // 8], [4, 1], [1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    dot_a: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    # Two tiles [N1, N2] one after the other are, in this layout, one matrix [N1, 2*N2].
    tile: gl.constexpr = window.layout
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * N2, element_bitwidth=16, rank=2)

    x_t = gl.allocate_shared_memory(gl.float16, [2, N1, N2], tile)
    in_t = gl.allocate_shared_memory(gl.float16, [2, N1, N2], tile)
    out_t = gl.allocate_shared_memory(gl.float16, [2, N1, N2], tile)
    u_all = gl.allocate_shared_memory(gl.float16, [1, N1, W], flat)
    zr_all = gl.allocate_shared_memory(gl.float16, [1, N1, W], flat)
    zi_all = gl.allocate_shared_memory(gl.float16, [1, N1, W], flat)
    x_s = reinterpret(x_t, gl.float16, [N1, W], flat)
    in_s = reinterpret(in_t, gl.float16, [N1, W], flat)
    out_s = reinterpret(out_t, gl.float16, [N1, W], flat)
    x_bar, in_bar, out_bar = load_barriers()

    program = gl.program_id(0)
    start = program * share + gl.minimum(program, extra)
    count = share + (program < extra).to(gl.int32)
    first_channel = start // steps
    first_step = start % steps
    channel = first_channel
    step = first_step
    row = first_row(channel, step, B, C, N1, BLOCKS)
    expect(x_bar, in_bar, out_bar, BYTES)
    load_signals(window, x_row + row, in_row + row, out_row + row, x_bar, in_bar, out_bar, x_t, in_t, out_t)

    zero_u = gl.zeros([2 * N1, W], gl.float16, mma)
    zero = gl.zeros([N1, W], gl.float32, mma)
    zero_a = zero
    if BLOCKS == 1:     # two blocks' products are summed in FP16 already, and rows would pass 1e-3
        zero_a = gl.zeros([N1, W], gl.float16, mma)
    rw = gl.arange(0, N1, gl.SliceLayout(1, wide))
    qw = gl.arange(0, N2, gl.SliceLayout(0, wide))
    ow = rw[:, None] * N2 + qw[None, :]
    seq: gl.constexpr = split_columns(zero)[0].type.layout
    k = load_kernel(k_ptr, channel, ow, N, BLOCKS)
    f1_all, f2_all, tr, ti = load_constants(f1_ptr, f2_ptr, tr_ptr, ti_ptr, seq, N1, N2)

    seq8: gl.constexpr = columns_of_eight(half_rows(zero)).type.layout
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
        row = first_row(channel, step, B, C, N1, BLOCKS)
        row1 = first_row(channel1, step1, B, C, N1, BLOCKS)
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
                k, f1_all.index(i >> 30), f2_all.index(i >> 30), zi_all.index(i >> 30), tr, ti, gain, careful,
                dot_a, N1, N2, BLOCKS)
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
                    async_store(window, [0, y_row + last_row, 0], reinterpret(zr_s, gl.float16, [2, N1, N2], tile))
                async_load(window, [0, x_row + row1, 0], x_bar, x_t, pred=more)
                async_load(window, [0, in_row + row1, 0], in_bar, in_t, pred=more)
                async_load(window, [0, out_row + row, 0], out_bar, out_t, pred=i > 0)
                parts = split_columns(warpgroup_mma_wait(0, [acc]))
                a = ()
                for j in gl.static_range(2):
                    ur, ui = split_rows(parts[j])
                    wr, wi = half_product(ur, ui, tr, ti)
                    a = a + (warpgroup_mma(operand(wr, wi, dot_a), f2, zero_a, use_acc=False, is_async=True), )
                tma.store_wait(0)
                barrier()
                before = ()
                v = ()
                for j in gl.static_range(2):
                    ar, ai = split_columns(warpgroup_mma_wait(1, [a[j]]))
                    if BLOCKS == 2:
                        ar, ai = to_halves(ar, ai)
                    pr, pi = half_product(ar, ai, spectrum[0], spectrum[1])
                    if BLOCKS == 2 and j == 1:
                        pr, pi = half_product_add(before[0], before[1], spectrum[2], spectrum[3], pr, pi)
                    before = (ar, ai)
                    v = v + (warpgroup_mma(operand(pr, pi, dot_a), f2t, zero, use_acc=False, is_async=True), )
                more2 = i + 2 < count
                zr = ()
                zi = ()
                for j in gl.static_range(2):
                    vr, vi = split_columns(warpgroup_mma_wait(1 - j, [v[j]]))
                    zr1, zi1 = round_and_multiply_conjugate(vr, vi, tr, ti)
                    zr = zr + (zr1, )
                    zi = zi + (zi1, )
                zr_s.store(join_columns(zr[0], zr[1]))
                zi_s.store(join_columns(zi[0], zi[1]))
                fence_async_shared()
                barrier()
                y = warpgroup_mma(f1.slice(0, N1), zr_s, zero, use_acc=False, is_async=True)
                y = warpgroup_mma(f1.slice(N1, N1), zi_s, y, is_async=True)
                # The next step's input, while the tensor cores end this one.
                mbarrier.wait(x_bar, (base + i + 1) & 1, pred=more)
                mbarrier.wait(in_bar, (base + i + 1) & 1, pred=more)
                u_s.store(x_s.load(wide) * in_s.load(wide))
                mbarrier.wait(out_bar, (base + i) & 1)
                gate = out_s.load(mma)
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
                row1 = first_row(channel2, step2, B, C, N1, BLOCKS)
                channel2, step2 = advance(channel2, step2, steps)
            step = 0
            channel = channel + 1
            k = load_kernel(k_ptr, gl.minimum(channel, C - 1), ow, N, BLOCKS)
        async_store(window, [0, y_row + last_row, 0], reinterpret(zr_all.index(0), gl.float16, [2, N1, N2], tile))
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
            row = first_row(first_channel, first_step, B, C, N1, BLOCKS)
            expect(x_bar, in_bar, out_bar, BYTES)
            barrier()
            load_signals(window, x_row + row, in_row + row, out_row + row, x_bar, in_bar, out_bar, x_t, in_t, out_t)


@functools.lru_cache(maxsize=64)
def constants(n1: int, n2: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """F1 with its real rows over its imaginary ones [2*n1, n1], F2 as a real matrix of complex columns [2*n2, 2*n2] and
    the twiddles' two parts [n1, n2], FP16."""
    f1r, f1i, f2r, f2i, tr, ti = dft.factors(n1, n2, device)
    f2 = torch.cat([torch.cat([f2r, f2i], 1), torch.cat([-f2i, f2r], 1)])
    return torch.cat([f1r, f1i]), f2, tr, ti


def kernel_of(plan: Plan | Row) -> tuple[Any, dict[str, int]]:
    """The kernel that runs a plan, and its sizes."""
    sizes = {"N1": plan.n1, "N2": plan.n2}
    return (single_kernel, sizes) if plan.tiles == 1 else (right_angle_kernel, sizes | {"BLOCKS": plan.blocks})


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
        numbers: the kernel's, from B or `share` to `extra`.
    """
    shape = [plan.tiles, plan.n1, plan.n2]
    layout = gl.NVMMASharedLayout.get_default_for(shape, gl.float16)
    window = TensorDescriptor(Window(), shape, [plan.n1 * plan.n2, plan.n2, 1], shape, layout)
    signal, k = (torch.empty(1, dtype=dtype, device=device) for dtype in (torch.float16, torch.float32))
    kernel, sizes = kernel_of(plan)
    return kernel.warmup(window, signal, 0, 0, 0, k, 0, *matrices, *numbers, gain, **sizes, grid=(plan.programs,),
                         num_warps=plan.warps, maxnreg=plan.registers)
