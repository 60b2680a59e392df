"""python -m tools ladder: every published step, run beside eager, against its published figure.

One process a version. Several prepare (import, compile, check against float64) at a time; each is then timed with the
device to itself, interleaved with the eager baseline on inputs drawn afresh for every call. The results file is written
after every version, and a run that finds one of its own kind goes on where that stopped.
"""
import concurrent.futures
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from typer import Option

from . import cases as families
from .cases import Case
from .judge import ROOT, Unusable, environment, find_device
from .report import console, geometric_mean, progress, write_json

LADDER = ROOT / "configs" / "ladder"
# Rows beside the versions, in this order: the last is what everything is measured against.
SHIPPED = {"spectral": "the shipped spectral path: v40 with rows and k scaled against overflow",
           "fused": "the fused path: one launch"}
BIG_STEPS = ("v02", "v03", "v05", "v15", "v39")
DESCRIBERS = 3      # processes that also measure the machine: one would do if it were sure not to fail
LATE = [f"v{number:02}" for number in range(31, 54)]

Row = dict[str, Any]


def select(names: Sequence[str], wanted: str) -> list[str]:
    """The names that a list such as "v15,v39-v41,fused" means, in their own order. Raises ValueError for one unknown.
    """
    chosen: set[str] = set()
    for part in filter(None, (text.strip() for text in wanted.split(","))):
        span = re.fullmatch(r"(v\d+)-(v\d+)", part)
        found = [name for name in names
                 if (span[1] <= name <= span[2] if span and name not in SHIPPED else name == part)]
        if not found:
            raise ValueError(f"no version is called {part!r}; known: {', '.join(names)}")
        chosen |= set(found)
    return [name for name in names if name in chosen]


def make_cases(batches: Iterable[int], length: int, channels: int) -> list[Case]:
    """One case a batch size: uniform gates and a decaying kernel of norm 1, as the first visible family has them."""
    streams, gates, kernel, scale = families.VISIBLE[0]
    return [Case(batch, streams, channels // streams, length, gates, kernel, scale, seed=batch) for batch in batches]


def fingerprint(name: str) -> str:
    """Changes when a version's file, or code it runs, does: a kept result must be of what is there now."""
    library = "methods/main/glconv"
    sources = [*ROOT.glob(f"{library}/*.py"), *ROOT.glob(f"{library}/spectral/*.py")]
    sources += ROOT.glob(f"{library}/fused/*.py") if name in SHIPPED else [file_of(name), *ROOT.glob("graphs/*.py")]
    digest = hashlib.sha256()
    for source in sorted(sources):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def file_of(name: str) -> Path:
    return LADDER / f"{name}.yaml"


class Pool:
    """Starts one process a version, a few at a time, and ends them all when it is left early."""

    def __init__(self, jobs: int, threads: int, time_limit: float) -> None:
        self.executor = concurrent.futures.ThreadPoolExecutor(jobs)
        self.variables = environment(None) | {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
        self.time_limit = time_limit
        self.running: set[subprocess.Popen[str]] = set()
        self.guard = threading.Lock()
        self.closed = False

    def submit(self, job: Mapping[str, Any]) -> "concurrent.futures.Future[Row]":
        return self.executor.submit(self._run, job)

    def _run(self, job: Mapping[str, Any]) -> Row:
        with tempfile.TemporaryFile("w+") as errors:
            with self.guard:
                if self.closed:
                    return {"status": "not run", "reason": "interrupted"}
                process = subprocess.Popen([sys.executable, "-m", "tools.ladder_worker"], cwd=ROOT, env=self.variables,
                                           stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                                           start_new_session=True, text=True)
                self.running.add(process)
            try:
                output, _ = process.communicate(json.dumps(job), timeout=self.time_limit)
            except subprocess.TimeoutExpired:
                return {"status": "failed", "reason": f"ran past the time limit of {self.time_limit:g} s"}
            finally:
                end(process)
                with self.guard:
                    self.running.discard(process)
            if output.strip():
                return json.loads(output)
            errors.seek(0)
            said = [line.strip() for line in errors.read().splitlines() if line.strip()]
            return {"status": "failed", "reason": f"its process ended with status {process.returncode}: "
                                                  f"{said[-1][:200] if said else 'nothing said'}"}

    def close(self) -> None:
        with self.guard:
            self.closed = True
            for process in self.running:
                end(process)
        self.executor.shutdown(cancel_futures=True)


def end(process: "subprocess.Popen[str]") -> None:
    """Ends a process and all it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run(names: Sequence[str], cases: Sequence[Case], device: str, repeats: int, *, jobs: int, time_limit: float,
        done: Mapping[str, Row], save: Callable[[str, Row, dict[str, Any] | None], None],
        told: Callable[[int, str], None]) -> None:
    """Runs every name that is not in `done`; `save` gets each row as it comes, and the machine's description once."""
    waiting = [name for name in names if name not in done]
    pool = Pool(jobs, max(1, (os.cpu_count() or 1) // jobs), time_limit)
    described = False
    with tempfile.NamedTemporaryFile() as lock:
        try:
            futures = {pool.submit({
                "name": name, "path": None if name in SHIPPED else str(file_of(name)), "device": device,
                "cases": [asdict(case) for case in cases], "repeats": repeats, "lock": lock.name,
                "describe_machine": position < DESCRIBERS}): name for position, name in enumerate(waiting)}
            for count, future in enumerate(concurrent.futures.as_completed(futures)):
                name, row = futures[future], future.result()
                machine = row.pop("machine", None)
                save(name, row, None if described else machine)
                described = described or machine is not None
                told(len(names) - len(waiting) + count + 1, name)
        finally:
            pool.close()


def speedups(row: Row, kind: str) -> dict[str, float]:
    """Eager's time over the version's, by batch; `kind` is call or gpu."""
    return {batch: timed["eager"][f"{kind}_ms"] / timed["method"][f"{kind}_ms"]
            for batch, timed in row.get("batches", {}).items() if "method" in timed}


def speedup(row: Row, kind: str = "call") -> float:
    """The geometric mean over batches; 0 where nothing was measured."""
    return geometric_mean(list(speedups(row, kind).values()))


def summarise(rows: Mapping[str, Row]) -> list[str]:
    """The order of the big steps, published beside measured, and how far v40 is from the best late version."""
    lines = []
    right = {name: row for name, row in rows.items() if row["status"] == "right"}
    if all(step in right for step in BIG_STEPS):
        published = sorted(BIG_STEPS, key=lambda step: float(rows[step]["published"]))
        measured = sorted(BIG_STEPS, key=lambda step: speedup(rows[step], "gpu"))
        lines.append(f"big steps from slow to fast, published: {' < '.join(published)}; measured on this device: "
                     f"{' < '.join(measured)}")
    late = {name: speedup(right[name], "gpu") for name in LATE if name in right}
    if "v40" in late and len(late) > 1:
        best = max(late, key=lambda name: late[name])
        lines.append(f"v40 reaches {late['v40'] / late[best]:.0%} of {best}, the best of v31 to v53 measured here")
    return lines


def print_table(state: Mapping[str, Any], names: Sequence[str]) -> None:
    """The table of versions, a line for each that is not right, and what there is to say of the order."""
    out = console()
    rows: dict[str, Row] = {name: state["rows"][name] for name in names if name in state["rows"]}
    batches = [str(batch) for batch in state["settings"]["batches"]]
    on_gpu = state["settings"]["device"].startswith("cuda")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("version", no_wrap=True)
    table.add_column("change", max_width=70)
    headings = ["published\nspeed-up", *(f"B={batch}" for batch in batches), *(["mean"] if len(batches) > 1 else []),
                *(["GPU\nspeed-up", "GPU\nms"] if on_gpu else []), "rel. L2", "worst\nrow", "compile\ns", "kernels",
                "graph\nbreaks"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in rows.items():
        if row["status"] != "right":
            table.add_row(name, row["change"], row["published"] or "-", Text(row["status"], style="bold red"))
            continue
        timed, called, last = row["batches"], speedups(row, "call"), row["batches"][batches[-1]]
        table.add_row(
            name, row["change"], row["published"] or "-", *(f"{called[batch]:.2f}" for batch in batches),
            *([f"{speedup(row):.2f}"] if len(batches) > 1 else []),
            *([f"{speedup(row, 'gpu'):.2f}", f"{last['method']['gpu_ms']:.3f}"] if on_gpu else []),
            f"{max(batch['l2'] for batch in timed.values()):.1e}",
            f"{max(batch['worst_row'] for batch in timed.values()):.1e}",
            f"{sum(batch['first_call_s'] for batch in timed.values()):.1f}",
            str(max(batch["kernels"] for batch in timed.values())),
            str(row["graph_breaks"]))
    out.print(table)
    for name, row in rows.items():
        if row["status"] != "right":
            out.print(Text.assemble((f"{row['status'].upper()} ", "bold red"), f"{name}: {row['reason']}"),
                      soft_wrap=True)
    out.print("\nspeed-ups are eager's median over the version's, whole calls, in one interleaved run; GPU ms is of "
              f"B={batches[-1]}; compile s is the first calls, while other versions compile beside; kernels are those "
              "that Inductor generated for one batch size, without library and Triton operators",
              soft_wrap=True, highlight=False)
    for line in summarise(rows):
        out.print(line, soft_wrap=True, highlight=False)


def plot(state: Mapping[str, Any], names: Sequence[str], path: Path) -> None:
    """Published and measured speed-ups over the versions, in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {name: state["rows"][name] for name in names if name in state["rows"]}
    versions = [name for name in rows if name not in SHIPPED]
    figure, axes = pyplot.subplots(figsize=(14, 6), layout="constrained")
    kinds = {"call": "measured, whole call", "gpu": "measured, GPU time alone"}
    if not state["settings"]["device"].startswith("cuda"):
        del kinds["gpu"]
    known = [name for name in versions if rows[name]["published"]]
    axes.plot([versions.index(name) for name in known], [float(rows[name]["published"]) for name in known], "o-",
              color="grey", label="published, one RTX A6000")
    right = [name for name in versions if rows[name]["status"] == "right"]
    for kind, label in kinds.items():
        axes.plot([versions.index(name) for name in right], [speedup(rows[name], kind) for name in right], "s-",
                  markersize=4, label=label)
    for name, style in zip(SHIPPED, (":", "--")):
        if rows.get(name, {}).get("status") == "right":
            value = speedup(rows[name], list(kinds)[-1])
            axes.axhline(value, linestyle=style, color="black",
                         label=f"{name} path, {kinds[list(kinds)[-1]]}: {value:.1f}")
    axes.set_xticks(range(len(versions)), versions, rotation=90)
    axes.set_ylabel("times faster than the eager baseline")
    batches = ", ".join(str(batch) for batch in state["settings"]["batches"])
    axes.set_title(f"The ladder on {state['machine'].get('device', 'this machine')}, batches {batches}")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def open_state(path: Path, settings: Mapping[str, Any], fresh: bool) -> dict[str, Any]:
    """The results file to go on with, or an empty one. Raises ValueError where the file is of a run with other
    settings."""
    if fresh or not path.exists():
        return {"settings": dict(settings), "machine": {}, "rows": {}}
    state = json.loads(path.read_text())
    if state.get("settings") != settings:
        raise ValueError(f"{path} holds a run with other settings, {state.get('settings')}; want --fresh, or another "
                         "--json")
    return state


def command(
    only: Annotated[str, Option(help="Versions to run, such as v15,v39-v41,fused. All by default.")] = "",
    batches: Annotated[str, Option(help="Batch sizes, comma-separated; 64 by default, 4 on a CPU.")] = "",
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    length: Annotated[int, Option(min=1, help="Sequence length.")] = families.LENGTH,
    channels: Annotated[int, Option(min=0, help="Channels; 768 by default, 96 on a CPU.")] = 0,
    repeats: Annotated[int, Option(min=0, help="Timed calls of each, eager and version; 20, or 5 on a CPU.")] = 0,
    jobs: Annotated[int, Option(min=0, help="Versions prepared at a time; timing is always one at a time.")] = 0,
    time_limit: Annotated[float, Option(help="Seconds for one version, waiting for its turn included.")] = 400.0,
    json_file: Annotated[Path, Option("--json", help="Results; also where an interrupted run goes on.")] =
        Path("out/ladder.json"),
    plot_file: Annotated[Path | None, Option("--plot", help="Published and measured speed-ups as a picture.")] = None,
    fresh: Annotated[bool, Option(help="Start over, whatever the results file holds.")] = False,
    listing: Annotated[bool, Option("--list", help="List the versions and stop.")] = False,
) -> None:
    """Run the published ladder, v01 to v53, and the shipped paths, each beside eager.

    A row that fails or is wrong is reported and the others go on. Results are kept after every version: the same
    command again goes on where an interrupted one stopped, and runs again what failed or whose code changed.
    """
    import graphs

    figures = graphs.published()
    names = [path.stem for path in sorted(LADDER.glob("*.yaml"))] + list(SHIPPED)
    changes = {name: SHIPPED.get(name) or figures.get(name, {}).get("change") or first_line(name) for name in names}
    if listing:
        for name in names:
            typer.echo(f"{name:8} {figures.get(name, {}).get('published_speedup') or '-':>7}  {changes[name]}")
        return
    try:
        chosen = select(names, only) if only else names
        device = find_device(device)
        on_gpu = device.startswith("cuda")
        sizes = [int(text) for text in (batches or ("64" if on_gpu else "4")).split(",")]
        if min(sizes) < 1:
            raise ValueError(f"batch sizes are {sizes}; want at least 1 each")
        channels = channels or (families.CHANNELS if on_gpu else families.SMALL_CHANNELS)
        settings: dict[str, Any] = {
            "device": device, "batches": sizes, "length": length, "channels": channels,
            "repeats": repeats or (20 if on_gpu else 5)}
        state = open_state(json_file, settings, fresh)
    except (ValueError, Unusable) as error:
        typer.echo(f"ladder: {error}", err=True)
        raise typer.Exit(2) from None

    marks = {name: fingerprint(name) for name in chosen}
    done = {name: row for name, row in state["rows"].items()
            if name in chosen and row["status"] == "right" and row["fingerprint"] == marks[name]}

    def save(name: str, row: Row, machine: dict[str, Any] | None) -> None:
        state["rows"][name] = {"change": changes[name], "published": figures.get(name, {}).get("published_speedup", ""),
                               "fingerprint": marks[name], **row}
        state["machine"] = machine or state["machine"]
        write_json(state, json_file)

    jobs = jobs or (min(8, max(1, (os.cpu_count() or 1) // 2)) if on_gpu else 1)
    with progress(len(chosen)) as told:
        run(chosen, make_cases(sizes, length, channels), device, settings["repeats"], jobs=jobs, time_limit=time_limit,
            done=done, save=save, told=told)
    print_table(state, chosen)
    if plot_file:
        plot(state, chosen, plot_file)
    if any(state["rows"].get(name, {}).get("status") != "right" for name in chosen):
        raise typer.Exit(1)


def first_line(name: str) -> str:
    """A version's idea: the comment that its file opens with."""
    return file_of(name).read_text().splitlines()[0].lstrip("# ")
