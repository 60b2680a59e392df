"""The portable kernel with every tensor at the very end, or start, of its memory, beside a page that is forbidden:
what reads or writes past a tensor ends the process. tests/test_faults.py starts this file with TRITON_INTERPRET=1."""
import ctypes
import dataclasses
import math
import mmap
import os

import fuzzing
import pytest
import torch
from glconv.plan import CARDS, make_plan

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
PAGE = mmap.PAGESIZE
# batch, heads, length: whole tiles and masked ones, one and several.
SHAPES = ((2, 1, 256), (1, 2, 7), (2, 1, 250), (1, 1, 1023), (1, 1, 2048), (1, 1, 2049), (1, 1, 3072))


def at_edge(like: torch.Tensor, end: bool) -> torch.Tensor:
    """A copy that ends where a forbidden page begins, or begins where one ends."""
    size = like.numel() * like.element_size()
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for forbidden in (start, start + (pages + 1) * PAGE):
        assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(forbidden), ctypes.c_size_t(PAGE), 0) == 0
    offset = PAGE + (pages * PAGE - size if end else 0)
    tensor = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=offset).view(like.shape)
    return tensor.copy_(like)


@pytest.mark.parametrize("end", [True, False], ids=["end", "start"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_past_the_edge(monkeypatch, shape, end):
    from glconv.fused import portable
    from triton.runtime import interpreter

    # Whole storages are copied otherwise, forbidden pages included.
    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", lambda self, arguments, named: (arguments, named))
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *arguments: None)
    batch, heads, length = shape
    problem = fuzzing.Draw(batch, 1, heads, length, "normal", "sigmoid", "uniform", "white", 1.0, 1.0, seed=1)
    drawn = fuzzing.inputs(problem)
    tensors = [at_edge(tensor, end) for tensor in drawn]
    y = at_edge(torch.full_like(drawn[0], math.nan), end)
    plan = make_plan(batch, heads, length, CARDS[8, 6], "portable")
    portable.run(*tensors, dataclasses.replace(plan, packed=False, programs=min(2, plan.programs)), y)
    finding = fuzzing.examine(y, drawn, fuzzing.fused(length))
    assert finding.right, str(finding)
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(tensors, drawn))
