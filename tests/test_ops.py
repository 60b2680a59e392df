"""The operators as the dispatcher sees them."""
import dataclasses

import pytest
import torch
from glconv import ops
from glconv.reference import oracle, row_errors
from glconv.spectral.pairs import Packing, pair_spectra

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def inputs(device, batch=3, streams=2, heads=2, length=32):
    generator = torch.Generator().manual_seed(0)
    x, in_gate, out_gate = (torch.randn(batch, streams, heads, length, generator=generator).half() for _ in range(3))
    k = torch.randn(streams, heads, length, generator=generator) / length**0.5
    return tuple(t.to(device) for t in (x, in_gate, out_gate, k))


def need(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def registered():
    """The names of all operators in the namespace, so that a new one without a test below is noticed."""
    return {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("glconv::")}


CALLS = {
    "gated_causal_conv": lambda device: inputs(device),
    "pair_spectra": lambda device: (torch.randn(3, 2, 9, 2).to(device), torch.randn(2, 9, 2).to(device), 0.5,
                                    *dataclasses.astuple(Packing(tile_bins=16))),
}


def test_every_operator_is_tested_here():
    assert ops.LIBRARY.ns == "glconv"
    assert registered() == set(CALLS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name, device):
    need(device)
    torch.library.opcheck(getattr(torch.ops.glconv, name).default, CALLS[name](device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 1, 2, 8), (1, 1, 1, 1), (5, 2, 3, 100)], ids=str)
def test_gated_causal_conv_is_right_and_fresh(device, shape):
    need(device)
    tensors = inputs(device, *shape)
    before = [t.clone() for t in tensors]
    y = torch.ops.glconv.gated_causal_conv(*tensors)
    assert (y.shape, y.dtype, y.is_contiguous()) == (tensors[0].shape, torch.float16, True)
    assert (row_errors(y, oracle(*tensors)) < 1e-3).all()
    assert all(torch.equal(t, copy) for t, copy in zip(tensors, before))
    assert shape[0] == 0 or all(y.data_ptr() != t.data_ptr() for t in tensors)


@pytest.mark.parametrize("device", DEVICES)
def test_pair_spectra_is_the_formula(device):
    need(device)
    u, k, scale, *packing = CALLS["pair_spectra"](device)
    exact = pair_spectra(u.double(), k.double(), scale)
    torch.testing.assert_close(torch.ops.glconv.pair_spectra(u, k, scale, *packing), exact.float())


def test_fake_gives_the_shapes_without_data():
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(5, 2, 3, 8, dtype=torch.float16)
        assert torch.ops.glconv.gated_causal_conv(x, x, x, torch.empty(2, 3, 8)).shape == x.shape
        packed = torch.ops.glconv.pair_spectra(torch.empty(5, 6, 9, 2), torch.empty(6, 9, 2), 1.0,
                                               *dataclasses.astuple(Packing()))
        assert packed.shape == (3, 6, 16, 2)


def test_a_model_around_the_operator_compiles_without_a_break():
    tensors = inputs("cpu")
    model = torch.compile(lambda *t: torch.ops.glconv.gated_causal_conv(*t) * 2, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(*tensors), 2 * torch.ops.glconv.gated_causal_conv(*tensors))


def test_autocast_changes_nothing():
    tensors = inputs("cpu")
    y = torch.ops.glconv.gated_causal_conv(*tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(torch.ops.glconv.gated_causal_conv(*tensors), y)
