"""torch.compile as this package uses it: one specialised graph a shape, no graph break, no silent fall to eager.

Dynamo keeps its graphs and counts its recompilations per code object. Each signature of inputs gets a code object of
its own here, so a program may use many shapes without one of them using up the limit of the others, a call finds its
graph by one dictionary look-up, and nothing in the host program's Dynamo settings changes: limits are raised only while
a graph is being made.
"""
import functools
import logging
import os
import shutil
import sysconfig
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .config import SolverConfig

Function = Callable[..., Any]
log = logging.getLogger(__name__)

# What PyTorch says of complex tensors in every graph here: their arithmetic is spelled out in real numbers where it
# matters, and FP16 transforms are meant.
EXPECTED = (".*does not support code generation for complex operators", ".*ComplexHalf support is experimental")


class RecompileLimitWarning(UserWarning):
    """More signatures were met than `recompile_limit` graphs; those beyond it run uncompiled."""


# One for all graphs: the settings that a compilation holds are the process's. Reentrant: what a compilation calls, a
# warning's hook for example, may call a graph.
COMPILING = threading.RLock()


class CompiledGraph:
    """A function of tensors, compiled by Inductor once for each signature.

    A signature is what Dynamo specialises a graph on: shapes, strides, dtypes and devices of tensors, other arguments
    as they are (hashable ones), which of them are one object, and the modes a call is made in. With `dynamic` one graph
    with symbolic sizes serves all signatures (Dynamo may still need a few). At most `recompile_limit` graphs are made.
    Signatures met later run uncompiled, right but slower; each gives a RecompileLimitWarning that names the signature
    and the knob, and those already compiled stay so. Threads may share one of these: a signature is compiled once.
    """

    def __init__(self, function: Function, config: SolverConfig) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.config = config
        self.graphs: dict[tuple, Function] = {}
        self.compilations = 0
        self._shared: Function | None = None
        self._replays = replays_cuda_graphs(config)

    def __call__(self, *arguments: Any) -> Any:
        key = signature(arguments)
        graph = self.graphs.get(key)
        if self._replays:
            torch.compiler.cudagraph_mark_step_begin()
        result = graph(*arguments) if graph else self._first_call(key, arguments)
        # A replay writes where the one before wrote; the caller's answer must not change under it.
        return tree_map(torch.clone, result) if self._replays else result

    def _first_call(self, key: tuple, arguments: tuple) -> Any:
        from torch._dynamo.exc import FailOnRecompileLimitHit

        with COMPILING:
            graph = self.graphs.get(key)        # another thread may have been first
            if graph:
                return graph(*arguments)
            if self.compilations >= self.config.recompile_limit:
                self.graphs[key] = self._beyond_limit(arguments)
                return self.function(*arguments)
            graph = self._graph()
            with recompile_limits(self.config.recompile_limit), warnings.catch_warnings():
                for text in EXPECTED:
                    warnings.filterwarnings("ignore", text, UserWarning)
                try:
                    result = graph(*arguments)
                except FailOnRecompileLimitHit:
                    self.graphs[key] = self._beyond_limit(arguments)
                    return self.function(*arguments)
            self.graphs[key] = graph
            return result

    def _graph(self) -> Function:
        if self.config.dynamic:
            self._shared = self._shared or self._compile()
            return self._shared
        self.compilations += 1
        return self._compile()

    def _compile(self) -> Function:
        # fullgraph makes a graph break, and Dynamo's own limit, an exception instead of a quiet return to eager.
        return torch.compile(own_code(self.function), fullgraph=True, dynamic=self.config.dynamic,
                             **inductor_arguments(self.config))

    def _beyond_limit(self, arguments: tuple) -> Function:
        shapes = ", ".join(f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else str(value)
                           for value in arguments)
        warnings.warn(f"{self.function.__name__}: {self.config.recompile_limit} graphs are compiled, the most that "
                      f"recompile_limit allows, so inputs {shapes} run uncompiled, correct but slower; raise "
                      "recompile_limit, use fewer shapes, or set dynamic: true", RecompileLimitWarning, stacklevel=4)
        return self.function


def signature(arguments: tuple) -> tuple:
    """What a graph is specialised on: see `CompiledGraph`."""
    given = [id(value) for value in arguments]
    twice = tuple(map(given.index, given)) if len(set(given)) < len(given) else ()
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads(),
            torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), twice,
            *((value.shape, value.stride(), value.dtype, value.device, value.is_inference(), value.requires_grad)
              if isinstance(value, torch.Tensor) else value for value in arguments))


def compile_graph(function: Function, config: SolverConfig) -> Function:
    """`function` (of tensors, without graph breaks) compiled as `config` says, or as it is with compile: false.

    Returns a callable of the same tensors. Raises, at the first call of a signature, what torch.compile raises.
    """
    return CompiledGraph(function, config) if config.compile else function


def own_code(function: Function) -> Function:
    """The same function over a copy of its code object; Dynamo's caches and limits belong to a code object."""
    return functools.update_wrapper(
        types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__,
                           function.__closure__), function)


def inductor_arguments(config: SolverConfig) -> dict[str, Any]:
    """mode or options for torch.compile, which takes one of the two."""
    if config.options:
        return {"options": dict(config.options)}
    return {} if config.mode == "default" else {"mode": config.mode}


def replays_cuda_graphs(config: SolverConfig) -> bool:
    """Whether Inductor records CUDA graphs, whose results live in buffers that the next call overwrites."""
    return config.mode in ("reduce-overhead", "max-autotune") or bool(dict(config.options).get("triton.cudagraphs"))


def recompile_limits(limit: int):
    """A scope in which Dynamo allows `limit` recompilations of one function; the host's settings return after it."""
    import torch._dynamo

    known = torch._dynamo.config
    return known.patch(recompile_limit=limit,
                       accumulated_recompile_limit=max(4 * limit, known.accumulated_recompile_limit))


@functools.lru_cache(maxsize=8)
def missing_toolchain(device: torch.device) -> str | None:
    """What Inductor lacks to compile for `device`, or None. On a CPU it needs a C++ compiler and Python's headers; the
    lack is logged once, as a warning, since the path is slower without."""
    if device.type != "cpu":
        return None
    lack = None
    if not shutil.which(os.environ.get("CXX", "g++").split()[0]):
        lack = f"no C++ compiler ({os.environ.get('CXX', 'g++')}) is on the PATH; install g++ or set CXX"
    elif not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        lack = f"Python's headers are not in {sysconfig.get_paths()['include']}; install python3-dev"
    if lack:
        log.warning("graphs run uncompiled on the CPU: %s", lack)
    return lack
