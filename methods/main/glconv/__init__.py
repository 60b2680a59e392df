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


def _never(*tensors: torch.Tensor) -> bool:
    """Alike to nothing."""
    return False


_NOTHING = Known(None, _never, reference.eager)
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
    try:
        # Of a nested tensor Dynamo's check would ask for strides, which ends the process.
        same = last_config is config and not (
            x.is_nested or in_gate.is_nested or out_gate.is_nested or k.is_nested) and alike(x, in_gate, out_gate, k)
    except AttributeError:
        same = False        # not a tensor
    if same:
        return call(x, in_gate, out_gate, k)
    known = None
    signature: tuple | None = None
    try:
        # A hit proves that `check` passed before for an identical signature, so it is not run again.
        signature = (
            config, x.shape, in_gate.shape, out_gate.shape, k.shape, x.dtype, in_gate.dtype, out_gate.dtype, k.dtype,
            x.device, in_gate.device, out_gate.device, k.device,
            x.is_contiguous(), in_gate.is_contiguous(), out_gate.is_contiguous(), k.is_contiguous(),
            x.layout, in_gate.layout, out_gate.layout, k.layout, type(x), type(in_gate), type(out_gate), type(k),
            x.is_neg() or in_gate.is_neg() or out_gate.is_neg() or k.is_neg(),
            (x.requires_grad or in_gate.requires_grad or out_gate.requires_grad or k.requires_grad)
            and torch.is_grad_enabled())
        known = _routes.get(signature)
    except (AttributeError, TypeError, RuntimeError):
        signature = None    # not four dense tensors and a config, and the full check says which; or symbolic sizes
    if known is None:
        known = _first_call(x, in_gate, out_gate, k, config)
        if len(_routes) >= _ROUTES_KEPT:
            _routes.clear()
        if signature is not None:
            _routes[signature] = known
    elif signature and not known.alike(x, in_gate, out_gate, k):    # first met in another mode, inference for example
        known = _routes[signature] = known._replace(alike=_alike(x, in_gate, out_gate, k))
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
    problem, resolved = check(x, in_gate, out_gate, k), _resolve(config)
    # Fake tensors and other subclasses: the dispatcher knows them.
    call: Operator = torch.ops.glconv.gated_causal_conv
    if _plain(x, in_gate, out_gate, k):
        route = _route(problem, resolved)
        log.debug("%s: path %s, %s", problem, route.path, route.reason)
        call = route.call
    return Known(config, _alike(x, in_gate, out_gate, k), call)


def _plain(*tensors: torch.Tensor) -> bool:
    return all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)


def _alike(*tensors: torch.Tensor) -> Callable[..., bool]:
    """A check of four tensors for the signature of these. Never true where a tensor is given twice; of tensors that
    require a gradient only while none is recorded."""
    if not _plain(*tensors) or len(set(map(id, tensors))) < len(tensors):
        return _never
    same = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    if any(tensor.requires_grad for tensor in tensors):
        return lambda *others: not torch.is_grad_enabled() and same(*others)
    return same


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
