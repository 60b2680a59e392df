"""glconv: gated long convolution, y = out_gate * causal_conv(x * in_gate, k), in FP16 with an FP32 kernel.

    from glconv import gated_causal_conv
    y = gated_causal_conv(x, in_gate, out_gate, k)

The first call of a signature (shapes, dtypes, devices) checks the tensors and chooses a route; later calls of the same
signature look that route up and take it, or find that it is the one taken last.
"""
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from . import ops, reference  # noqa: F401  (ops registers the operators)
from .config import SolverConfig, active_config
from .contract import Problem, check
from .spectral import graph, right_angle

__all__ = ["Problem", "Route", "SolverConfig", "active_config", "check", "describe", "gated_causal_conv"]
__version__ = "0.1.0"

Operator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
FUSED_PATHS = ("portable", "hopper")
# Dynamo's own check of a graph's inputs: types, dispatch keys, dtypes, devices, sizes, strides, gradients wanted.
TensorGuards: Any = torch._C._dynamo.guards.TensorGuards
log = logging.getLogger(__name__)


class Route(NamedTuple):
    """How calls of one signature are answered."""

    path: str       # portable | hopper | spectral | right-angle | eager | empty
    reason: str     # why this path, in one line
    call: Operator


class Known(NamedTuple):
    """A signature that was met, as a check of four tensors that takes 0.3 us; the look-up of a signature takes 2."""

    config: SolverConfig | None
    alike: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], bool]
    call: Operator


_routes: dict[tuple, Known] = {}
_NOTHING = Known(None, lambda *tensors: False, reference.eager)
_last = _NOTHING        # what answered the call before
_ROUTES_KEPT = 4096     # a program that never repeats a shape must not grow without bound


def gated_causal_conv(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor,
                      config: SolverConfig | None = None) -> torch.Tensor:
    """y[b, s, h, :] = out_gate[b, s, h, :] * causal_conv(x[b, s, h, :] * in_gate[b, s, h, :], k[s, h, :])

    causal_conv is the zero-padded linear convolution, its first `length` positions: never circular.

    Args:
        x, in_gate, out_gate: FP16 [batch, streams, heads, length], contiguous, on one CUDA or CPU device.
        k: FP32 [streams, heads, length], contiguous, on the same device.
        config: knobs; by default those of the file named by GLCONV_CONFIG, or the defaults.

    Returns:
        y, FP16 [batch, streams, heads, length], contiguous, newly allocated; the inputs are left as they are. Relative
        L2 from float64 at most 1e-3 a row for ordinary inputs (4e-3 with the spectral graph's FP16 transforms).

    Raises:
        TypeError, ValueError: as `check` says; also for a tensor that requires a gradient while they are recorded.
    """
    global _last
    if is_compiling():
        return _traced(x, in_gate, out_gate, k, config)
    last_config, alike, call = _last
    if last_config is config and alike(x, in_gate, out_gate, k):
        return call(x, in_gate, out_gate, k)
    known = None
    signature: tuple = ()
    try:
        # A hit proves that `check` passed before for an identical signature, so it is not run again.
        signature = (
            config, x.shape, in_gate.shape, out_gate.shape, k.shape, x.dtype, in_gate.dtype, out_gate.dtype, k.dtype,
            x.device, in_gate.device, out_gate.device, k.device,
            x.is_contiguous(), in_gate.is_contiguous(), out_gate.is_contiguous(), k.is_contiguous(),
            type(x), type(in_gate), type(out_gate), type(k),
            (x.requires_grad or in_gate.requires_grad or out_gate.requires_grad or k.requires_grad)
            and torch.is_grad_enabled())
        known = _routes.get(signature)
    except (AttributeError, TypeError, RuntimeError):
        pass        # not four dense tensors and a config: the full check says which
    if known is None:
        known = _first_call(x, in_gate, out_gate, k, config)
        if len(_routes) >= _ROUTES_KEPT:
            _routes.clear()
        _routes[signature] = known
    _last = known
    return known.call(x, in_gate, out_gate, k)


def describe(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor,
             config: SolverConfig | None = None) -> Route:
    """The route that `gated_causal_conv` takes for these arguments, without taking it. Raises as that does."""
    return _route(check(x, in_gate, out_gate, k), _resolve(config))


@torch.compiler.assume_constant_result
def _active() -> SolverConfig:
    return active_config()


def _resolve(config: SolverConfig | None) -> SolverConfig:
    if config is None:
        return _active()
    if not isinstance(config, SolverConfig):
        raise TypeError(f"config is of type {type(config).__name__}; want SolverConfig or None")
    return config


def _first_call(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor,
                config: SolverConfig | None) -> Known:
    """Checks the arguments and chooses how calls of their signature are answered."""
    problem = check(x, in_gate, out_gate, k)
    tensors = x, in_gate, out_gate, k
    if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in tensors):
        # Fake tensors and other subclasses: the dispatcher knows them.
        return Known(config, _NOTHING.alike, torch.ops.glconv.gated_causal_conv)
    route = _route(problem, _resolve(config))
    log.debug("%s: path %s, %s", problem, route.path, route.reason)
    if any(tensor.requires_grad for tensor in tensors):     # whether that is welcome depends on where the call stands
        return Known(config, _NOTHING.alike, route.call)
    alike = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return Known(config, alike, route.call)


def _traced(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor,
            config: SolverConfig | None) -> torch.Tensor:
    """The call while torch.compile traces a model around it, without a graph break: an opaque operator, or the graph
    that the config names, for the model's own compilation to fuse with what surrounds it."""
    problem, config = check(x, in_gate, out_gate, k), _resolve(config)
    if config.graph == "eager":
        return reference.eager(x, in_gate, out_gate, k)
    if config.graph == "spectral" and problem.batch:
        dtype = graph.transform_dtype(problem.length, problem.device, config)
        return graph.spectral_graph(dtype)(x, in_gate, out_gate, k)
    return torch.ops.glconv.gated_causal_conv(x, in_gate, out_gate, k)


def _route(problem: Problem, config: SolverConfig) -> Route:
    """The one place where problem, device and config become a path."""
    path, reason = config.graph, f"graph: {config.graph}"
    if problem.batch == 0:
        return Route("empty", "the batch is empty", lambda x, in_gate, out_gate, k: torch.empty_like(x))
    if path in ("auto", "fused") and problem.device.type == "cuda":
        from .fused import launch

        plan = launch.plan_for(problem, config.kernel)
        if plan.path in FUSED_PATHS:
            return Route(plan.path, plan.reason, launch.launcher(problem, plan))
        if path == "fused":
            raise ValueError(f"graph: fused has no kernel for {problem}: {plan.reason}; want graph: auto")
        path, reason = plan.path, plan.reason
    elif path in ("auto", "fused"):
        path, reason = "right-angle", f"{reason} on a CPU"
    return Route(path, reason, _dataflow(path, config, problem.length, problem.device))


@functools.lru_cache(maxsize=_ROUTES_KEPT)
def operator_call(problem: Problem) -> Operator:
    """How the registered operator answers a problem on CUDA when it runs: as a direct call under the process's config
    does, long sequences and empty batches included."""
    return _route(problem, active_config()).call


@functools.cache
def _dataflow(path: str, config: SolverConfig, length: int, device: torch.device) -> Operator:
    """A path outside the fused kernels. Kept, for its compiled graphs belong to it."""
    if path == "eager":
        return reference.eager
    if path == "spectral":
        return graph.build(config, length, device)
    return right_angle.build(config, device)
