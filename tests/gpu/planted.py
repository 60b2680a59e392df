"""Faults planted in the kernels, each with the check that must find it; then the same checks without the fault.

    python3 tests/gpu/planted.py [--limit 60] [--json out/planted.json]

A barrier before a product taken out: results differ from call to call or from float64, or racecheck reports a hazard.
A plan too large for the card: an error that says so. A solver 8 per cent slower: bench --compare fails. Each fault
lives in a process of its own. Exit status 1 when a kind of fault is not found, or a check fails without one.
"""
import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "tests" / "gpu"
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(GPU), str(ROOT / "methods" / "main")]

SHAPE = (16, 1, 768, 2048)
REPEATS = 12
SLOWER = 8.0        # per cent; the tolerance is 5
CASES = "auto-b64-l2048,auto-b16-l2048"


def check(kernel: str) -> str:
    """What a user's calls show: "right", or what is wrong with them."""
    import fuzzing
    import glconv

    problem = fuzzing.Draw(*SHAPE, "normal", "sigmoid", "uniform", "decaying", 1.0, 1.0, seed=1)
    tensors = fuzzing.inputs(problem, "cuda")
    try:
        results = [glconv.gated_causal_conv(*tensors, glconv.SolverConfig(kernel=kernel)) for _ in range(REPEATS)]
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finding = fuzzing.examine(results[0], tensors, fuzzing.fused(problem.length))
    differing = sum(not torch.equal(y, results[0]) for y in results)
    if finding.right and not differing:
        return "right"
    return f"{'right' if finding.right else f'wrong, {finding}'}; {differing} of {REPEATS} calls differ from the first"


def barriers(kernel: str) -> list[int]:
    """The barriers to take out of the kernel of SHAPE, compiled for this GPU: those that guard its products."""
    import glconv
    import plant
    from glconv.fused import launch

    config = glconv.SolverConfig(kernel=kernel)
    batch, streams, heads, length = SHAPE
    problem = glconv.Problem(batch, streams, heads, length, torch.device("cuda", 0))
    from triton.backends.nvidia.compiler import CUDABackend
    assemble, guards = CUDABackend.make_cubin, []

    def make_cubin(self, src, *arguments):
        if any(f".entry {name}" in src for name in plant.KERNELS):
            guards[:] = plant.guards_of_products(src)
        return assemble(self, src, *arguments)

    CUDABackend.make_cubin = make_cubin
    launch.launcher(problem, launch.plan_for(problem, config.kernel))
    return guards


def child(*arguments: str, limit: float) -> str:
    """The last line that this file prints in a process of its own."""
    run = functools.partial(subprocess.run, [sys.executable, __file__, "--child", *arguments], capture_output=True,
                            text=True, timeout=limit, cwd=ROOT)
    try:
        with tempfile.TemporaryDirectory(prefix="glconv-planted-") as cache:
            done = run(env=os.environ | {"TRITON_CACHE_DIR": cache})
    except subprocess.TimeoutExpired:
        return f"hangs: no end in {limit:g} s"
    lines = done.stdout.strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"


def racecheck(kernel: str, fault: str, limit: float) -> str:
    if not shutil.which("compute-sanitizer"):
        return "not here"
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run([sys.executable, str(GPU / "sanitize.py"), "--tool", "racecheck", "--kernels", kernel, "--plant",
                        fault, "--limit", str(limit), "--json", file.name], capture_output=True, cwd=ROOT,
                       timeout=limit + 30)
        text = Path(file.name).read_text()
    run = json.loads(text)["runs"][0] if text else {"clean": False, "reports": None}
    return "clean" if run["clean"] else f"{run['reports']} hazards"


SLOW_METHOD = """
import sys
sys.path[:0] = [{gpu!r}, {package!r}]
import plant
from glconv import describe, gated_causal_conv
solve = plant.slowed(gated_causal_conv, {per_cent})
"""


def slowdown(limit: float) -> dict[str, str]:
    """The shipped solver stored as a baseline, itself against it, and a slower one against it."""
    with tempfile.TemporaryDirectory(prefix="glconv-planted-") as scratch:
        method = Path(scratch) / "slow"
        method.mkdir()
        (method / "solver.py").write_text(SLOW_METHOD.format(gpu=str(GPU), package=str(ROOT / "methods" / "main"),
                                                             per_cent=SLOWER))

        def bench(*arguments: str) -> tuple[int, str]:
            done = subprocess.run([sys.executable, "-m", "tools", "bench", "--cases", CASES, "--baselines", scratch,
                                   *arguments], capture_output=True, text=True, timeout=limit, cwd=ROOT)
            return done.returncode, (done.stdout.strip().splitlines() or ["nothing said"])[-1]

        stored = bench("--store")
        return {"stored": f"{stored[0]}: {stored[1]}", "same": "{}: {}".format(*bench("--compare")),
                "slower": "{}: {}".format(*bench("--compare", "--method", str(method)))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=60, help="seconds for a process")
    parser.add_argument("--skip-slowdown", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("KERNEL", "FAULT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here")
        return 2
    if options.child:
        kernel, fault = options.child
        if fault == "guards":
            print(json.dumps(barriers(kernel)))
            return 0
        if fault != "none":
            import plant

            plant.install(fault)
        print(check(kernel))
        return 0

    kernels = ("portable", "hopper") if torch.cuda.get_device_capability()[0] == 9 else ("portable",)
    found: dict[str, dict[str, str]] = {}
    limit = options.limit
    with ThreadPoolExecutor(12) as pool:
        guards = dict(zip(kernels, pool.map(lambda kernel: child(kernel, "guards", limit=limit), kernels)))
        jobs = [*((kernel, "none") for kernel in kernels), ("portable", "shared")]
        for kernel in kernels:
            jobs += [(kernel, f"barrier:{number}") for number in json.loads(guards[kernel])]
        checks = pool.map(lambda job: child(*job, limit=limit), jobs)
        watched = [(kernel, fault) for kernel, fault in jobs if fault.startswith("barrier")]
        races = pool.map(lambda job: racecheck(*job, limit), watched)
        for (kernel, fault), said in zip(jobs, checks):
            found[f"{kernel} {fault}"] = {"calls": said}
        for (kernel, fault), said in zip(watched, races):
            found[f"{kernel} {fault}"]["racecheck"] = said

    verdicts = {}
    for kernel in kernels:
        verdicts[f"{kernel} without a fault is right"] = found[f"{kernel} none"]["calls"] == "right"
        removed = [result for name, result in found.items() if name.startswith(f"{kernel} barrier")]
        verdicts[f"{kernel} without a barrier is found"] = any(
            result["calls"] != "right" or "hazards" in result.get("racecheck", "") for result in removed)
    verdicts["a plan too large is found"] = "shared memory" in found["portable shared"]["calls"]
    if not options.skip_slowdown:
        found["slowdown"] = slowdown(2 * limit)
        verdicts["the same solver is not slower"] = found["slowdown"]["same"].startswith("0")
        verdicts[f"{SLOWER:g} per cent slower is found"] = found["slowdown"]["slower"].startswith("1: slower by more")
    for name, result in found.items():
        print(name, "; ".join(f"{check}: {said}" for check, said in result.items()), sep=": ")
    for name, verdict in verdicts.items():
        print(f"{'yes' if verdict else 'NO '}  {name}")
    if options.json:
        from tools.report import write_json

        write_json({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "barriers": guards,
                    "found": found, "verdicts": verdicts}, options.json)
    return int(not all(verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
