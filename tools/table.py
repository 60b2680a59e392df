"""python -m tools table: reports of the judge as a Markdown table, printed or put in its place in a file."""
import json
from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Option

from .cases import Data

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def markdown(report: Data) -> str:
    """One report of `judge --json` as a Markdown table with the machine and versions above it."""
    machine, means = report["machine"], report["geometric_mean"]
    on_gpu = machine["device_type"] == "cuda"
    config = f", config `{report['config']}`" if report["config"] else ""
    lines = [f"`{report['method']}`{config} on {machine['device']}, torch {machine['torch']}, triton "
             f"{machine['triton']}, {report['date'][:10]}, {report['family']}:", ""]
    headings = ["case", "path", "eager ms", "ms", "speed-up"]
    headings += ["GPU ms", "GPU speed-up", "host µs"] if on_gpu else []
    headings += ["relative L2", "of copy roofline"]
    lines += ["| " + " | ".join(headings) + " |", "|---|---|" + "--:|" * (len(headings) - 2)]
    for row in report["cases"]:
        if row["status"] != "right":
            lines.append(f"| {row['name']} | {row['status']}: {row['reason']} |" + " |" * (len(headings) - 2))
            continue
        method, speedup = row["method"], row["speedup"]
        cells = [row["name"], row.get("path", "-"), f"{row['eager']['call_ms']:.3f}", f"{method['call_ms']:.3f}",
                 f"{speedup['call']:.2f}"]
        if on_gpu:
            cells += [f"{method['gpu_ms']:.4f}", f"{speedup['gpu']:.2f}", f"{method['host_ms'] * 1e3:.0f}"]
        cells += [f"{row['l2']:.1e}", f"{row['roofline_share']:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    gpu = f", {means['gpu']:.2f} on the GPU alone" if on_gpu else ""
    lines += ["", f"Score {report['score']:.2f} times eager (geometric mean of whole calls){gpu}; reward "
              f"{report['reward']:.3f}."]
    return "\n".join(lines)


def put_into(text: str, table: str) -> str:
    """`text` with what stands between its two marks replaced. Raises ValueError where it has no such marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no place for a table: want the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def command(
    reports: Annotated[list[Path], Argument(metavar="REPORT.json...", help="Files written by judge --json.",
                                                exists=True, dir_okay=False)],
    into: Annotated[Path | None, Option(metavar="FILE.md", help="Put the tables between the marks in this file.",
                                        exists=True, dir_okay=False)] = None,
) -> None:
    """Reports of the judge as Markdown tables, so that no figure in a document is typed by hand."""
    tables = "\n\n".join(markdown(json.loads(path.read_text())) for path in reports)
    if into is None:
        print(tables)
        return
    try:
        into.write_text(put_into(into.read_text(), tables))
    except ValueError as error:
        raise BadParameter(f"{into}: {error}") from None
