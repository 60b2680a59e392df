"""The fused kernels, and now and then the spectral path, on problems nobody thought of, for as long as you like.

    python3 tests/gpu/fuzz.py --minutes 10 --seed 1 [--json out/fuzz.json]
    python3 tests/gpu/fuzz.py --draw 'batch=3,streams=...' --path hopper    # one problem again, as a failure prints it

Problem i of a seed is the same in every run, whatever the number of processes. Each is solved twice (the results must
agree to the bit) with outputs poisoned, and held to the limits of tests/fuzzing.py. Exit status 1 when any is wrong.
"""
import argparse
import collections
import dataclasses
import math
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "methods" / "main")]

import fuzzing  # noqa: E402

PATHS = ("auto", "portable", "spectral")    # auto: what a user gets
ARITHMETIC = {"portable": fuzzing.fused, "hopper": fuzzing.fused, "right-angle": fuzzing.single}
ELEMENTS = 1 << 22      # of a problem, at most: float64 takes eight times the memory of the inputs


def problem(seed: int, number: int, elements: int) -> tuple[fuzzing.Draw, str]:
    """Problem `number` of a seed, and the path it is for."""
    rng = random.Random(f"{seed}:{number}")
    return fuzzing.draw(rng, elements), rng.choices(PATHS, (6, 3, 1))[0]


def solve(draw: fuzzing.Draw, path: str, device: str) -> tuple[str, fuzzing.Finding]:
    """The path that was taken, and how its result stands to the limits."""
    import glconv
    from glconv.spectral.graph import transform_dtype

    # Uncompiled: Inductor takes seconds a shape, and compiles the same graph.
    config = glconv.SolverConfig(compile=False, **{"graph": path} if path == "spectral" else {"kernel": path})
    tensors = fuzzing.inputs(draw, device)
    before = [tensor.clone() for tensor in tensors]
    taken = glconv.describe(*tensors, config).path
    if taken == "spectral":
        half = transform_dtype(draw.length, tensors[0].device, config) == torch.float16
        arithmetic = fuzzing.half(draw.length) if half else fuzzing.single(draw.length)
    else:
        arithmetic = ARITHMETIC[taken](draw.length)
    for _ in range(2):      # what the call's own allocation finds
        torch.full_like(tensors[0], math.nan)
    y = glconv.gated_causal_conv(*tensors, config)
    finding = fuzzing.examine(y, tensors, arithmetic)
    torch.full_like(y, math.nan)
    again = glconv.gated_causal_conv(*tensors, config)
    if finding.right and not torch.equal(y, again):
        finding = dataclasses.replace(finding, text=f"{int((y != again).sum())} elements differ between two calls")
    if not all(torch.equal(tensor, kept) for tensor, kept in zip(tensors, before)):
        finding = dataclasses.replace(finding, text="an input was changed")
    return taken, finding


def work(worker: int, jobs: int, seed: int, minutes: float, elements: int, device: str,
         results: "multiprocessing.Queue") -> None:
    """Problems worker, worker + jobs, ... of the seed until the time is up; each result is put into the queue."""
    torch.set_num_threads(1)
    torch.zeros(1, device=device)
    number, until = worker, time.time() + 60 * minutes
    while time.time() < until:
        draw, path = problem(seed, number, elements)
        try:
            taken, finding = solve(draw, path, device)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            results.put((number, path, "none", str(draw), False, math.inf, math.inf, said))
            if isinstance(error, torch.AcceleratorError):
                break       # the device is lost to this process
        else:
            results.put((number, path, taken, str(draw), finding.right, finding.row, finding.element, str(finding)))
        number += jobs
    results.put(None)


def collect(results: "multiprocessing.Queue", workers: list[multiprocessing.Process], until: float) -> list[tuple]:
    """What the workers found, until they are done, or have died, or two minutes past their time."""
    found, running = [], len(workers)
    while running and time.time() < until + 120:
        try:
            one = results.get(timeout=1)
        except Exception:
            if not any(worker.is_alive() for worker in workers):
                break
            continue
        if one is None:
            running -= 1
            continue
        found.append(one)
        if not one[4]:
            print(f"FAILED {one[7]}\n  python3 tests/gpu/fuzz.py --path {one[1]} --draw '{one[3]}'", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 1) - 1)), help="processes")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="positions of a problem, at most")
    parser.add_argument("--draw", help="solve this problem alone")
    parser.add_argument("--path", choices=(*PATHS, "hopper"), default="auto", help="with --draw")
    parser.add_argument("--device", default="cuda", help="cpu: the paths that a CPU has")
    parser.add_argument("--json", type=Path, help="write what was found here")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        print("no CUDA device here")
        return 2
    if options.draw:
        taken, finding = solve(fuzzing.parse(options.draw), options.path, options.device)
        print(f"{'right' if finding.right else 'WRONG'} on path {taken}: {finding}")
        return int(not finding.right)

    start = time.time()
    until = start + 60 * options.minutes
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    common = options.jobs, options.seed, options.minutes, options.elements, options.device, results
    workers = [context.Process(target=work, daemon=True, args=(worker, *common)) for worker in range(options.jobs)]
    for worker in workers:
        worker.start()
    found = collect(results, workers, until)
    lost = sum(worker.exitcode not in (0, None) for worker in workers)
    for worker in workers:
        worker.kill()

    failed = [one for one in found if not one[4]]
    taken = collections.Counter(one[2] for one in found)
    worst = max((one for one in found if one[4]), key=lambda one: max(one[5], one[6]), default=None)
    print(f"seed {options.seed}: {len(found)} problems in {time.time() - start:.0f} s, {len(failed)} failed, "
          f"{lost} processes lost; paths {dict(taken)}")
    if worst:
        print(f"nearest to its limit: {worst[7]}, path {worst[2]}: {worst[3]}")
    if options.json:
        from tools.report import write_json

        device = options.device if options.device == "cpu" else torch.cuda.get_device_name()
        write_json({"device": device, "torch": torch.__version__, "seed": options.seed, "minutes": options.minutes,
                    "jobs": options.jobs, "problems": len(found),
                    "failed": [{"number": one[0], "path": one[1], "draw": one[3], "finding": one[7]} for one in failed],
                    "paths": dict(taken), "processes_lost": lost, "worst": worst and worst[7]}, options.json)
    return int(bool(failed or lost or not found))


if __name__ == "__main__":
    sys.exit(main())
