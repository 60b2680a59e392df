"""Fused gated causal convolution in plain Triton, sm_80 and later: one launch, every input read once.

Draft docstring, replaced below.
"""
import torch
import triton
import triton.language as tl

from .. import dft


@triton.jit
def narrow(r, i, PACKED: tl.constexpr):
    """FP32 complex to FP16 complex."""
    if PACKED:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $3, $2; cvt.rn.f16x2.f32 $1, $5, $4;",
            "=&r,=&r,f,f,f,f", [r, i], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        return r.to(tl.float16), i.to(tl.float16)


@triton.jit
def multiply(a, b, c, d, PACKED: tl.constexpr):
    """(a + ib)(c + id) in FP16."""
    if PACKED:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, s;
            mul.rn.f16x2 t, $3, $5; neg.f16x2 t, t; fma.rn.f16x2 $0, $2, $4, t;
            mul.rn.f16x2 s, $3, $4; fma.rn.f16x2 $1, $2, $5, s; }""",
            "=&r,=&r,r,r,r,r", [a, b, c, d], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        return a * c - b * d, a * d + b * c


@triton.jit
def multiply_add(a, b, c, d, p, q, PACKED: tl.constexpr):
    """(p + iq) + (a + ib)(c + id) in FP16."""
    if PACKED:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, n;
            neg.f16x2 n, $3;
            fma.rn.f16x2 t, n, $5, $6; fma.rn.f16x2 $0, $2, $4, t;
            fma.rn.f16x2 t, $3, $4, $7; fma.rn.f16x2 $1, $2, $5, t; }""",
            "=&r,=&r,r,r,r,r,r,r", [a, b, c, d, p, q], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        return p + (a * c - b * d), q + (a * d + b * c)


@triton.jit
def columns(r, i, f2r, f2i):
    """(r + ii) F2 with FP16 operands and FP32 sums."""
    re = tl.dot(r, f2r)
    re = tl.dot(-i, f2i, re)
    im = tl.dot(r, f2i)
    im = tl.dot(i, f2r, im)
    return re, im


@triton.jit
def spectrum(k, f1r, f1i, f2r, f2i, tr, ti):
    """FP32 transform of a tile of k, |k| <= 8: k goes in as two FP16 halves."""
    high = k.to(tl.float16)
    low = (k - high.to(tl.float32)).to(tl.float16)
    ur = tl.dot(f1r, high)
    ur = tl.dot(f1r, low, ur)
    ui = tl.dot(f1i, high)
    ui = tl.dot(f1i, low, ui)
    tr = tr.to(tl.float32)
    ti = ti.to(tl.float32)
    return columns((ur * tr - ui * ti).to(tl.float16), (ur * ti + ui * tr).to(tl.float16), f2r, f2i)


@triton.jit
def largest(tile):
    return tl.max(tl.max(tile, 1), 0)


@triton.jit(do_not_specialize=["batch", "channels"])
def right_angle_kernel(
        x_p, ig_p, og_p, k_p, y_p, f1r_p, f1i_p, f2r_p, f2i_p, tr_p, ti_p, batch, channels, length, gain,
        N1: tl.constexpr, N2: tl.constexpr, BLOCKS: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr,
        PACKED: tl.constexpr):
    i1 = tl.arange(0, N1)
    i2 = tl.arange(0, N2)
    o11 = i1[:, None] * N1 + i1[None, :]
    o22 = i2[:, None] * N2 + i2[None, :]
    o12 = i1[:, None] * N2 + i2[None, :]
    f1r = tl.load(f1r_p + o11)
    f1i = tl.load(f1i_p + o11)
    f2r = tl.load(f2r_p + o22)
    f2i = tl.load(f2i_p + o22)
    tr = tl.load(tr_p + o12)
    ti = tl.load(ti_p + o12)

    N: tl.constexpr = N1 * N2
    if FULL:
        row = N * BLOCKS
    else:
        row = length
    # This program's share of the channel-major list of sequences.
    programs = tl.num_programs(0).to(tl.int64)
    total = batch.to(tl.int64) * channels
    first = tl.program_id(0) * total // programs
    last = (tl.program_id(0) + 1) * total // programs
    lowest = first // batch
    for step in tl.range(0, ((last + batch - 1) // batch - lowest).to(tl.int32), num_stages=1):
        c = lowest + step
        peak = 0.0
        for d in tl.static_range(BLOCKS):
            if FULL:
                k = tl.load(k_p + c * row + d * N + o12)
            else:
                k = tl.load(k_p + c * row + d * N + o12, mask=d * N + o12 < row, other=0.0)
            peak = tl.maximum(peak, largest(tl.abs(k)))
        # A power of two, so that scaling is exact; biased exponents 27 to 252 keep its reciprocal a normal number.
        exponent = tl.minimum(tl.maximum(peak.to(tl.int32, bitcast=True) >> 23, 27), 252)
        shrink = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        grow = (exponent << 23).to(tl.float32, bitcast=True)
        spectra = ()
        bound = 0.0
        for d in tl.static_range(BLOCKS):
            if FULL:
                k = tl.load(k_p + c * row + d * N + o12)
            else:
                k = tl.load(k_p + c * row + d * N + o12, mask=d * N + o12 < row, other=0.0)
            kr, ki = spectrum(k * shrink, f1r, f1i, f2r, f2i, tr, ti)
            if d == 0:
                sr = kr
                si = ki
            else:
                sr = kr + before_i
                si = ki - before_r
            before_r = kr
            before_i = ki
            bound += tl.sqrt(largest(sr * sr + si * si))
            spectra = spectra + ((sr, si),)
        bound = tl.maximum(bound, 1e-6)
        halves = ()
        for d in tl.static_range(BLOCKS):
            halves = halves + (((spectra[d][0] / bound).to(tl.float16), (spectra[d][1] / bound).to(tl.float16)),)
        scale = tl.minimum(bound * gain * grow, 3e38)

        start = tl.maximum(first - c * batch, 0)
        stop = tl.minimum(last - c * batch, batch)
        for it in tl.range(0, (stop - start).to(tl.int32), num_stages=STAGES):
            base = ((start + it) * channels + c) * row
            past = ()
            for j in tl.static_range(BLOCKS):
                at = base + j * N
                if FULL:
                    x = tl.load(x_p + at + o12)
                    ig = tl.load(ig_p + at + o12)
                    og = tl.load(og_p + at + o12)
                else:
                    mask = j * N + o12 < row
                    x = tl.load(x_p + at + o12, mask=mask, other=0.0)
                    ig = tl.load(ig_p + at + o12, mask=mask, other=0.0)
                    og = tl.load(og_p + at + o12, mask=mask, other=0.0)
                u = x * ig
                ur = tl.dot(f1r, u)
                ui = tl.dot(f1i, u)
                wr, wi = narrow(ur, ui, PACKED)
                wr, wi = multiply(wr, wi, tr, ti, PACKED)
                ar, ai = columns(wr, wi, f2r, f2i)
                ur, ui = narrow(ar, ai, PACKED)
                past = past + ((ur, ui),)
                pr, pi = multiply(ur, ui, halves[0][0], halves[0][1], PACKED)
                for d in tl.static_range(1, j + 1):
                    pr, pi = multiply_add(past[j - d][0], past[j - d][1], halves[d][0], halves[d][1], pr, pi, PACKED)
                # The inverse is the forward transform of the conjugate: conj(V) = conj(P) F2, conj(Z) = conj(V) T.
                vr, vi = columns(pr, -pi, f2r, f2i)
                zr, zi = narrow(vr, vi, PACKED)
                zr, zi = multiply(zr, zi, tr, ti, PACKED)
                y = tl.dot(f1r, zr)
                y = tl.dot(f1i, -zi, y)
                out = (y * og.to(tl.float32) * scale).to(tl.float16)
                if FULL:
                    tl.store(y_p + at + o12, out)
                else:
                    tl.store(y_p + at + o12, out, mask=mask)


def run(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor, plan, y: torch.Tensor) -> None:
    """Write y, on the current device and stream."""
    batch, streams, heads, length = x.shape
    size = plan.n1 * plan.n2
    right_angle_kernel[(plan.programs,)](
        x, in_gate, out_gate, k, y, *dft.factors(plan.n1, plan.n2, x.device), batch, streams * heads, length,
        size ** 0.5, plan.n1, plan.n2, plan.blocks, length == size * plan.blocks, plan.stages, plan.packed,
        num_warps=plan.warps)
