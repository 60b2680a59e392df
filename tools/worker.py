"""The judge's fresh process: loads one copied method folder, examines and times its cases, writes JSON lines.

Started by `judge` as `python -m tools.worker`. The job comes as JSON on standard input, messages leave as one JSON
object a line on standard output; whatever the method prints goes to standard error.
"""
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from . import timing
from .cases import Case, Data, make_inputs

ROOT = Path(__file__).resolve().parent.parent
# Relative L2 from float64, of the whole result and of its worst row. Ordinary inputs give 3e-4 (one rounding to FP16)
# to 9e-4 (FP16 tensor-core transforms). FP16 FFTs need these limits: at L = 2048, B = 64 an H200 gave 2.2e-3 for the
# published dataflows, and 3.6e-3 for the worst of 49152 rows.
L2_LIMIT = 2.5e-3
ROW_LIMIT = 4e-3
# A row weaker than FP16's normal numbers is measured against a row of the smallest of those.
SMALLEST_NORMAL = 2.0**-14
ORACLE_ELEMENTS = 1 << 24   # a slab of the float64 oracle: about 1 GiB with its spectra

Tensors = tuple[torch.Tensor, ...]
ARGUMENTS = ("x", "in_gate", "out_gate", "k")


class Wrong(Exception):
    """The method's answer, or what it did, is not what the contract asks; the text says what and why."""


def load_file(name: str, path: Path) -> ModuleType:
    """A Python file as a module of its own, outside any package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def frozen_eager() -> Callable[..., Any]:
    """solve(x, in_gate, out_gate, k) of the frozen baseline, which every speed-up is a ratio to."""
    return load_file("frozen_eager", ROOT / "methods" / "eager" / "solver.py").solve


def leave_repository() -> None:
    """The method must stand on its own folder: nothing of the repository stays importable, installed for editing or
    not."""
    methods = ROOT / "methods"
    entries = [(entry, Path(entry).resolve()) for entry in sys.path]
    sys.path[:] = [entry for entry, path in entries if path != ROOT and methods not in (path, *path.parents)]


def originals() -> Data:
    """What a timing or a check rests on, and a method must not replace."""
    cuda = torch.cuda
    return {"time.perf_counter": time.perf_counter, "torch.cuda.Event": cuda.Event,
            "torch.cuda.synchronize": cuda.synchronize, "torch.cuda._sleep": cuda._sleep,
            "torch.Tensor.norm": torch.Tensor.norm, "torch.fft.rfft": torch.fft.rfft, "torch.equal": torch.equal}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy to compare bit by bit, NaN included."""
    return tensor.clone().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same_bits(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    return torch.equal(tensor.view(before.dtype), before)


def poison(shape: torch.Size, device: torch.device) -> None:
    """Leaves NaN in freed memory of the result's size, where the method's own allocation then lands: surely with CUDA's
    caching allocator, likely with malloc, which gives the first such block back to the system and keeps the second."""
    for _ in range(2):
        torch.full(shape, torch.nan, dtype=torch.float16, device=device)


def check_form(y: object, inputs: Tensors) -> None:
    """Type, shape, dtype, device, layout and memory of a result."""
    x = inputs[0]
    if not isinstance(y, torch.Tensor):
        raise Wrong(f"returns a {type(y).__name__}, want a torch.Tensor")
    for what, got, wanted in (("shape", list(y.shape), list(x.shape)), ("dtype", y.dtype, x.dtype),
                              ("device", y.device, x.device)):
        if got != wanted:
            raise Wrong(f"returns {what} {got}, want {wanted}")
    if not y.is_contiguous():
        raise Wrong(f"returns a non-contiguous tensor, strides {list(y.stride())}")
    for name, tensor in zip(ARGUMENTS, inputs):
        if y.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            raise Wrong(f"returns memory that belongs to the input {name}")


class Examiner:
    """Runs one method over cases on one device."""

    def __init__(self, method: ModuleType, device: torch.device, repeats: int) -> None:
        self.solve: Callable[..., Any] = method.solve
        self.describe: Callable[..., Any] | None = getattr(method, "describe", None)
        self.device = device
        self.repeats = repeats
        self.eager = frozen_eager()
        self.reference = load_file("judge_reference", ROOT / "methods" / "main" / "glconv" / "reference.py")

    def run(self, case: Case) -> Data:
        """Correctness, then time, then correctness once more. Raises Wrong, or whatever the method raises."""
        result = self.correctness(case)
        result |= self.memory(case)
        result |= self.time(case)
        inputs = make_inputs(case, -1, self.device)
        self.errors(self.solve(*inputs), inputs, "after the timed calls ")
        return result

    def correctness(self, case: Case) -> Data:
        first, second = (make_inputs(case, call, self.device) for call in (0, 1))
        result: Data = {}
        if self.describe:
            route = self.describe(*first)
            result |= {"path": route.path, "why": route.reason}
        before = [bits(tensor) for tensor in first]
        poison(first[0].shape, self.device)
        start = time.perf_counter()
        y = self.solve(*first)
        self.synchronize()
        result["first_call_s"] = time.perf_counter() - start
        check_form(y, first)
        for name, tensor, kept in zip(ARGUMENTS, first, before):
            if not same_bits(tensor, kept):
                raise Wrong(f"mutates its input {name}")
        l2, worst_row = self.errors(y, first)
        y_bits = bits(y)

        z = self.solve(*second)
        check_form(z, second)
        if not same_bits(y, y_bits):
            raise Wrong("changes an earlier result by a later call: the memory of results is shared")
        if torch.equal(z, y):
            raise Wrong("gives the same answer for different inputs: a kept result")
        self.errors(z, second, "for a second input ")

        # The same addresses with other values in them: what is kept by address shows here.
        for old, new in zip(first, second):
            old.copy_(new)
        self.errors(self.solve(*first), second, "for new values at old addresses ")
        return result | {"l2": l2, "worst_row": worst_row}

    def errors(self, y: torch.Tensor, inputs: Tensors, when: str = "") -> tuple[float, float]:
        """Relative L2 from float64, of all and of the worst row. Raises Wrong past the limits."""
        check_form(y, inputs)
        *signals, k = inputs
        rows = max(1, ORACLE_ELEMENTS // k.numel())
        least = SMALLEST_NORMAL * k.shape[-1] ** 0.5
        square_error = square_norm = worst = 0.0
        for parts in zip(*(tensor.split(rows) for tensor in (y, *signals))):
            part, exact = parts[0].double(), self.reference.oracle(*parts[1:], k)
            if not torch.isfinite(part).all():
                raise Wrong(f"{when}gives NaN or infinity where the answer is finite")
            error, norm = (part - exact).norm(dim=-1), exact.norm(dim=-1)
            worst = max(worst, (error / norm.clamp_min(least)).max().item())
            square_error += error.square().sum().item()
            square_norm += norm.square().sum().item()
        l2 = (square_error / square_norm) ** 0.5
        if not (l2 <= L2_LIMIT and worst <= ROW_LIMIT):
            raise Wrong(f"{when}gives a wrong answer: relative L2 {l2:.2e}, worst row {worst:.2e}; limits "
                        f"{L2_LIMIT:.1e}, {ROW_LIMIT:.1e}")
        return l2, worst

    def memory(self, case: Case) -> Data:
        """Peak device memory of a call beyond its inputs, in bytes; CUDA only."""
        if self.device.type != "cuda":
            return {}
        inputs = make_inputs(case, 2, self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.solve(*inputs)
        self.synchronize()
        return {"peak_bytes": torch.cuda.max_memory_allocated(self.device) - before}

    def time(self, case: Case) -> Data:
        """Both variants interleaved, each timed call on inputs drawn for it alone; milliseconds."""
        variants = {"eager": self.eager, "method": self.solve}
        call = iter(range(3, sys.maxsize))

        def fresh() -> Tensors:
            return make_inputs(case, next(call), self.device)

        for variant in variants.values():
            variant(*fresh())
        if self.device.type == "cuda":
            times = timing.time_cuda(variants, self.repeats, self.device, fresh=fresh)
        else:
            times = timing.time_cpu(variants, self.repeats, fresh=fresh)
        return {name: {"call_ms": taken.call, "gpu_ms": taken.gpu, "host_ms": taken.host, "spread": taken.spread}
                for name, taken in times.items()}

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def machine(device: torch.device) -> Data:
    """Device and versions, and the copy bandwidth that shares of the roofline are given against."""
    on_cuda = device.type == "cuda"
    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = None
    bandwidth = timing.copy_bandwidth(device) if on_cuda else timing.copy_bandwidth(device, size=1 << 27, repeats=7)
    return {"device": torch.cuda.get_device_name(device) if on_cuda else f"CPU, {torch.get_num_threads()} threads",
            "device_type": device.type, "python": ".".join(map(str, sys.version_info[:3])), "torch": torch.__version__,
            "triton": triton_version, "cuda": torch.version.cuda, "copy_bytes_per_s": bandwidth}


def main() -> int:
    job = json.load(sys.stdin)
    messages = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(event: str, **content: object) -> None:
        messages.write(json.dumps({"event": event, **content}) + "\n")
        messages.flush()

    device = torch.device(job["device"])
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    send("ready", machine=machine(device) if job["describe_machine"] else None)

    folder = Path(job["folder"])
    kept = originals()
    leave_repository()
    os.chdir(folder)
    try:
        examiner = Examiner(load_file("solver", folder / "solver.py"), device, job["repeats"])
    except Exception as error:
        send("unusable", reason=f"cannot be loaded: {summary(error)}")
        return 1
    send("loaded")
    for number, content in job["cases"]:
        case = Case(**content)
        send("start", case=number)
        result: Data
        try:
            result = {"status": "right", **examiner.run(case)}
        except Wrong as error:
            result = {"status": "wrong", "reason": str(error)}
        except Exception as error:
            traceback.print_exc()
            result = {"status": "wrong", "reason": f"raises {summary(error)}"}
        replaced = [name for name, value in originals().items() if value is not kept[name]]
        if replaced:
            result = {"status": "wrong", "reason": f"replaces {', '.join(replaced)}"}
        send("case", case=number, result=result)
        if not usable(device):
            return 1
    send("done")
    return 0


def summary(error: Exception) -> str:
    """Type and first lines of an error, for one line of a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def usable(device: torch.device) -> bool:
    """Whether the device still works: after a fault on the card every later call fails, and a new process is needed."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
