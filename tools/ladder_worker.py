"""The ladder's process for one version: compiles and checks it, waits for the device to be its own, times it.

Started by `ladder` as `python -m tools.ladder_worker`. The job comes as JSON on standard input, the result leaves as
one JSON line on standard output; whatever else is printed goes to standard error.
"""
import contextlib
import fcntl
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "methods" / "main"))

import torch  # noqa: E402

from .cases import Case  # noqa: E402
from .worker import Examiner, Wrong, machine, summary  # noqa: E402

# What is run beside the versions: name -> SolverConfig fields of the shipped solver.
SHIPPED = {"spectral": {"graph": "spectral"}, "fused": {"graph": "fused"}}


@contextlib.contextmanager
def device_lock(path: str, alone: bool) -> Iterator[None]:
    """The device, shared with other processes that compile and check, or alone, to time. Fair enough for a pool of
    processes that each ask once: those that wait to time go when the last that compiles is done."""
    with open(path) as stream:
        fcntl.flock(stream, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def make_solver(name: str, path: str | None, device: torch.device) -> tuple[Callable[..., torch.Tensor], Any]:
    """The solver of a version's file, or a shipped one, and its SolverConfig."""
    if path is None:
        from glconv import SolverConfig, gated_causal_conv

        config = SolverConfig.from_mapping(SHIPPED[name])
        return functools.partial(gated_causal_conv, config=config), config
    import graphs

    version = graphs.load(Path(path))
    return version.solver(device), version.config


def benchmarks_to_compile(config: Any) -> bool:
    """Whether Inductor times kernels while it compiles: that too wants the device alone."""
    return config.mode.startswith("max-autotune") or any(
        value and name.startswith(("max_autotune", "benchmark_")) for name, value in config.options)


def examine(job: dict[str, Any]) -> dict[str, Any]:
    """Correctness, compilation figures and times of one version over the job's cases."""
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    device = torch.device(job["device"])
    solver, config = make_solver(job["name"], job["path"], device)
    examiner = Examiner(SimpleNamespace(solve=solver), device, job["repeats"])      # type: ignore[arg-type]
    cases = [Case(**case) for case in job["cases"]]
    result: dict[str, Any] = {"batches": {str(case.batch): {} for case in cases}}
    with device_lock(job["lock"], alone=benchmarks_to_compile(config)):
        for case in cases:
            kernels = metrics.generated_kernel_count
            checked = examiner.correctness(case)
            result["batches"][str(case.batch)] |= checked | {"kernels": metrics.generated_kernel_count - kernels}
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()        # the others need the memory while this one waits
    result["graph_breaks"] = sum(counters["graph_break"].values())
    result["graphs"] = counters["stats"]["unique_graphs"]
    with device_lock(job["lock"], alone=True):
        for case in cases:
            result["batches"][str(case.batch)] |= examiner.time(case)
        if job["describe_machine"]:
            result["machine"] = machine(device)
    return result


def main() -> int:
    job = json.load(sys.stdin)
    messages = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start = time.perf_counter()
    try:
        result = {"status": "right", **examine(job)}
    except Wrong as error:
        result = {"status": "wrong", "reason": str(error)}
    except Exception as error:
        traceback.print_exc()
        result = {"status": "failed", "reason": f"raises {summary(error)}"}
    messages.write(json.dumps(result | {"seconds": time.perf_counter() - start}) + "\n")
    messages.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
