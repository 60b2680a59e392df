"""Every error of the contract, one by one, with its text; and what the contract lets through."""
import re

import pytest
import torch
from glconv import SolverConfig, describe, gated_causal_conv
from glconv.contract import Problem, check

EAGER = SolverConfig(graph="eager")
SHAPE = (2, 3, 4, 5)


def tensors(**changed):
    """Four valid tensors, by name, some of them changed."""
    valid = {"x": torch.zeros(SHAPE).half(), "in_gate": torch.ones(SHAPE).half(), "out_gate": torch.ones(SHAPE).half(),
             "k": torch.zeros(SHAPE[1:])}
    return valid | changed


BAD = {
    "not a tensor": (
        {"x": [1.0]}, TypeError, "x is of type list; want torch.Tensor"),
    "k is None": (
        {"k": None}, TypeError, "k is of type NoneType; want torch.Tensor"),
    "x in FP32": (
        {"x": torch.zeros(SHAPE)}, TypeError, "x has dtype torch.float32; want torch.float16"),
    "gate in BF16": (
        {"out_gate": torch.zeros(SHAPE).bfloat16()}, TypeError,
        "out_gate has dtype torch.bfloat16; want torch.float16"),
    "k in FP16": (
        {"k": torch.zeros(SHAPE[1:]).half()}, TypeError, "k has dtype torch.float16; want torch.float32"),
    "k in FP64": (
        {"k": torch.zeros(SHAPE[1:]).double()}, TypeError, "k has dtype torch.float64; want torch.float32"),
    "x of rank 3": (
        {"x": torch.zeros(SHAPE[1:]).half()}, ValueError,
        "x has shape [3, 4, 5]; want 4 axes, [batch, streams, heads, length]"),
    "x a scalar": (
        {"x": torch.zeros(()).half()}, ValueError, "x has shape []; want 4 axes, [batch, streams, heads, length]"),
    "gate of another length": (
        {"in_gate": torch.zeros(2, 3, 4, 6).half()}, ValueError,
        "in_gate has shape [2, 3, 4, 6]; want the shape of x, [2, 3, 4, 5]"),
    "gate that would broadcast": (
        {"out_gate": torch.zeros(1, 3, 4, 5).half()}, ValueError,
        "out_gate has shape [1, 3, 4, 5]; want the shape of x, [2, 3, 4, 5]"),
    "k of channels in one axis": (
        {"k": torch.zeros(12, 5)}, ValueError, "k has shape [12, 5]; want 3 axes, [streams, heads, length]"),
    "k with a batch axis": (
        {"k": torch.zeros(1, 3, 4, 5)}, ValueError, "k has shape [1, 3, 4, 5]; want 3 axes, [streams, heads, length]"),
    "k of shape [1, channels, length]": (
        {"k": torch.zeros(1, 12, 5)}, ValueError,
        "k has shape [1, 12, 5]; want the streams, heads and length of x, [3, 4, 5]"),
    "k that would broadcast": (
        {"k": torch.zeros(1, 4, 5)}, ValueError,
        "k has shape [1, 4, 5]; want the streams, heads and length of x, [3, 4, 5]"),
    "x sliced from a wider buffer": (
        {"x": torch.zeros(2, 3, 4, 8).half()[..., :5]}, ValueError,
        "x is not contiguous: shape [2, 3, 4, 5], strides [96, 32, 8, 1]; want a contiguous tensor, such as "
        "x.contiguous()"),
    "gate expanded": (
        {"in_gate": torch.zeros(1, 3, 4, 5).half().expand(SHAPE)}, ValueError,
        "in_gate is not contiguous: shape [2, 3, 4, 5], strides [0, 20, 5, 1]; want a contiguous tensor, such as "
        "in_gate.contiguous()"),
    "k transposed": (
        {"k": torch.zeros(4, 3, 5).transpose(0, 1)}, ValueError,
        "k is not contiguous: shape [3, 4, 5], strides [5, 15, 1]; want a contiguous tensor, such as k.contiguous()"),
    "sparse gate": (
        {"out_gate": torch.zeros(SHAPE).half().to_sparse()}, ValueError,
        "out_gate is a tensor of layout torch.sparse_coo; want a dense one (torch.strided)"),
    "gate elsewhere": (
        {"in_gate": torch.zeros(SHAPE, device="meta").half()}, ValueError,
        "in_gate is on meta; want the device of x, cpu"),
    "k elsewhere": (
        {"k": torch.zeros(SHAPE[1:], device="meta")}, ValueError, "k is on meta; want the device of x, cpu"),
    "all elsewhere": (
        {name: tensor.to("meta") for name, tensor in tensors().items()}, ValueError,
        "x is on meta; want a device of type cuda or cpu"),
    "x wants a gradient": (
        {"x": torch.zeros(SHAPE).half().requires_grad_()}, ValueError,
        "x requires a gradient, which glconv cannot give yet; want x.detach(), or the call under torch.no_grad()"),
    "k wants a gradient": (
        {"k": torch.nn.Parameter(torch.zeros(SHAPE[1:]))}, ValueError,
        "k requires a gradient, which glconv cannot give yet; want k.detach(), or the call under torch.no_grad()"),
    "length 0": (
        tensors(**{name: tensor[..., :0].clone() for name, tensor in tensors().items()}), ValueError,
        "x has shape [2, 3, 4, 0], its length axis is empty; only the batch may be"),
    "no streams": (
        tensors(**{name: tensor[..., :0, :, :].clone() for name, tensor in tensors().items()}), ValueError,
        "x has shape [2, 0, 4, 5], its streams axis is empty; only the batch may be"),
}


@pytest.mark.parametrize(("changed", "kind", "text"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("entry", [check, describe, gated_causal_conv])
def test_error(entry, changed, kind, text):
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        entry(**tensors(**changed))


@pytest.mark.parametrize(("changed", "kind", "text"), BAD.values(), ids=BAD)
def test_error_after_a_valid_call(changed, kind, text):
    """A signature seen before must not let another one through unchecked."""
    gated_causal_conv(**tensors(), config=EAGER)
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        gated_causal_conv(**tensors(**changed), config=EAGER)


def test_error_has_no_other_error_behind_it():
    with pytest.raises(TypeError) as caught:
        gated_causal_conv(**tensors(x=None))
    assert caught.value.__context__ is None


def test_config_of_another_type():
    with pytest.raises(TypeError, match="^config is of type dict; want SolverConfig or None$"):
        gated_causal_conv(**tensors(), config={"graph": "eager"})
    with pytest.raises(TypeError, match="^config is of type str; want SolverConfig or None$"):
        gated_causal_conv(**tensors(), config="configs/default.yaml")


def test_problem():
    problem = check(**tensors())
    assert problem == Problem(batch=2, streams=3, heads=4, length=5, device=torch.device("cpu"))
    assert problem.channels == 12
    assert hash(problem) == hash(check(**tensors()))


def test_empty_batch_gives_an_empty_result():
    y = gated_causal_conv(**tensors(**{name: torch.zeros(0, 3, 4, 5).half() for name in ("x", "in_gate", "out_gate")}))
    assert y.shape == (0, 3, 4, 5)
    assert y.dtype == torch.float16


def test_gradients_are_not_asked_for_under_no_grad():
    """A model's k is a parameter; inference must not need a detach."""
    wanted = tensors(k=torch.nn.Parameter(torch.ones(SHAPE[1:])), x=torch.ones(SHAPE).half())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = gated_causal_conv(**wanted, config=EAGER)
        assert not y.requires_grad
        assert y[0, 0, 0].tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="^k requires a gradient"):
        gated_causal_conv(**wanted, config=EAGER)


def test_size_one_axes_have_no_stride_that_matters():
    """PyTorch calls a slice of one row contiguous whatever its stride, and so it is."""
    wide = torch.ones(4, 3, 4, 5).half()
    y = gated_causal_conv(wide[::4], wide[:1], wide[:1], torch.ones(3, 4, 5), config=EAGER)
    assert y[0, 2, 3].tolist() == [1, 2, 3, 4, 5]
