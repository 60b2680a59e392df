"""The contract of the operator, checked in this one place: every error a caller can make is named here.

    y[b, s, h, :] = out_gate[b, s, h, :] * causal_conv(x[b, s, h, :] * in_gate[b, s, h, :], k[s, h, :])

| tensor               | shape                            | dtype | layout     |
|----------------------|----------------------------------|-------|------------|
| x, in_gate, out_gate | [batch, streams, heads, length]  | FP16  | contiguous |
| k                    | [streams, heads, length]         | FP32  | contiguous |
| y                    | as x                             | FP16  | contiguous |

causal_conv is the zero-padded linear convolution, its first `length` positions. The batch may be empty (y is empty
too); streams, heads and length may not.
"""
from dataclasses import dataclass

import torch

SIGNAL_AXES = ("batch", "streams", "heads", "length")
KERNEL_AXES = SIGNAL_AXES[1:]
DEVICE_TYPES = ("cuda", "cpu")


@dataclass(frozen=True)
class Problem:
    """The sizes of one valid call: all that a plan needs to know about its tensors."""

    batch: int
    streams: int
    heads: int
    length: int
    device: torch.device

    @property
    def channels(self) -> int:
        """Streams and heads as one axis: independent channels, each with its own kernel."""
        return self.streams * self.heads


def check(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor) -> Problem:
    """The Problem that four tensors make, or an error that names the argument, what came and what is wanted.

    Raises:
        TypeError: an argument is not a tensor, or has the wrong dtype.
        ValueError: anything else: wrong rank or shape, an empty axis other than batch, mixed or unsupported devices, a
            layout that is not dense and contiguous, a lazily negated view, or a tensor that requires a gradient while
            gradients are recorded (there is no backward pass yet; under torch.no_grad() and torch.inference_mode() such
            tensors are welcome).
    """
    signals = {"x": x, "in_gate": in_gate, "out_gate": out_gate}
    for name, tensor in signals.items():
        _check_tensor(name, tensor, torch.float16)
    _check_tensor("k", k, torch.float32)

    _check_rank("x", x, SIGNAL_AXES)
    for axis, size in zip(KERNEL_AXES, x.shape[1:]):
        if size == 0:
            raise ValueError(f"x has shape {list(x.shape)}, its {axis} axis is empty; only the batch may be")
    for name in ("in_gate", "out_gate"):
        if signals[name].shape != x.shape:
            raise ValueError(f"{name} has shape {list(signals[name].shape)}; want the shape of x, {list(x.shape)}")
    _check_rank("k", k, KERNEL_AXES)
    if k.shape != x.shape[1:]:
        raise ValueError(f"k has shape {list(k.shape)}; want the streams, heads and length of x, {list(x.shape[1:])}")

    if x.device.type not in DEVICE_TYPES:
        raise ValueError(f"x is on {x.device}; want a device of type {' or '.join(DEVICE_TYPES)}")
    for name, tensor in (("in_gate", in_gate), ("out_gate", out_gate), ("k", k)):
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}; want the device of x, {x.device}")
    batch, streams, heads, length = x.shape
    return Problem(batch, streams, heads, length, x.device)


def _check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """What is asked of each tensor alone: its type, dtype, layout, and that no gradient is wanted of it."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is of type {type(tensor).__name__}; want torch.Tensor")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; want {dtype}")
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise ValueError(f"{name} is a tensor of layout {layout}; want a dense one (torch.strided)")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: shape {list(tensor.shape)}, strides {list(tensor.stride())}; "
                         f"want a contiguous tensor, such as {name}.contiguous()")
    if not torch.compiler.is_compiling() and tensor.is_neg():     # Dynamo cannot ask; the dispatcher resolves it there
        raise ValueError(f"{name} is a lazily negated view; want {name}.resolve_neg()")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, which glconv cannot give yet; want {name}.detach(), or the call "
                         "under torch.no_grad()")


def _check_rank(name: str, tensor: torch.Tensor, axes: tuple[str, ...]) -> None:
    if tensor.dim() != len(axes):
        raise ValueError(f"{name} has shape {list(tensor.shape)}; want {len(axes)} axes, [{', '.join(axes)}]")
