"""python -m tools inspect: what Inductor made of a graph, without reading generated code.

Inductor's scheduler is watched while it compiles: its final nodes are the launches. Byte counts are Inductor's own,
each buffer once a launch; what caches save or a strided access costs is not in them.
"""
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from glconv import SolverConfig
from glconv.compiled import Function, compile_graph
from glconv.spectral import graph as spectral
from glconv.spectral import right_angle
from rich.table import Table
from typer import Option

import graphs

from . import cases as families
from .cases import Case, make_inputs
from .judge import Unusable, find_device
from .report import console

SIGNALS = ("x", "in_gate", "out_gate")
FFT = {"_fft_r2c": "real FFT", "_fft_c2r": "inverse real FFT", "_fft_c2c": "complex FFT"}
VIEWS = ("view_as_real", "view_as_complex")


@dataclass
class Launch:
    """One node of Inductor's final schedule: a generated kernel, a library or custom operator, or a view."""

    kind: str                                           # pointwise | reduction | combo | library | operator | view
    ops: list[str]                                      # what was fused into it, in the order of the graph
    reads: dict[str, int]                               # bytes by buffer; inputs by their own names
    writes: dict[str, int]
    casts: list[str] = field(default_factory=list)      # "float32 -> float16"

    @property
    def moved(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())

    @property
    def generated(self) -> bool:
        return self.kind in ("pointwise", "reduction", "combo")


@contextlib.contextmanager
def watched() -> Iterator[list[list[Launch]]]:
    """Collects the launches of every graph that Inductor compiles inside; caches are off, or there would be none."""
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V

    found: list[list[Launch]] = []
    codegen = Scheduler.codegen

    def watch(self: Any) -> Any:
        names = input_names(V.graph)
        found.append([launch for launch in (describe(node, names) for node in self.nodes) if launch])
        return codegen(self)

    with mock.patch.object(Scheduler, "codegen", watch), torch._inductor.config.patch(fx_graph_cache=False), \
            torch._functorch.config.patch(enable_autograd_cache=False):
        yield found


def input_names(graph: Any) -> dict[str, str]:
    """The four tensors' names for Inductor's: k is the first FP32 one of several rows and positions, the FP16 ones come
    in the order x, in_gate, out_gate in which every recipe first touches them. Others are numbered."""
    names: dict[str, str] = {}
    signals = list(SIGNALS)
    for name, tensor in graph.graph_inputs.items():
        if not hasattr(tensor, "get_dtype"):
            continue        # a symbolic size
        dtype = tensor.get_dtype()
        if dtype == torch.float16 and signals:
            names[name] = signals.pop(0)
        elif dtype == torch.float32 and "k" not in names.values() and str(tensor.get_size()[-1]) != "1":
            names[name] = "k"
        else:
            names[name] = f"input {len(names)}"
    return names


def describe(node: Any, names: dict[str, str]) -> Launch | None:
    """A scheduler node as a Launch; None for what launches and moves nothing."""
    parts = node.get_nodes()
    if type(node).__name__ == "NopKernelSchedulerNode" or type(parts[0].node).__name__ == "MultiOutput":
        return None
    reads = {names.get(name, name): size for name, size in node.get_read_write_buffer_accesses(True, False).items()}
    writes = node.get_read_write_buffer_accesses(False, True)
    if node.is_extern():
        return extern(parts[0].node, reads, writes)
    origins = {origin for part in parts for origin in part.node.get_origins()}
    order = {origin: place for place, origin in enumerate(next(iter(origins)).graph.nodes)} if origins else {}
    ops, casts = [], []
    for origin in sorted(origins, key=lambda origin: order[origin]):
        name = operator_name(origin.target)
        if name == "convert_element_type":
            source, target = (str(cast.meta["val"].dtype).removeprefix("torch.") for cast in (origin.args[0], origin))
            casts.append(f"{source} -> {target}")
            name = f"to {target}"
        ops.append(name)
    kind = "combo" if node.is_foreach() else "reduction" if node.is_reduction() else "pointwise"
    return Launch(kind, ops, reads, dict(writes), casts)


def extern(operation: Any, reads: dict[str, int], writes: dict[str, int]) -> Launch:
    """A library or custom operator; a view of it reads and writes nothing."""
    target = getattr(operation, "op_overload", None)
    name = operator_name(target) if target is not None else type(operation).__name__
    if name in VIEWS:
        return Launch("view", [name], {}, {})
    custom = target is not None and not str(target).startswith("aten")
    return Launch("operator" if custom else "library", [FFT.get(name, name)], reads, dict(writes))


def operator_name(target: Any) -> str:
    """aten.mul.Tensor -> mul"""
    parts = str(target).split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def compiled_from(path: Path, length: int, device: torch.device) -> Function:
    """The compiled callable of the four tensors that a config file or a ladder file asks for. Raises ValueError for one
    that Inductor has no part in, and what the loaders raise."""
    import yaml

    content = yaml.safe_load(path.read_text()) or {}
    build: Callable[[], Function]
    if "recipe" in content:
        version = graphs.load(path)
        config, build = version.config, functools.partial(version.solver, device)
    else:
        config = SolverConfig.from_yaml(path)
        graph = {"auto": "spectral" if device.type == "cuda" else "right-angle"}.get(config.graph, config.graph)
        builders: dict[str, Callable[[], Function]] = {
            "spectral": lambda: compile_graph(
                spectral.spectral_graph(spectral.transform_dtype(length, device, config)), config),
            "right-angle": lambda: right_angle.build(config, device)}
        if graph not in builders:
            raise ValueError(f"{path}: graph: {graph} is not made by Inductor; want one of {', '.join(builders)}, or a "
                             "ladder file")
        build = builders[graph]
    if not config.compile:
        raise ValueError(f"{path}: compile: false, so Inductor makes nothing of it; want compile: true")
    return build()


def show(name: str, launches: Sequence[Launch], floor: int, title: str) -> None:
    """The launches of one graph as a table, then where gates and casts landed, and the traffic against the floor."""
    out = console()
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("#", justify="right")
    table.add_column("kind", no_wrap=True)
    table.add_column("fused", max_width=60)
    table.add_column("reads", max_width=24)
    table.add_column("writes", max_width=14)
    table.add_column("MB", justify="right", no_wrap=True)
    table.add_column("of floor", justify="right", no_wrap=True)
    real = [launch for launch in launches if launch.kind != "view"]
    for number, launch in enumerate(real, 1):
        table.add_row(str(number), launch.kind, ", ".join(readable(launch.ops)), ", ".join(launch.reads),
                      ", ".join(launch.writes), f"{launch.moved / 1e6:.3f}", f"{launch.moved / floor:.2f}")
    out.print(table)
    for gate in (*SIGNALS, "k"):
        places = [str(number) for number, launch in enumerate(real, 1) if gate in launch.reads]
        if places:
            out.print(f"{gate}: read by {', '.join(places)}", highlight=False)
    for number, launch in enumerate(real, 1):
        if launch.casts:
            out.print(f"casts in {number}: {', '.join(launch.casts)}", highlight=False)
    out.print(summary(name, launches, floor), soft_wrap=True, highlight=False)


def summary(name: str, launches: Sequence[Launch], floor: int) -> str:
    """One line: launches by kind, views beside, bytes against the floor."""
    real = [launch for launch in launches if launch.kind != "view"]
    moved = sum(launch.moved for launch in real)
    counts = {"generated": sum(launch.generated for launch in real)} | {
        kind: sum(launch.kind == kind for launch in real) for kind in ("library", "operator")}
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    return (f"{name}: {len(real)} launches ({kinds}), {len(launches) - len(real)} views; moves {moved / 1e6:.3f} MB, "
            f"{moved / floor:.2f} times the floor of {floor / 1e6:.3f} MB (x, gates, y once in FP16, k once in FP32)")


def readable(ops: Sequence[str]) -> list[str]:
    """Names without the shape bookkeeping that costs nothing in a fused kernel."""
    free = {"reshape", "view", "slice", "permute", "select", "unsqueeze", "expand", "clone", "as_strided"}
    return [op for op in ops if op not in free] or list(ops)


def profile(call: Callable[[], object]) -> None:
    """Device time of every kernel of one warm call; CUDA only."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        call()
        torch.cuda.synchronize()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("GPU kernel", max_width=90)
    table.add_column("launches", justify="right")
    table.add_column("µs", justify="right")
    for event in sorted(record.key_averages(), key=lambda event: -event.self_device_time_total):
        table.add_row(event.key, str(event.count), f"{event.self_device_time_total:.1f}")
    console().print(table)


def command(
    config: Annotated[list[str], Option(help="A config or ladder file, or a version such as v40; may be repeated.")],
    batch: Annotated[int, Option(min=1, help="Batch size.")] = 4,
    streams: Annotated[int, Option(min=1, help="Streams.")] = 1,
    heads: Annotated[int, Option(min=0, help="Heads; by default 768 over streams, 8 on a CPU.")] = 0,
    length: Annotated[int, Option(min=1, help="Sequence length.")] = families.LENGTH,
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    profiled: Annotated[bool, Option("--profile", help="Also each kernel's device time, warm; CUDA only.")] = False,
) -> None:
    """Show what Inductor made of a graph: launches, what was fused into each, bytes moved against the floor, and where
    gates and casts landed. With several configs, one after the other and their totals at the end."""
    try:
        where = torch.device(find_device(device))
        heads = heads or (max(1, families.CHANNELS // streams) if where.type == "cuda" else 8)
        case = Case(batch, streams, heads, length, "uniform", "decaying", 1.0, seed=0)
        totals = []
        for wanted in config:
            path = graphs.LADDER / f"{wanted}.yaml" if (graphs.LADDER / f"{wanted}.yaml").exists() else Path(wanted)
            call, inputs = compiled_from(path, length, where), make_inputs(case, 0, where)
            torch._dynamo.reset()
            with watched() as found:
                call(*inputs)
            for number, launches in enumerate(found, 1):
                of = f", graph {number} of {len(found)}" if len(found) > 1 else ""
                show(path.stem + of, launches, case.moved_bytes, f"{path}{of}: [{batch}, {streams}, {heads}, {length}] "
                                                                 f"on {where}")
                totals.append(summary(path.stem + of, launches, case.moved_bytes))
            if profiled and where.type == "cuda":
                profile(functools.partial(call, *inputs))
        if len(totals) > 1:
            console().print("\n" + "\n".join(totals), soft_wrap=True, highlight=False)
    except (ValueError, TypeError, OSError, Unusable) as error:
        typer.echo(f"inspect: {error}", err=True)
        raise typer.Exit(2) from None
