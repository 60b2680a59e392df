"""python -m tools sealed: cases of the judged family from a seed that nobody has tuned on, all of them right or not."""
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from typer import Option

from . import cases as families
from . import report
from .bench import BASELINES, file_name
from .doctor import commit
from .judge import Unusable, find_device, find_method, judge

Data = dict[str, Any]
SHOWN = 5       # wrong cases that are named


def record(seed: int, made: Data) -> Data:
    """What is kept of a run: enough to run it again and to see whether it was all right."""
    right = [row for row in made["cases"] if row["status"] == "right"]
    kinds = ("call", "gpu") if made["machine"].get("device_type") == "cuda" else ("call",)
    return {"seed": seed, "cases": len(made["cases"]), "right": len(right), "date": made["date"], "commit": commit(),
            "method": made["method"], "machine": made["machine"],
            "geometric_mean": {kind: round(made["geometric_mean"][kind], 3) for kind in kinds},
            "slowest": {kind: round(min((row["speedup"][kind] for row in right), default=0.0), 3) for kind in kinds},
            "worst_row": float(f"{max((row['worst_row'] for row in right), default=0.0):.3g}"),
            "wrong": [{"case": row["name"], "reason": row["reason"]}
                      for row in made["cases"] if row["status"] != "right"]}


def command(
    seed: Annotated[int | None, Option(help="By default one is drawn, and told.")] = None,
    count: Annotated[int, Option(min=1)] = 200,
    method: Annotated[str, Option(help="Folder that holds solver.py, or the name of one under methods/.")] = "main",
    device: Annotated[str, Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    repeats: Annotated[int, Option(min=3, help="Timed calls a case: the mean is over the cases.")] = 7,
    time_limit: Annotated[float, Option(min=1, metavar="SECONDS", help="For a case, compilation included.")] = 180,
    store: Annotated[bool, Option("--store", help="Keep the record in baselines/ under this device's name.")] = False,
    json_file: Annotated[Path | None, Option("--json", metavar="FILE", help="Write the record here.")] = None,
) -> None:
    """Two hundred cases of the judged family, from a seed that nobody has seen: correct, and how fast in the mean?

    Every check of the judge on every case, fewer timed calls. Exit status: 0 all right, 1 a case is wrong, 2 nothing
    could be judged.
    """
    console = report.console()
    seed = secrets.randbits(31) if seed is None else seed
    try:
        device = find_device(device)
        chosen = families.sealed(seed, count, small=device == "cpu")
        with report.progress(len(chosen)) as advance:
            verdict = judge(find_method(method), chosen, device, repeats=repeats, time_limit=time_limit,
                            progress=advance)
    except Unusable as error:
        console.print(Text(str(error), style="bold red"), soft_wrap=True)
        raise typer.Exit(2) from None
    made = report.make_report(method, None, f"sealed {seed}, {count} cases", verdict.machine, chosen, verdict.results)
    kept = record(seed, made)
    for wrong in kept["wrong"][:SHOWN]:
        console.print(Text(f"WRONG {wrong['case']}: {wrong['reason']}", style="bold red"), soft_wrap=True)
    means = ", ".join(f"{kind} {kept['geometric_mean'][kind]:.2f} (least {kept['slowest'][kind]:.2f})"
                      for kind in kept["geometric_mean"])
    console.print(f"seed {seed}: {kept['right']} of {kept['cases']} right; geometric mean over eager: {means}; "
                  f"worst row {kept['worst_row']:.1e}", highlight=False, soft_wrap=True)
    stored = BASELINES / f"sealed-{file_name(kept['machine'].get('device', 'none'))}"
    for path in filter(None, (json_file, stored if store else None)):
        report.write_json(kept, path)
        console.print(f"saved: {path}", highlight=False, soft_wrap=True)
    raise typer.Exit(int(kept["right"] < kept["cases"]))
