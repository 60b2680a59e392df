"""The benchmark suite: batch, length and path, each against the eager baseline in the same run.

    make bench                          # runs it and saves what it found; make bench-compare holds it to the baseline
    pytest tests/bench                  # the bare suite, with pytest-benchmark's own options

Two measurements a case. pytest-benchmark times whole calls, each on fresh inputs, caches cold, the device awaited
before and after. `tools.timing` gives the speed-ups that are compared, eager and method in turns: on a GPU medians, by
GPU time and by whole calls; on a CPU the least of the times, which other programs disturb least. They and the error
stand in the case's extra_info.
"""
import dataclasses
import statistics
import sys

import pytest
import torch

from tools import cases, timing, worker

CHANNELS = {"cuda": 768, "cpu": 96}
ERROR_LIMIT = 5e-3  # of a row, relative L2; FP16 FFTs reach 3.5e-3
# name of a path -> the SolverConfig fields that select it; "auto" is the method's own solve
PATHS = {"auto": None, "portable": {"kernel": "portable"}, "spectral": {"graph": "spectral", "compile": False},
         "right-angle": {"graph": "right-angle", "compile": False}}
CASES = {       # path -> (batch, length) ...
    "cuda": {"auto": ((1, 2048), (4, 2048), (16, 2048), (64, 2048), (64, 256), (64, 512), (64, 1024), (16, 4096),
                      (8, 8192), (64, 1000), (16, 3000), (1, 65536)),
             "portable": ((1, 2048), (16, 2048), (64, 2048), (16, 4096)),
             "spectral": ((16, 2048),)},
    "cpu": {"auto": ((1, 2048), (8, 2048), (16, 512), (2, 8192)), "right-angle": ((8, 2048), (4, 3000)),
            "spectral": ((8, 2048),)},
}


@dataclasses.dataclass(frozen=True)
class Bench:
    device: str
    path: str
    batch: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.path}-b{self.batch}-l{self.length}"


ALL = [Bench(device, path, *size) for device, paths in CASES.items() for path, sizes in paths.items() for size in sizes]


def solver(method, path):
    """solve(x, in_gate, out_gate, k) of one path. Skips where the method is not the package."""
    if PATHS[path] is None:
        return method.solve
    package = sys.modules.get("glconv")
    if package is None or method.solve.__globals__.get("gated_causal_conv") is not package.gated_causal_conv:
        pytest.skip("a method of another kind has no paths of this package")
    config = package.SolverConfig(**PATHS[path])
    return lambda x, in_gate, out_gate, k: package.gated_causal_conv(x, in_gate, out_gate, k, config)


def check(solve, case, device) -> float:
    """The worst row's relative L2 from float64: a wrong result is not worth timing. How exact a right one must
    be, other tests say."""
    # By its file: the package of that name is the method's own.
    reference = worker.load_file("bench_reference", worker.ROOT / "methods" / "main" / "glconv" / "reference.py")
    *signals, k = cases.make_inputs(case, 0, device)
    y = solve(*signals, k)
    worker.check_form(y, (*signals, k))
    worst = max(reference.row_errors(part, reference.oracle(*parts, k)).max().item()
                for part, *parts in zip(*(tensor.split(8) for tensor in (y, *signals))))
    assert worst <= ERROR_LIMIT, f"gives a wrong answer: worst row {worst:.2e}"
    return worst


@pytest.mark.parametrize("bench", ALL, ids=lambda bench: bench.name)
def test_speed(benchmark, bench, device, repeats, method, eager, flush):
    if bench.device != device.type:
        pytest.skip(f"for {bench.device}")
    solve = solver(method, bench.path)
    streams, gates, kernel, scale = cases.VISIBLE[0]
    channels = CHANNELS[device.type]
    case = cases.Case(bench.batch, streams, channels // streams, bench.length, gates, kernel, scale, seed=bench.length)
    error = check(solve, case, device)
    calls = iter(range(1, sys.maxsize))

    def fresh():
        return cases.make_inputs(case, next(calls), device)

    variants = {"eager": eager, "method": solve}
    for variant in variants.values():
        variant(*fresh())
    on_gpu = device.type == "cuda"
    if on_gpu:
        times = timing.time_cuda(variants, repeats, device, fresh=fresh)
        spread = times["method"].spread
    else:
        rounds = [timing.time_cpu(variants, 1, fresh) for _ in range(repeats)]
        times = {name: min((each[name] for each in rounds), key=lambda timed: timed.call) for name in variants}
        middle = statistics.median(each["method"].call for each in rounds)
        spread = middle / times["method"].call - 1
    kinds = ("gpu", "call") if on_gpu else ("call",)
    benchmark.extra_info.update(
        name=bench.name, error=error, spread=spread,
        speedup={kind: getattr(times["eager"], kind) / getattr(times["method"], kind) for kind in kinds},
        ms={kind: getattr(times["method"], kind) for kind in kinds})
    describe = getattr(method, "describe", None)
    if bench.path == "auto" and describe:
        benchmark.extra_info["path"] = describe(*fresh()).path

    def synchronize():
        if on_gpu:
            torch.cuda.synchronize(device)

    def prepare():
        inputs = fresh()
        flush()
        synchronize()
        return inputs, {}

    def call(*inputs):
        y = solve(*inputs)
        synchronize()
        return y

    benchmark.pedantic(call, setup=prepare, rounds=max(5, repeats // 2), warmup_rounds=1)
