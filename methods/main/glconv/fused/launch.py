"""From four tensors on a GPU to one launch: what a problem fixes is bound once, each call fills in pointers."""
import ctypes
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from .. import dft
from ..contract import Problem
from ..plan import Plan, device_of, make_plan
from . import portable
from .driver import STREAM, DriverError, Entry, tensor_map

try:
    from . import hopper
    HOPPER_MISSING = ""
except (ImportError, AttributeError) as error:      # a Triton whose Gluon lacks what the kernel needs
    hopper = None   # type: ignore[assignment]
    HOPPER_MISSING = f"this Triton's Gluon lacks what the Hopper kernel needs: {error}"

log = logging.getLogger(__name__)
if HOPPER_MISSING:
    log.info("%s; the portable kernel serves sm_90", HOPPER_MISSING)

Operator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# All of a call's tensors are reached through one tensor map, whose rows begin at a multiple of 8 GiB: it depends on no
# tensor, so it is made once, not at every call for each (four of them took 100 us).
# Tensors begin in its first 2^30 rows; the plan keeps each one below as many.
WINDOW = 1 << 33
WINDOW_ROWS = 2 ** 31 - 1

# Inductor's allocation on the current device: half the time of torch.empty_like.
empty: Any = torch._C._dynamo.guards._empty_strided_cuda     # type: ignore[attr-defined]  # not in the type hints


@functools.lru_cache(maxsize=4096)
def plan_for(problem: Problem, kernel: str = "auto") -> Plan:
    """The plan for a problem on the CUDA device it lies on; `kernel` as in SolverConfig. Raises as `make_plan`."""
    if HOPPER_MISSING and kernel == "hopper":
        raise ValueError(f"kernel: hopper cannot run: {HOPPER_MISSING}")
    return make_plan(problem.batch, problem.channels, problem.length, device_of(problem.device),
                     "portable" if HOPPER_MISSING else kernel)


@functools.lru_cache(maxsize=4096)
def launcher(problem: Problem, plan: Plan) -> Operator:
    """The call that answers a problem with a fused plan: valid tensors in, one allocation, one launch.

    The kernel is compiled and loaded here. Safe under streams, capture and threads, on a device that is not current.
    """
    with torch.cuda.device(problem.device):
        try:
            return (Hopper if plan.path == "hopper" else Portable)(problem, plan).call
        except (AttributeError, DriverError) as error:
            if plan.path == "hopper":
                log.warning("the Hopper kernel cannot be launched here: %s; the portable kernel serves", error)
                return launcher(problem, plan_for(problem, "portable"))
            log.warning("launching through Triton's own entry, slower on the host: %s", error)
            return Jitted(problem, plan)


def index_of(device: torch.device) -> int:
    """A CUDA device's number, the current one's where it names none."""
    return device.index if device.index is not None else torch.cuda.current_device()


class Jitted:
    """The portable kernel through Triton's own launcher: any alignment, 35 us a call."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.plan = plan

    def __call__(self, x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        with torch.cuda.device(x.device):
            y = torch.empty_like(x)
            portable.run(x, in_gate, out_gate, k, self.plan, y)
        return y


class Bound:
    """A kernel through its compiled entry, for tensors of a certain alignment."""

    def __init__(self, problem: Problem, entry: Entry, alignment: int, shift: int = 0, reach: int = 64) -> None:
        """
        Args:
            alignment: bytes, a power of two, that every tensor begins at a multiple of.
            shift, reach: the kernel counts signals in units of 2**shift bytes from the entry's base, and takes numbers
                below 2**reach.
        """
        self.entry = entry
        self.any_alignment = Jitted(problem, plan_for(problem, "portable"))
        self.call = self.bind(problem, alignment, shift, reach)

    def bind(self, problem: Problem, alignment: int, shift: int, reach: int) -> Operator:
        """The call itself, as one flat function: in the middle of a program, where caches are cold, each further
        frame and attribute costs the host about half a microsecond."""
        sizes = problem.batch, problem.streams, problem.heads, problem.length
        strides = problem.channels * problem.length, problem.heads * problem.length, problem.length, 1
        current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
        entry, elsewhere, stray, half = self.entry, self.elsewhere, alignment - 1, torch.float16
        lock, record, write, start = entry.lock, entry.record, entry.layout.pack_into, entry.start
        config, function, addresses, device = entry.config, entry.function, entry.addresses, entry.device

        def call(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            if current_device() != device:
                with torch.cuda.device(device):
                    return call(x, in_gate, out_gate, k)
            y = empty(sizes, strides, half)
            x_at, in_at, out_at, k_at, y_at = (
                x.data_ptr(), in_gate.data_ptr(), out_gate.data_ptr(), k.data_ptr(), y.data_ptr())
            with lock:
                base = entry.base
                x_, in_, out_, y_ = (
                    (x_at - base) >> shift, (in_at - base) >> shift, (out_at - base) >> shift, (y_at - base) >> shift)
                if not ((x_at | in_at | out_at | k_at | y_at) & stray or (x_ | in_ | out_ | y_) >> reach):
                    write(record, STREAM, current_stream(device), 0, 0, x_, in_, out_, k_at, y_)
                    code = start(config, function, addresses, None)
                    if code:
                        entry.retry(code)
                    return y
            del y       # what answers instead makes its own, in the same place
            return elsewhere(x, in_gate, out_gate, k, (x_at, in_at, out_at, y_at))

        return call

    def elsewhere(self, x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor,
                  signals: tuple[int, ...]) -> torch.Tensor:
        """The result where the entry does not serve the tensors as they lie."""
        return self.any_alignment(x, in_gate, out_gate, k)


class Portable(Bound):
    """The plain Triton kernel."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        align = math.gcd(problem.length, 16)
        sample = torch.empty(1, dtype=torch.float16, device=problem.device)
        kernel = torch.empty(1, dtype=torch.float32, device=problem.device)
        self.constants = dft.factors(plan.n1, plan.n2, problem.device)
        sizes = problem.batch, problem.channels, problem.length // align, dft.gain(plan.n1, plan.n2)
        compiled = portable.right_angle_kernel.warmup(
            sample, sample, sample, kernel, sample, *self.constants, *sizes, grid=(plan.programs,),
            **portable.constants(plan, problem.length == plan.blocks * plan.n1 * plan.n2, align),
            num_warps=plan.warps, maxnreg=plan.registers)
        super().__init__(problem, Entry(compiled, index_of(problem.device), plan.programs, [], "QQQQQ", [
            *(ctypes.c_void_p(matrix.data_ptr()) for matrix in self.constants),
            *(ctypes.c_int32(size) for size in sizes[:3]), ctypes.c_float(sizes[3])]), alignment=16)


class Hopper(Bound):
    """The Gluon kernel."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        n1, n2, tiles, batch, channels = plan.n1, plan.n2, plan.tiles, problem.batch, problem.channels
        stride = n1 * n2 if plan.blocks > 1 else channels * problem.length
        steps = -(-batch * plan.blocks // tiles)
        shares = divmod(channels * steps, plan.programs)
        numbers = shares if tiles == 1 else (batch, channels, stride, steps, *shares)
        self.constants = hopper.constants(n1, n2, problem.device)
        self.axes = (n2, WINDOW_ROWS, tiles), (2 * n2, 2 * stride), (n2, n1, tiles)
        gain = dft.gain(n1, n2)
        compiled = hopper.compiled(plan, problem.device, self.constants, numbers, gain)
        row = 2 * n2    # bytes
        super().__init__(problem, Entry(compiled, index_of(problem.device), plan.programs, [
            # the map, its three sizes and strides, and the address its rows count from
            tensor_map(0, *self.axes), *(ctypes.c_int32() for _ in range(3)), *(ctypes.c_int64() for _ in range(3)),
            ctypes.c_void_p()], "iiiQi", [
            *(ctypes.c_void_p(matrix.data_ptr()) for matrix in self.constants),
            *(ctypes.c_int32(number) for number in numbers), ctypes.c_float(gain)]),
            alignment=row, shift=row.bit_length() - 1, reach=30)

    def elsewhere(self, x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor,
                  signals: tuple[int, ...]) -> torch.Tensor:
        """Moves the window to where the tensors are; if it is there already they lie too far apart, or astray."""
        entry, base = self.entry, min(signals) & -WINDOW
        with entry.lock:
            moved = base != entry.base
            if moved:
                entry.replace(0, tensor_map(base, *self.axes))
                entry.replace(7, ctypes.c_void_p(base))
                entry.base = base
        return (self.call if moved else self.any_alignment)(x, in_gate, out_gate, k)


def launch(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The fused convolution of four valid CUDA tensors, for callers that do not keep a launcher: the operator's own
    implementation. Raises ValueError where no fused kernel serves the problem."""
    problem = Problem(*x.shape, x.device)   # type: ignore[call-arg]  # four sizes, which mypy does not count
    plan = plan_for(problem)
    if plan.path not in ("portable", "hopper"):
        raise ValueError(f"no fused kernel for {problem}: {plan.reason}")
    return launcher(problem, plan)(x, in_gate, out_gate, k)
