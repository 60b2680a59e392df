"""The kernels under compute-sanitizer: accesses out of bounds (memcheck), races in shared memory (racecheck), memory
read before it is written (initcheck).

    python3 tests/gpu/sanitize.py [--tool racecheck] [--limit 60] [--json out/sanitize.json]

The three tools run side by side, each in a process of its own over a small set of shapes; inputs and the float64
reference are made on the CPU, so the kernels are nearly all that is instrumented. Exit status 1 when a tool reports
anything, a result is wrong, or a run does not end in time; 2 where compute-sanitizer is not installed.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu"), str(ROOT / "methods" / "main")]

TOOLS = ("memcheck", "racecheck", "initcheck")
# Triton asks for the parameters of a function until there are none left; memcheck would report each last question.
OPTIONS = {"memcheck": ("--report-api-errors", "no")}
# initcheck does not see what bulk copies store: it takes every result of the Hopper kernel for never written.
UNSEEN = {"initcheck": "hopper"}
# kernel, batch, heads, length: whole tiles and masked ones, one and several, odd and even batches.
SHAPES = (("portable", 2, 2, 256), ("portable", 3, 1, 250), ("portable", 3, 2, 2048), ("portable", 2, 1, 3000),
          ("hopper", 3, 2, 2048), ("hopper", 1, 2, 2048), ("hopper", 2, 1, 4096))
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


def solve_all(kernels: str) -> int:
    """In the process that is watched: every shape of the named kernels, held to its limits. 1 when one is wrong."""
    import fuzzing
    import glconv
    from glconv.spectral.pairs import Packing, pair_spectra

    wrong = 0
    for kernel, batch, heads, length in SHAPES:
        if kernel not in kernels:
            continue
        problem = fuzzing.Draw(batch, 1, heads, length, "normal", "sigmoid", "uniform", "decaying", 1.0, 1.0, seed=1)
        tensors = fuzzing.inputs(problem)
        on_gpu = [tensor.cuda() for tensor in tensors]
        try:
            y = glconv.gated_causal_conv(*on_gpu, glconv.SolverConfig(kernel=kernel))
        except ValueError as error:
            print(f"{kernel} {batch} {heads} {length}: not here: {error}")
            continue
        finding = fuzzing.examine(y.cpu(), tensors, fuzzing.fused(length))
        wrong += not finding.right
        print(f"{kernel} {batch} {heads} {length}: {'right' if finding.right else 'WRONG'}: {finding}", flush=True)
    if "pairs" in kernels:
        from glconv.spectral.kernels import launch_pairs

        spectra, kernel = torch.randn(3, 2, 65, 2).half(), torch.randn(2, 65, 2).half()
        packed = launch_pairs(spectra.cuda(), kernel.cuda(), 0.25, Packing()).cpu()
        right = torch.allclose(packed.float(), pair_spectra(spectra, kernel, 0.25).float(), atol=1e-2, rtol=1e-2)
        wrong += not right
        print(f"pairs: {'right' if right else 'WRONG'}", flush=True)
    return int(wrong > 0)


class Run:
    """One tool over the shapes."""

    def __init__(self, tool: str, kernels: str, plant: str | None) -> None:
        self.tool, self.start = tool, time.time()
        kernels = ",".join(kernel for kernel in kernels.split(",") if kernel != UNSEEN.get(tool))
        child = [sys.executable, __file__, "--child", kernels, *(("--plant", plant) if plant else ())]
        self.process = subprocess.Popen(
            ["compute-sanitizer", "--tool", tool, *OPTIONS.get(tool, ()), "--error-exitcode", "86", "--print-limit",
             "5", *child],
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True)

    def finish(self, limit: float) -> dict[str, object]:
        """What it found: {tool, clean, reports, status, seconds, said}."""
        try:
            said, _ = self.process.communicate(timeout=max(1, limit - (time.time() - self.start)))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            said = (self.process.communicate()[0] or "") + f"\nran past the limit of {limit:g} s"
        counts = [int(errors or hazards) for errors, hazards in SUMMARY.findall(said)]
        clean = self.process.returncode == 0 and counts == [0] and "WRONG" not in said
        return {"tool": self.tool, "clean": clean, "reports": sum(counts) if counts else None,
                "status": self.process.returncode, "seconds": round(time.time() - self.start, 1),
                "said": "" if clean else said[-3000:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=(*TOOLS, "synccheck"), help="may be repeated; all three")
    parser.add_argument("--kernels", default="portable,hopper,pairs")
    parser.add_argument("--limit", type=float, default=60, help="seconds for a tool")
    parser.add_argument("--plant", help="a fault of tests/gpu/plant.py, to see it found")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        if options.plant:
            import plant

            plant.install(options.plant)
        return solve_all(options.child)
    if not shutil.which("compute-sanitizer") or not torch.cuda.is_available():
        print("needs compute-sanitizer (of the CUDA toolkit) and a CUDA device")
        return 2
    runs = [Run(tool, options.kernels, options.plant) for tool in options.tool or TOOLS]
    found = [run.finish(options.limit) for run in runs]
    for result in found:
        print(f"{result['tool']}: {'clean' if result['clean'] else 'NOT CLEAN'}, {result['reports']} reports, exit "
              f"status {result['status']}, {result['seconds']} s")
        if not result["clean"]:
            print(result["said"])
    if options.json:
        from tools.report import write_json

        write_json({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "plant": options.plant,
                    "kernels": options.kernels, "runs": found}, options.json)
    return int(not all(result["clean"] for result in found))


if __name__ == "__main__":
    sys.exit(main())
