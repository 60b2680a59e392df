"""What a verdict says: speed-ups, score and reward, as a table, a JSON file and a plot."""
import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .cases import Case, Data

# The published marks on their card, in multiples of eager: the expert and the upper bound. Per-case marks are not
# published, so these two stand for every case.
EXPERT = 8.08
UPPER_BOUND = 21.36
EXPERT_REWARD = 0.6


def console() -> Console:
    """Standard output, as wide as the table wants where it is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=200)


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[int, str], None]]:
    """A progress bar on standard error; what it yields is told how many cases are done and the name of the last one."""
    columns = (TextColumn("judging"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.fields[last]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("judging", total=total, last="")
        yield lambda done, last: bar.update(task, completed=done, last=f"[dim]{last}[/dim]")


def reward(speedup: float, expert: float = EXPERT, upper_bound: float = UPPER_BOUND) -> float:
    """0 up to eager's speed, 0.6 at the expert's, 1 from the upper bound on; straight lines between."""
    if speedup <= 1:
        return 0.0
    if speedup <= expert:
        return EXPERT_REWARD * (speedup - 1) / (expert - 1)
    return min(1.0, EXPERT_REWARD + (1 - EXPERT_REWARD) * (speedup - expert) / (upper_bound - expert))


def geometric_mean(values: Sequence[float]) -> float:
    """0 of no values."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 0.0


def make_report(method: str, config: str | None, family: str, machine: Data, cases: Sequence[Case],
                results: Sequence[Data]) -> Data:
    """Everything the run has to say, as plain data: what the table, the JSON file and the plot are made from.

    Speed-ups are ratios of medians in the same run: `call` of whole-call latencies, which is what is scored, `gpu` of
    device time alone. The score is the geometric mean of the first, and 0 when any case is not right.
    """
    rows = []
    for case, result in zip(cases, results):
        row = {"name": case.name, **asdict(case), "moved_bytes": case.moved_bytes, **result}
        if result["status"] == "right":
            eager, method_times = result["eager"], result["method"]
            row["speedup"] = {kind: eager[f"{kind}_ms"] / method_times[f"{kind}_ms"] for kind in ("call", "gpu")}
            floor_ms = case.moved_bytes / machine["copy_bytes_per_s"] * 1e3
            row["roofline_share"] = floor_ms / method_times["gpu_ms"]
            row["reward"] = reward(row["speedup"]["call"])
        rows.append(row)
    right = [row for row in rows if row["status"] == "right"]
    correct = len(right) == len(rows)
    means = {kind: geometric_mean([row["speedup"][kind] for row in right]) for kind in ("call", "gpu")}
    return {
        "format": 1, "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "method": method,
        "config": config, "family": family, "machine": machine, "correct": correct,
        "wrong": len(rows) - len(right), "geometric_mean": means, "score": means["call"] if correct else 0.0,
        "reward": sum(row["reward"] for row in right) / len(rows) if correct else 0.0, "cases": rows,
    }


def print_report(report: Data, console: Console) -> None:
    """The table of cases, a line for each that is not right, and the score."""
    on_gpu = report["machine"].get("device_type") == "cuda"
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("case", "path"):
        table.add_column(heading, no_wrap=True)
    for heading in ("eager\nms", "method\nms", "speed-up", "spread",
                    *(("GPU\nms", "GPU\nspeed-up", "host\nµs", "eager\nhost µs") if on_gpu else ()),
                    "rel. L2", "worst\nrow", "of copy\nroofline", *(("peak\nMiB",) if on_gpu else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report["cases"]:
        if row["status"] != "right":
            table.add_row(row["name"], Text(row["status"], style="bold red" if row["status"] == "wrong" else "yellow"))
            continue
        eager, method, speedup = row["eager"], row["method"], row["speedup"]
        table.add_row(
            row["name"], row.get("path", "-"), f"{eager['call_ms']:.3f}", f"{method['call_ms']:.3f}",
            Text(f"{speedup['call']:.2f}", style="bold"), f"{method['spread']:.0%}",
            *((f"{method['gpu_ms']:.4f}", f"{speedup['gpu']:.2f}", f"{method['host_ms'] * 1e3:.0f}",
               f"{eager['host_ms'] * 1e3:.0f}") if on_gpu else ()),
            f"{row['l2']:.1e}", f"{row['worst_row']:.1e}", f"{row['roofline_share']:.0%}",
            *((f"{row['peak_bytes'] / 2**20:.1f}",) if on_gpu else ()))
    console.print(table)
    for row in report["cases"]:
        if row["status"] != "right":
            console.print(Text.assemble((f"{row['status'].upper()} ", "bold red"), f"{row['name']}: {row['reason']}"),
                          soft_wrap=True)
    machine, means = report["machine"], report["geometric_mean"]
    console.print(f"\n{machine['device']}, torch {machine['torch']}, triton {machine['triton']}, copy "
                  f"{machine['copy_bytes_per_s'] / 1e9:.0f} GB/s; medians, eager and method interleaved, fresh inputs "
                  "every call", soft_wrap=True, highlight=False)
    if not report["correct"]:
        console.print(Text(f"score 0: {report['wrong']} of {len(report['cases'])} cases not right", style="bold red"))
        return
    gpu = f", {means['gpu']:.2f} on the GPU alone" if on_gpu else ""
    console.print(Text.assemble(("score ", "bold"), (f"{report['score']:.2f}", "bold green"),
                                f" times eager (geometric mean of {len(report['cases'])} cases, whole calls){gpu}; "
                                f"reward {report['reward']:.3f} with the published marks {EXPERT} and {UPPER_BOUND}"),
                  soft_wrap=True)


def finite(value: object) -> object:
    """The same data with null for NaN and infinity, which JSON has not."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(content: object, path: Path) -> None:
    """Writes all of the file or nothing: a reader never sees half a report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w") as stream:
            json.dump(finite(content), stream, indent=1, allow_nan=False)
            stream.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def plot(report: Data, path: Path) -> None:
    """Speed-up over eager, case by case, as a picture (PNG, or what the file's ending names)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = report["cases"]
    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.45 * len(rows)), layout="constrained")
    on_gpu = report["machine"]["device_type"] == "cuda"
    kinds = ("call", "gpu") if on_gpu else ("call",)
    height = 0.8 / len(kinds)
    for offset, kind in enumerate(kinds):
        bars = axes.barh([index + offset * height for index in range(len(rows))],
                         [row["speedup"][kind] if row["status"] == "right" else 0 for row in rows], height,
                         label={"call": "whole call", "gpu": "GPU time alone"}[kind])
        axes.bar_label(bars, [f"{row['speedup'][kind]:.1f}" if row["status"] == "right" else row["status"]
                              for row in rows], padding=3)
    axes.axvline(1, color="black", linewidth=0.8)
    for mark, name in ((EXPERT, "published expert"), (UPPER_BOUND, "published upper bound")) if on_gpu else ():
        axes.axvline(mark, color="grey", linestyle=":", label=f"{name}, {mark}")
    axes.set_yticks([index + height * (len(kinds) - 1) / 2 for index in range(len(rows))],
                    [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("times faster than the eager baseline")
    axes.set_title(f"{report['method']} on {report['machine']['device']}: score {report['score']:.2f}")
    axes.margins(x=0.1)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
