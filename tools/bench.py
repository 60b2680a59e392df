"""python -m tools bench: the benchmark suite, saved, and held to the stored baseline of the same device model.

The suite is tests/bench, run by pytest-benchmark in a process of its own. What is compared is the speed-up over eager,
both measured in the same run: absolute times drift between machines.
"""
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from typer import Option

from .judge import ROOT, Unusable, environment, find_device, find_method
from .report import console, write_json

BASELINES = ROOT / "baselines"
SAVED = ROOT / "out" / "bench"
TOLERANCE = 0.05    # of a speed-up: a case that lost more has become slower
AGAIN = 2           # times that such a case is measured again, for what else the machine does slows one run down

Data = dict[str, Any]


def device_model(device: str) -> str:
    """What kind of device this is, for people and for the name of its baseline."""
    import torch

    if device != "cpu":
        return torch.cuda.get_device_name(torch.device(device))
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return f"CPU {found[1].strip()}, {torch.get_num_threads()} threads"
    return f"CPU {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def versions(device: str) -> Data:
    """What a figure depends on besides the code."""
    import torch

    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = None
    found = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton_version}
    if device != "cpu":
        from .doctor import driver_version

        found |= {"cuda": torch.version.cuda, "driver": driver_version()}
    return found


def file_name(model: str) -> str:
    """The name of a device model's baseline."""
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-") + ".json"


def measure(method: Path, device: str, names: list[str] | None, repeats: int, time_limit: float) -> Data:
    """Runs the suite, or the named cases of it: {case: figures}. Raises Unusable where it does not end well."""
    with tempfile.TemporaryDirectory(prefix="glconv-bench-") as scratch:
        result = Path(scratch) / "result.json"
        arguments = ["-q", "-rN", "-p", "no:cacheprovider", f"--bench-method={method}", f"--bench-device={device}",
                     f"--bench-repeats={repeats}", f"--benchmark-json={result}", f"--timeout={time_limit:g}"]
        nodes = [f"tests/bench/test_bench.py::test_speed[{name}]" for name in names or ()] or ["tests/bench"]
        run = subprocess.Popen([sys.executable, "-m", "pytest", *arguments, *nodes], cwd=ROOT, env=environment(None),
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, text=True)
        try:
            said, _ = run.communicate(timeout=time_limit)
        except subprocess.TimeoutExpired:
            raise Unusable(f"the suite ran past the time limit of {time_limit:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
        if run.returncode or not result.exists():
            raise Unusable(f"the suite failed with exit status {run.returncode}:\n{said[-4000:]}")
        content = json.loads(result.read_text())
    return {bench["extra_info"]["name"]: figures(bench) for bench in content["benchmarks"]}


def figures(bench: Data) -> Data:
    """What is kept of one benchmark, to four digits: a baseline is a file that people read."""
    info = bench["extra_info"]

    def short(value: float) -> float:
        return float(f"{value:.4g}")

    return {"speedup": {kind: short(value) for kind, value in info["speedup"].items()},
            "ms": {kind: short(value) for kind, value in info["ms"].items()},
            "wall_ms": short(bench["stats"]["median"] * 1e3), "spread": short(info["spread"]),
            "error": short(info["error"])} | ({"path": info["path"]} if "path" in info else {})


def changes(before: Mapping[str, Data], after: Mapping[str, Data]) -> dict[str, dict[str, float]]:
    """{case: {kind of speed-up: change, -0.06 for 6 % less}} of the cases that both have."""
    return {name: {kind: now["speedup"][kind] / then - 1 for kind, then in before[name]["speedup"].items()}
            for name, now in after.items() if name in before}


def slower(before: Mapping[str, Data], after: Mapping[str, Data]) -> list[str]:
    """The cases that lost more than the tolerance."""
    return [name for name, change in changes(before, after).items() if min(change.values()) < -TOLERANCE]


def better_of(first: Mapping[str, Data], second: Mapping[str, Data]) -> Data:
    """Each case with the larger of its two speed-ups, kind by kind: what slowed one run down is not in the other."""
    merged = {}
    for name, figure in first.items():
        again = second.get(name)
        merged[name] = figure if again is None else figure | {
            "speedup": {kind: max(value, again["speedup"][kind]) for kind, value in figure["speedup"].items()},
            "ms": {kind: min(value, again["ms"][kind]) for kind, value in figure["ms"].items()}}
    return merged


def show(run: Data) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", title=run["device"], title_justify="left")
    kinds = list(next(iter(run["cases"].values()))["speedup"]) if run["cases"] else []
    for heading in ("case", "path", *(f"{kind} ms" for kind in kinds), *(f"{kind} speed-up" for kind in kinds),
                    "spread", "worst row"):
        table.add_column(heading, justify="left" if heading in ("case", "path") else "right")
    for name, figure in run["cases"].items():
        table.add_row(name, figure.get("path", "-"), *(f"{figure['ms'][kind]:.4f}" for kind in kinds),
                      *(f"{figure['speedup'][kind]:.2f}" for kind in kinds), f"{figure['spread']:.0%}",
                      f"{figure['error']:.1e}")
    console().print(table)


def show_changes(baseline: Data, run: Data) -> list[str]:
    """Prints what moved and returns the cases that became slower."""
    before, after = baseline["cases"], run["cases"]
    losers, moved = slower(before, after), changes(before, after)
    table = Table(box=None, pad_edge=False, header_style="bold",
                  title=f"against the baseline of {baseline['date'][:10]}", title_justify="left")
    for heading in ("case", "speed-up", "was", "is", "change", ""):
        table.add_column(heading, justify="left" if heading in ("case", "speed-up", "") else "right")
    for name, change in moved.items():
        for kind, relative in change.items():
            lost = relative < -TOLERANCE
            verdict = "SLOWER" if lost else "faster" if relative > TOLERANCE else ""
            table.add_row(name, kind, f"{before[name]['speedup'][kind]:.2f}", f"{after[name]['speedup'][kind]:.2f}",
                          f"{relative:+.1%}", verdict, style="bold red" if lost else None)
    out = console()
    out.print(table)
    for name in after:
        if name not in before:
            out.print(f"{name}: not in the baseline", highlight=False)
    for what, now in run["versions"].items():
        then = baseline["versions"].get(what)
        if then != now:
            out.print(f"{what}: {then} in the baseline, {now} here", highlight=False)
    return losers


def command(
    compare: Annotated[bool, Option("--compare", help="Hold the result to this device model's baseline.")] = False,
    store: Annotated[bool, Option("--store", help="Store the result as the baseline of this device model.")] = False,
    method: Annotated[str, Option(help="Folder that holds solver.py, or the name of one under methods/.")] = "main",
    device: Annotated[str, Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    cases: Annotated[str, Option(help="Names of cases, comma separated; all by default.")] = "",
    repeats: Annotated[int, Option(min=0, help="Timed calls a case; 0: 20 on a GPU, 60 on a CPU.")] = 0,
    time_limit: Annotated[float, Option(min=1, metavar="SECONDS", help="For the whole suite.")] = 600,
    baselines: Annotated[Path, Option(metavar="FOLDER", help="Where baselines are stored.")] = BASELINES,
    json_file: Annotated[Path | None, Option("--json", metavar="FILE", help="Write the result here too.")] = None,
    earlier: Annotated[Path | None, Option("--from", metavar="FILE", exists=True, dir_okay=False,
                                           help="Take this result of an earlier run instead of running.")] = None,
) -> None:
    """Runs the benchmark suite against eager; saves the result in out/bench/.

    With --compare a case whose speed-up over eager fell by more than 5 % against the stored baseline is measured again,
    twice at most, and fails where it stays so; on a CPU that wants a machine with nothing else to do.

    Exit status: 0 well, 1 slower or wrong, 2 nothing was measured or there is no baseline.
    """
    try:
        if earlier:
            run = json.loads(earlier.read_text())
        else:
            folder, device = find_method(method), find_device(device)
            wanted = [name.strip() for name in cases.split(",") if name.strip()] or None
            run = {"format": 1, "device": device_model(device), "versions": versions(device),
                   "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                   "cases": measure(folder, device, wanted, repeats, time_limit)}
        stored = baselines / file_name(run["device"])
        baseline = json.loads(stored.read_text()) if stored.exists() else None
        for _ in range(AGAIN if compare and not earlier else 0):
            if baseline and (suspects := slower(baseline["cases"], run["cases"])):
                run["cases"] = better_of(run["cases"], measure(folder, device, suspects, repeats, time_limit))
    except Unusable as error:
        console().print(Text(str(error), style="bold red"), soft_wrap=True)
        raise typer.Exit(1 if "suite failed" in str(error) else 2) from None
    show(run)
    saved = None if earlier else SAVED / file_name(run["device"])
    for path in filter(None, (saved, json_file, stored if store else None)):
        write_json(run, path)
        console().print(f"saved: {path}", highlight=False, soft_wrap=True)
    if not compare:
        return
    if baseline is None:
        console().print(Text(f"no baseline for {run['device']} in {baselines}; `make bench-store` stores this device's",
                             style="bold yellow"), soft_wrap=True)
        raise typer.Exit(2)
    losers = show_changes(baseline, run)
    if losers:
        console().print(Text(f"slower by more than {TOLERANCE:.0%} of the speed-up over eager: {', '.join(losers)}",
                             style="bold red"), soft_wrap=True)
        raise typer.Exit(1)
    console().print(Text("no case became slower", style="bold green"))
