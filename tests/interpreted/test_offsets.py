"""The portable kernel beyond 2^31 elements, without the memory for them: of a large grid only the last program runs, in
Triton's interpreter, on tensors whose other pages are never touched. tests/test_faults.py starts this file."""
import dataclasses
import os

import pytest
import torch
from glconv.plan import CARDS, make_plan
from glconv.reference import oracle, row_errors

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


@pytest.fixture
def last_program_alone(monkeypatch):
    """Runs of a grid only its last program, and copies no argument."""
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.interpreter_builder
    monkeypatch.setattr(executor, "_init_args_hst", lambda self, arguments, named: (arguments, named))
    monkeypatch.setattr(executor, "_restore_args_dev", lambda *arguments: None)
    dim, index = builder.set_grid_dim, builder.set_grid_idx

    def choose(programs):
        monkeypatch.setattr(builder, "set_grid_dim", lambda x, y, z: dim(programs, 1, 1))
        monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: index(programs - 1, 0, 0))

    return choose


@pytest.mark.parametrize("length", [2048, 2049, 256])
def test_row_beyond_31_bits(last_program_alone, length):
    from glconv.fused import portable

    channels = 1024
    batch = 2**31 // (channels * length) + 3
    x = torch.empty(batch, 1, channels, length, dtype=torch.float16)
    y = torch.empty_like(x)
    assert x.data_ptr() % 16 == 0
    assert (x.numel() - length) > 2**31
    torch.manual_seed(0)
    k = torch.zeros(1, channels, length)
    k[0, -1] = torch.randn(length)
    x[-1, 0, -1] = torch.randn(length).half()
    y[-1, 0, -1] = torch.nan
    plan = make_plan(batch, channels, length, CARDS[8, 6], "portable")
    last_program_alone(batch * channels)
    portable.run(x, x, x, k, dataclasses.replace(plan, packed=False, programs=1), y)
    row = x[-1:, :, -1:]
    assert row_errors(y[-1:, :, -1:], oracle(row, row, row, k[:, -1:])).max() < 1.2e-3
