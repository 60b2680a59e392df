"""Problems that hypothesis makes up, on every path a CPU can run, held to limits that follow from the inputs; and the
limits themselves held to what they must refuse.

    pytest tests/test_fuzz.py --hypothesis-profile=long     # new problems, more of them
"""
import dataclasses
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import fuzzing
import half_fft
import pytest
import torch
from glconv import reference
from glconv.spectral import graph, right_angle
from hypothesis import given, note
from hypothesis import strategies as st

TESTS = Path(__file__).parent


@st.composite
def draws(build, elements=1 << 14, longest=fuzzing.LENGTHS[1], powers=False):
    """A Draw of at most about `elements` positions, simplest first; `powers`: of a length that is a power of two."""
    bits = (elements.bit_length() - 1, longest.bit_length() - 1)
    power = st.integers(5 if powers else 0, min(bits)).map(lambda exponent: 2**exponent)
    if powers:
        length = build(power)
    else:
        near = st.tuples(power, st.integers(-1, 1)).map(sum)
        length = min(max(build(st.one_of(near, st.integers(1, min(elements, longest)))), 1), longest)
    batch = build(st.integers(1, min(fuzzing.BATCHES[1], max(1, elements // length))))
    streams = build(st.integers(1, max(1, min(5, elements // (length * batch)))))
    heads = build(st.integers(1, max(1, min(7, elements // (length * batch * streams)))))

    def scale(least, most):
        exponent = build(st.floats(0, 1))
        return float(f"{least * (most / least) ** exponent:.3g}")

    return fuzzing.Draw(batch, streams, heads, length, *(build(st.sampled_from(names)) for names in
                        (fuzzing.SIGNALS, fuzzing.GATES, fuzzing.GATES, fuzzing.KERNELS)),
                        scale(*fuzzing.X_SCALES), scale(*fuzzing.K_SCALES), build(st.integers(0, (1 << 30) - 1)))


def assert_right(solve, problem, arithmetic):
    note(str(problem))
    tensors = fuzzing.inputs(problem)
    before = [tensor.clone() for tensor in tensors]
    finding = fuzzing.examine(solve(*tensors), tensors, arithmetic(problem.length))
    assert finding.right, f"{finding}: {problem}"
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(tensors, before))


@given(draws())
def test_eager_formula(problem):
    assert_right(reference.eager, problem, fuzzing.single)


@given(draws())
def test_right_angle(problem):
    assert_right(right_angle.convolve, problem, fuzzing.single)


@given(draws())
def test_spectral_in_fp32(problem):
    assert_right(graph.spectral_graph(torch.float32), problem, fuzzing.single)


@given(draws(longest=4096, powers=True))
def test_spectral_in_fp16(problem):
    """The transforms of a GPU, emulated."""
    with pytest.MonkeyPatch.context() as monkeypatch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        half_fft.install(monkeypatch)
        assert_right(graph.spectral_graph(torch.float16), problem, fuzzing.half)


def test_fused_kernel_interpreted():
    """In a process of its own: the interpreter must be chosen before Triton is imported."""
    pytest.importorskip("triton")
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                          str(TESTS / "interpreted" / "test_fuzz_kernel.py")], cwd=TESTS.parent, capture_output=True,
                         text=True, env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout


def test_a_draw_is_a_line():
    problem = fuzzing.draw(random.Random(1), 1 << 20)
    assert fuzzing.parse(str(problem)) == problem
    assert fuzzing.parse(f"  {str(problem).replace(',', ', ')} ") == problem
    with pytest.raises(ValueError, match="is no draw"):
        fuzzing.parse("batch=3")


def test_drawn_problems_cover_the_range():
    rng = random.Random(0)
    drawn = [fuzzing.draw(rng, 1 << 22) for _ in range(500)]
    assert min(problem.length for problem in drawn) == 1
    assert max(problem.length for problem in drawn) > 15000
    assert {problem.in_gates for problem in drawn} == {problem.out_gates for problem in drawn} == set(fuzzing.GATES)
    assert {problem.kernel for problem in drawn} == set(fuzzing.KERNELS)
    assert min(problem.k_scale for problem in drawn) < 1e-5
    assert max(problem.k_scale for problem in drawn) > 1e3
    assert max(problem.batch for problem in drawn) > 60
    assert any(problem.batch % 2 for problem in drawn)
    assert all(problem.batch * problem.streams * problem.heads * problem.length <= 1 << 22 for problem in drawn)


# What the limits must refuse, or they are too loose. Each takes the exact result and the inputs of an ordinary problem.
ORDINARY = fuzzing.Draw(4, 2, 3, 2048, "normal", "sigmoid", "uniform", "decaying", 1.0, 1.0, seed=5)


def scaled(y, tensors):
    """One row, a little too large."""
    y = y.clone()
    y[1, 0, 2] *= 1 + 1.5e-3
    return y


def one_element(y, tensors):
    """One element, by 3 % of its row's mean size."""
    y = y.clone()
    y[2, 1, 0, 700] += 0.03 * y[2, 1, 0].square().mean().sqrt()
    return y


def stale_row(y, tensors):
    """The row of another batch entry."""
    y = y.clone()
    y[3, 1, 1] = y[2, 1, 1]
    return y


def circular(y, tensors):
    x, in_gate, out_gate, k = (tensor.double() for tensor in tensors)
    return torch.fft.irfft(torch.fft.rfft(x * in_gate) * torch.fft.rfft(k), n=x.shape[-1]) * out_gate


def noisy(y, tensors):
    """FP16's noise, at twice what the kernels have."""
    torch.manual_seed(0)
    return y + 1.5e-3 * torch.randn_like(y) * y.square().mean(-1, keepdim=True).sqrt()


def unwritten(y, tensors):
    y = y.clone()
    y[0, 0, 0, 5] = torch.nan
    return y


def coarse_kernel(y, tensors):
    """k rounded to 8 bits."""
    x, in_gate, out_gate, k = tensors
    return reference.oracle(x, in_gate, out_gate, k.bfloat16())


REFUSED = (scaled, one_element, stale_row, circular, noisy, unwritten, coarse_kernel)


def refusals(limits=fuzzing.limits):
    """The names of the wrong results that are refused under `limits`; raises where the right one is."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(fuzzing, "limits", limits)
        tensors = fuzzing.inputs(ORDINARY)
        exact = reference.oracle(*tensors)
        arithmetic = fuzzing.fused(ORDINARY.length)
        assert fuzzing.examine(exact.half(), tensors, arithmetic).right
        return {wrong.__name__ for wrong in REFUSED
                if not fuzzing.examine(wrong(exact, tensors).half(), tensors, arithmetic).right}


def test_wrong_results_are_refused():
    assert refusals() == {wrong.__name__ for wrong in REFUSED}


def test_a_loosened_tolerance_is_seen():
    """The check above fails when the limits are doubled: they have no room to be loosened unnoticed."""
    shipped = fuzzing.limits

    def loosened(*arguments):
        return tuple(2 * limit for limit in shipped(*arguments))

    seen = refusals(loosened)
    assert seen != {wrong.__name__ for wrong in REFUSED}
    assert "scaled" not in seen


def test_limit_of_ordinary_rows_is_what_the_contract_says():
    """About 1e-3 of a row's norm: what README.md promises, though the limit is derived from the inputs."""
    for out_gates in ("uniform", "sigmoid", "constant"):
        tensors = fuzzing.inputs(dataclasses.replace(ORDINARY, out_gates=out_gates))
        row, _ = fuzzing.limits(tensors, fuzzing.fused(ORDINARY.length))
        relative = row / reference.oracle(*tensors).norm(dim=-1)
        assert relative.min() > 7e-4
        assert relative.max() < 1.5e-3
