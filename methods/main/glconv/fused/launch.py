"""From four tensors on a GPU to one launch: what a problem fixes is bound once, each call fills in pointers."""
import ctypes
import functools
import logging
import math
from collections.abc import Callable

import torch

from .. import dft
from ..contract import Problem
from ..plan import Plan, device_of, make_plan
from . import portable
from .driver import DriverError, Entry, tensor_map

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
WINDOW = 1 << 33
WINDOW_ROWS = 2 ** 31 - 1


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
            return (Hopper if plan.path == "hopper" else Portable)(problem, plan)
        except (AttributeError, DriverError) as error:
            if plan.path == "hopper":
                log.warning("the Hopper kernel cannot be launched here: %s; the portable kernel serves", error)
                return launcher(problem, plan_for(problem, "portable"))
            log.warning("launching through Triton's own entry, slower on the host: %s", error)
            return Jitted(problem, plan)


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
    """What the two kernels' launchers share: the device, its guard, the way out for pointers of another alignment."""

    ALIGNMENT = 16      # bytes
    entry: Entry

    def __init__(self, problem: Problem) -> None:
        self.device = problem.device.index if problem.device.index is not None else torch.cuda.current_device()
        self.any_alignment = Jitted(problem, plan_for(problem, "portable"))

    def __call__(self, x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        if torch._C._cuda_getDevice() != self.device:
            with torch.cuda.device(self.device):
                return self(x, in_gate, out_gate, k)
        y = torch.empty_like(x)
        pointers = x.data_ptr(), in_gate.data_ptr(), out_gate.data_ptr(), y.data_ptr(), k.data_ptr()
        if (pointers[0] | pointers[1] | pointers[2] | pointers[3] | pointers[4]) % self.ALIGNMENT:
            return self.any_alignment(x, in_gate, out_gate, k)
        entry = self.entry
        with entry.lock:
            if self.fill(*pointers):
                entry.launch(torch._C._cuda_getCurrentRawStream(self.device))
                return y
        return self.any_alignment(x, in_gate, out_gate, k)

    def fill(self, x: int, in_gate: int, out_gate: int, y: int, k: int) -> bool:
        """Writes the pointers into the entry's arguments; False where they lie too far apart for it."""
        raise NotImplementedError


class Portable(Bound):
    """The plain Triton kernel through its compiled entry."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        super().__init__(problem)
        align = math.gcd(problem.length, 16)
        sample = torch.empty(1, dtype=torch.float16, device=problem.device)
        kernel = torch.empty(1, dtype=torch.float32, device=problem.device)
        self.constants = dft.factors(plan.n1, plan.n2, problem.device)
        sizes = problem.batch, problem.channels, problem.length // align, dft.gain(plan.n1, plan.n2)
        compiled = portable.right_angle_kernel.warmup(
            sample, sample, sample, kernel, sample, *self.constants, *sizes, grid=(plan.programs,),
            **portable.constants(plan, problem.length == plan.blocks * plan.n1 * plan.n2, align),
            num_warps=plan.warps, maxnreg=plan.registers)
        pointers = [ctypes.c_void_p() for _ in range(5)]
        self.entry = Entry(compiled, plan.programs, [
            *pointers, *(ctypes.c_void_p(matrix.data_ptr()) for matrix in self.constants),
            *(ctypes.c_int32(size) for size in sizes[:3]), ctypes.c_float(sizes[3])])

    def fill(self, x: int, in_gate: int, out_gate: int, y: int, k: int) -> bool:
        arguments = self.entry.arguments
        arguments[0].value = x
        arguments[1].value = in_gate
        arguments[2].value = out_gate
        arguments[3].value = k
        arguments[4].value = y
        return True


class Hopper(Bound):
    """The Gluon kernel through its compiled entry."""

    ALIGNMENT = 64      # a row of a tile

    def __init__(self, problem: Problem, plan: Plan) -> None:
        super().__init__(problem)
        n1, n2, tiles, batch, channels = plan.n1, plan.n2, plan.tiles, problem.batch, problem.channels
        stride = n1 * n2 if plan.blocks > 1 else channels * problem.length
        steps = -(-batch * plan.blocks // tiles)
        numbers = batch, channels, stride, steps, *divmod(channels * steps, plan.programs)
        self.constants = hopper.constants(n1, n2, problem.device)
        self.axes = (n2, WINDOW_ROWS, tiles), (2 * n2, 2 * stride), (n2, n1, tiles)
        self.base, self.row_bytes = 0, 2 * n2
        self.reach = (WINDOW_ROWS - batch * channels * problem.length // n2) * self.row_bytes
        gain = dft.gain(n1, n2)
        compiled = hopper.compiled(plan, problem.device, self.constants, numbers, gain)
        self.entry = Entry(compiled, plan.programs, [
            tensor_map(0, *self.axes), *(ctypes.c_int32() for _ in range(3)), *(ctypes.c_int64() for _ in range(3)),
            *(ctypes.c_int32() for _ in range(4)), ctypes.c_void_p(), ctypes.c_void_p(),
            *(ctypes.c_void_p(matrix.data_ptr()) for matrix in self.constants),
            *(ctypes.c_int32(number) for number in numbers), ctypes.c_float(gain)])

    def fill(self, x: int, in_gate: int, out_gate: int, y: int, k: int) -> bool:
        base, row_bytes = min(x, in_gate, out_gate, y) & -WINDOW, self.row_bytes
        if max(x, in_gate, out_gate, y) - base > self.reach:
            return False
        if base != self.base:
            self.entry.point(0, tensor_map(base, *self.axes))
            self.base = base
        arguments = self.entry.arguments    # the map, its three sizes and strides, then the rows
        arguments[7].value = (x - base) // row_bytes
        arguments[8].value = (in_gate - base) // row_bytes
        arguments[9].value = (out_gate - base) // row_bytes
        arguments[10].value = (y - base) // row_bytes
        arguments[11].value = y
        arguments[12].value = k
        return True


def launch(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The fused convolution of four valid CUDA tensors, for callers that do not keep a launcher: the operator's own
    implementation. Raises ValueError where no fused kernel serves the problem."""
    problem = Problem(*x.shape, x.device)   # type: ignore[call-arg]  # four sizes, which mypy does not count
    plan = plan_for(problem)
    if plan.path not in ("portable", "hopper"):
        raise ValueError(f"no fused kernel for {problem}: {plan.reason}")
    return launcher(problem, plan)(x, in_gate, out_gate, k)
