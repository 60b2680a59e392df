"""python -m tools roofline: how near each path comes to the time that its bytes alone would take."""
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
from glconv import SolverConfig, describe, gated_causal_conv
from glconv.plan import traffic
from glconv.reference import oracle
from rich.console import Console
from rich.progress import track
from rich.table import Table
from typer import BadParameter, Option

from .report import console, write_json
from .timing import copy_bandwidth, time_cpu, time_cuda
from .worker import frozen_eager

GPU_CASES = ("1x2048", "4x2048", "16x2048", "64x2048", "64x256", "64x512", "64x1024", "16x4096", "8x8192", "4x16384")
CPU_CASES = ("1x2048", "4x2048", "4x512")
# The ways a problem can be run beside the frozen eager baseline, by the config that forces each.
PATHS = {
    "spectral": SolverConfig(graph="spectral"),
    "right-angle": SolverConfig(graph="right-angle"),
    "portable": SolverConfig(graph="fused", kernel="portable"),
    "hopper": SolverConfig(graph="fused", kernel="hopper"),
}
GPU_PATHS = ("spectral", "portable", "hopper")
CPU_PATHS = ("right-angle",)


def draw(batch: int, channels: int, length: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Normal signals, sigmoid gates, a decaying kernel: random, for zeros run faster than data does."""
    generator = torch.Generator(device=device).manual_seed(batch + length)
    normal = lambda *shape: torch.randn(*shape, device=device, generator=generator)     # noqa: E731
    signal = (normal(batch, 1, channels, length) for _ in range(3))
    decay = torch.exp(-torch.arange(length, device=device) / 200)
    x, in_gate, out_gate = next(signal).half(), next(signal).sigmoid().half(), next(signal).sigmoid().half()
    return x, in_gate, out_gate, normal(1, channels, length) * decay * 0.1


def relative_error(y: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> float:
    """Relative L2 from float64 over two rows of the batch, the first and the last."""
    x, in_gate, out_gate, k = inputs
    rows = [0, x.shape[0] - 1]
    want = oracle(x[rows], in_gate[rows], out_gate[rows], k)
    return ((y[rows].double() - want).norm() / want.norm()).item()


def measure(name: str, paths: Sequence[str], channels: int, device: torch.device, bandwidth: float,
            repeats: int) -> dict[str, Any]:
    """One case on every path that can run it: bytes, floor and, a path, time, share of the floor and error."""
    batch, length = map(int, name.split("x"))
    inputs = draw(batch, channels, length, device)
    eager = frozen_eager()
    calls, missing = {"eager": lambda: eager(*inputs)}, {}
    for path in paths:
        config = PATHS[path]
        try:
            describe(*inputs, config)   # type: ignore[call-arg,arg-type]  # four tensors, which mypy does not count
        except ValueError as error:
            missing[path] = str(error)
            continue
        calls[path] = lambda config=config: gated_causal_conv(*inputs, config)  # type: ignore[misc,call-arg,arg-type]
    errors = {path: relative_error(call(), inputs) for path, call in calls.items()}
    times = time_cuda(calls, repeats, device) if device.type == "cuda" else time_cpu(calls, repeats)
    moved = traffic(batch, channels, length)
    floor_ms = moved / bandwidth * 1e3
    return {
        "case": name, "batch": batch, "channels": channels, "length": length, "bytes": moved, "floor_ms": floor_ms,
        "missing": missing,
        "paths": {path: {**asdict(timing), "share": floor_ms / timing.gpu, "error": errors[path],
                         "speedup": times["eager"].gpu / timing.gpu} for path, timing in times.items()},
    }


def show(report: dict[str, Any], out: Console) -> None:
    paths = list(dict.fromkeys(path for case in report["cases"] for path in case["paths"]))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("batch x length", "MB", "floor\nms", *(f"{path}\n{unit}" for path in paths
                                                           for unit in ("ms", "share", "x eager", "rel. L2"))):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in report["cases"]:
        cells: list[str] = []
        for path in paths:
            figures = case["paths"].get(path)
            cells += (f"{figures['gpu']:.4f}", f"{figures['share']:.0%}", f"{figures['speedup']:.2f}",
                      f"{figures['error']:.1e}") if figures else ("-",) * 4
        table.add_row(case["case"], f"{case['bytes'] / 1e6:.0f}", f"{case['floor_ms']:.4f}", *cells)
    out.print(table)
    out.print(f"\n{report['device']}, torch {torch.__version__}, copy {report['copy_bytes_per_s'] / 1e9:.0f} GB/s, "
              f"{report['channels']} channels; medians, cold in L2, interleaved, checked against float64",
              highlight=False, soft_wrap=True)


def panels(cases: list[dict[str, Any]]) -> list[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """What the picture shows side by side: (title of the axis, (tick, case) ...). Over batch at the length that most
    cases have, over length at the largest batch of each."""
    lengths = [case["length"] for case in cases]
    usual = max(set(lengths), key=lengths.count)
    over_batch = sorted((case for case in cases if case["length"] == usual), key=lambda case: case["batch"])
    largest = {case["length"]: case for case in sorted(cases, key=lambda case: case["batch"])}
    return [(f"batch, at length {usual}", [(str(case["batch"]), case) for case in over_batch]),
            ("length (batch)", [(f"{length}\n({case['batch']})", case) for length, case in sorted(largest.items())])]


def plot(report: dict[str, Any], path: Path) -> None:
    """Share of the copy roofline over batch and over length, a line a path, each point with its speed-up over eager."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, plots = pyplot.subplots(1, 2, figsize=(13, 5.5), layout="constrained", sharey=True)
    for axes, (title, shown) in zip(plots, panels(report["cases"])):
        for number, name in enumerate(("eager", *PATHS)):
            points = [(index, case["paths"][name]) for index, (_, case) in enumerate(shown) if name in case["paths"]]
            if not points:
                continue
            axes.plot([index for index, _ in points], [100 * taken["share"] for _, taken in points], marker="o",
                      color=f"C{number}", label=name)
            for index, taken in points if name != "eager" else ():
                axes.annotate(f"{taken['speedup']:.1f}x", (index, 100 * taken["share"]), xytext=(0, 6),
                              textcoords="offset points", ha="center", fontsize=8, color=f"C{number}")
        axes.set_xticks(range(len(shown)), [tick for tick, _ in shown])
        axes.set_xlabel(title)
        axes.grid(axis="y", alpha=0.3)
        axes.set_ylim(0, 100)
    plots[0].set_ylabel("share of the copy roofline, %; times eager beside the points")
    plots[0].legend(frameon=False, loc="upper left")
    figure.suptitle(f"{report['device']}, {report['channels']} channels, GPU time" if report["device"] != "CPU" else
                    f"CPU, {report['channels']} channels")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def command(
        cases: Annotated[str, Option(help="batch x length, e.g. 1x2048,64x512; by default those of the published "
                                          "range on a GPU, small ones on a CPU")] = "",
        paths: Annotated[str, Option(help="of spectral, right-angle, portable, hopper; by default those of the "
                                          "device")] = "",
        channels: Annotated[int, Option(help="streams times heads", min=1)] = 768,
        device: Annotated[str, Option(help="cuda, cpu; by default the GPU where there is one")] = "",
        repeats: Annotated[int, Option(help="timed calls of each path", min=3)] = 30,
        json: Annotated[Path | None, Option(help="file for all figures")] = None,
        picture: Annotated[Path | None, Option("--plot", help="file for the picture, PNG")] = None) -> None:
    """How near each path comes to the time that its bytes alone would take.

    Measures the machine's copy bandwidth, then each case on every path that can run it: eager, spectral, portable and
    Hopper kernels on a GPU; eager and right-angle on a CPU.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    names = cases.split(",") if cases else list(GPU_CASES if where.type == "cuda" else CPU_CASES)
    chosen = paths.split(",") if paths else list(GPU_PATHS if where.type == "cuda" else CPU_PATHS)
    if unknown := [path for path in chosen if path not in PATHS]:
        raise BadParameter(f"unknown path {', '.join(unknown)}; known: {', '.join(PATHS)}")
    bandwidth = copy_bandwidth(where, 1 << 31 if where.type == "cuda" else 1 << 28)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU", "channels": channels,
        "copy_bytes_per_s": bandwidth, "torch": torch.__version__, "cases": []}
    for name in track(names, description="measuring", console=Console(stderr=True), transient=True):
        report["cases"].append(measure(name, chosen, channels, where, bandwidth, repeats))
    show(report, console())
    if json:
        write_json(report, json)
    if picture:
        plot(report, picture)
