"""What the two Hopper kernels share: names that differ between Triton versions, packed arithmetic, changes of layout
that rename registers, the scale of a kernel's spectrum, loads, and what is done about results that are not finite."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

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
def twiddled(u, tr, ti):
    """U * T of the kernel's transform: FP32 sums [2*N1, N2] to FP16 parts [N1, N2]."""
    ur, ui = split_rows(u)
    c = tr.to(gl.float32)
    d = ti.to(gl.float32)
    return (ur * c - ui * d).to(gl.float16), (ur * d + ui * c).to(gl.float16)


@gluon.jit
def spectrum_scale(power, careful, N: gl.constexpr, BLOCKS: gl.constexpr):
    """From the kernel's energy over time, which is its spectrum's (Parseval): to a root mean square of 3, where small
    signals keep their precision; careful: so that the sum over d of max |K'_d| is at most 1 whatever the kernel, by
    max |K| <= ||K|| = ||k|| and, for two blocks, 2 ||k_0|| + ||k_1|| <= sqrt(5) ||k||."""
    root: gl.constexpr = N**0.5
    scale = 3.0 * root / gl.sqrt(gl.maximum(power, 1e-20))
    return gl.where(careful, scale * (1.0 / (3.0 * root * (1.0 if BLOCKS == 1 else 2.25))), scale)


@gluon.jit
def load_barriers():
    """One barrier object each for the loads of x, in_gate and out_gate."""
    x_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    in_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    out_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(x_bar, count=1)
    mbarrier.init(in_bar, count=1)
    mbarrier.init(out_bar, count=1)
    fence_async_shared()
    return x_bar, in_bar, out_bar


@gluon.jit
def expect(x_bar, in_bar, out_bar, BYTES: gl.constexpr):
    """That many bytes of each signal."""
    mbarrier.expect(x_bar, BYTES)
    mbarrier.expect(in_bar, BYTES)
    mbarrier.expect(out_bar, BYTES)


@gluon.jit
def load_signals(window, x_row, in_row, out_row, x_bar, in_bar, out_bar, x_t, in_t, out_t):
    """A step's x, in_gate and out_gate, from these rows of the window."""
    async_load(window, [0, x_row, 0], x_bar, x_t)
    async_load(window, [0, in_row, 0], in_bar, in_t)
    async_load(window, [0, out_row, 0], out_bar, out_t)


@gluon.jit
def load_constants(f1_ptr, f2_ptr, tr_ptr, ti_ptr, seq: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr):
    """F1 and F2 in shared memory (each within an array of one, see `right_angle_kernel`), the twiddles in registers."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ra = gl.arange(0, 2 * N1, gl.SliceLayout(1, layout))
    qa = gl.arange(0, N1, gl.SliceLayout(0, layout))
    rb = gl.arange(0, 2 * N2, gl.SliceLayout(1, layout))
    qb = gl.arange(0, 2 * N2, gl.SliceLayout(0, layout))
    rs = gl.arange(0, N1, gl.SliceLayout(1, seq))
    qs = gl.arange(0, N2, gl.SliceLayout(0, seq))
    os = rs[:, None] * N2 + qs[None, :]
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
    return f1_all, f2_all, tr, ti


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
