"""python -m tools doctor: what is here, which paths can run and why not, and whether each gives the right answer."""
import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rich.text import Text
from typer import Option

from .judge import ROOT
from .report import console, write_json

Data = dict[str, Any]
SHAPE = (2, 1, 3, 2048)     # batch, streams, heads, length: small, and every path takes it
LIMIT = 4e-3                # relative L2 of a row: FP16 FFTs come near it, everything else stays about 1e-3
# path -> the SolverConfig fields that select it, and the devices it is for
PATHS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "auto": ({}, ("cuda", "cpu")), "hopper": ({"kernel": "hopper"}, ("cuda",)),
    "portable": ({"kernel": "portable"}, ("cuda",)), "spectral": ({"graph": "spectral"}, ("cuda", "cpu")),
    "right-angle": ({"graph": "right-angle", "compile": False}, ("cuda", "cpu")),
    "eager": ({"graph": "eager"}, ("cuda", "cpu"))}
VARIABLES = ("GLCONV_", "CUDA_", "NVIDIA_", "TRITON_", "TORCH", "PYTORCH_", "CXX", "OMP_NUM_THREADS")


def driver_version() -> str | None:
    """The NVIDIA driver's version, or None where there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(96)
    if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, len(text)):
        return None
    library.nvmlShutdown()
    return text.value.decode()


def version_of(module: str) -> str:
    """A module's version, or what keeps it from being imported."""
    try:
        return __import__(module).__version__
    except Exception as error:
        return f"none: {type(error).__name__}: {error}"


def commit() -> str | None:
    """The commit that the tree is at, marked when files differ from it; None where there is no repository."""
    git = shutil.which("git")
    if git is None:
        return None
    run = subprocess.run([git, "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return run.stdout.strip() if run.returncode == 0 else None


def unwritable(folder: Path) -> str | None:
    """Why files cannot be made in a folder that may not exist yet, or None."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is no folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} cannot be written"


def cache_folders() -> Data:
    """Where compiled kernels are kept: {what: (folder, why it cannot be written or None)}."""
    import getpass
    import tempfile

    try:
        user = getpass.getuser()
    except (KeyError, OSError):     # a container that gives its user no name
        user = str(os.getuid())
    folders = {"Triton": os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache"),
               "Inductor": os.environ.get("TORCHINDUCTOR_CACHE_DIR",
                                          str(Path(tempfile.gettempdir()) / f"torchinductor_{user}"))}
    return {name: {"folder": folder, "problem": unwritable(Path(folder).expanduser())}
            for name, folder in folders.items()}


def describe_device(device: torch.device) -> Data:
    if device.type == "cpu":
        from glconv.compiled import missing_toolchain

        return {"name": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
                "compiler": missing_toolchain(device) or shutil.which(os.environ.get("CXX", "g++").split()[0])}
    properties = torch.cuda.get_device_properties(device)
    return {"name": properties.name, "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory GiB": round(properties.total_memory / 2**30, 1),
            "shared memory of a block": properties.shared_memory_per_block_optin,   # type: ignore[attr-defined]
            "shared memory of a multiprocessor": properties.shared_memory_per_multiprocessor}


def summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def try_path(path: str, device: torch.device) -> Data:
    """One tiny solve: {status: right | wrong | failed | not here, ...}."""
    fields, kinds = PATHS[path]
    if device.type not in kinds:
        return {"status": "not here", "reason": "runs on a CUDA device"}
    try:
        import glconv
        from glconv import reference

        generator = torch.Generator().manual_seed(0)
        x, in_gate, out_gate = (torch.randn(SHAPE, generator=generator).half().to(device) for _ in range(3))
        k = (torch.randn(SHAPE[1:], generator=generator) / SHAPE[-1] ** 0.5).to(device)
        config = glconv.SolverConfig(**fields) if fields else None
        try:
            route = glconv.describe(x, in_gate, out_gate, k, config)
        except ValueError as error:
            return {"status": "not here", "reason": str(error)}
        start = time.perf_counter()
        y = glconv.gated_causal_conv(x, in_gate, out_gate, k, config)
        worst = reference.row_errors(y, reference.oracle(x, in_gate, out_gate, k)).max().item()
        seconds = time.perf_counter() - start
    except Exception as error:
        return {"status": "failed", "reason": summary(error)}
    status = "right" if y.dtype == torch.float16 and worst <= LIMIT else "wrong"
    return {"status": status, "path": route.path, "reason": route.reason, "error": worst, "seconds": round(seconds, 3)}


def examine(devices: list[torch.device], attempt: Callable[[str, torch.device], Data] = try_path) -> Data:
    """The whole report as plain data."""
    report: Data = {
        "glconv": version_of("glconv"), "commit": commit(), "python": platform.python_version(),
        "platform": platform.platform(), "torch": torch.__version__, "triton": version_of("triton"),
        "CUDA of torch": torch.version.cuda, "driver": driver_version(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
        "caches": cache_folders(), "devices": {}}
    for device in devices:
        paths = {path: attempt(path, device) for path, (_, kinds) in PATHS.items() if device.type in kinds}
        report["devices"][str(device)] = describe_device(device) | {"paths": paths}
    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        report["no CUDA"] = built + ("" if report["driver"] else "; there is no NVIDIA driver")
    report["problems"] = problems(report)
    return report


def problems(report: Data) -> list[str]:
    """What is wrong: a path that is here and does not give the right answer, a cache that cannot be written."""
    found = [f"the {name} cache cannot be written: {cache['problem']}" for name, cache in report["caches"].items()
             if cache["problem"]]
    for device, content in report["devices"].items():
        found += [f"{path} on {device} {result['status']}: {result.get('reason')}"
                  for path, result in content["paths"].items() if result["status"] in ("wrong", "failed")]
    return found


def show(report: Data) -> None:
    out = console()
    for name, value in report.items():
        if name not in ("environment", "caches", "devices", "problems"):
            out.print(f"{name}: {value}", highlight=False, soft_wrap=True)
    for name, value in report["environment"].items():
        out.print(f"{name}={value}", highlight=False, soft_wrap=True)
    for name, cache in report["caches"].items():
        out.print(f"{name} cache: {cache['folder']}" + (f" ({cache['problem']})" if cache["problem"] else ""),
                  highlight=False, soft_wrap=True)
    for device, content in report["devices"].items():
        facts = ", ".join(f"{name} {value}" for name, value in content.items() if name != "paths")
        out.print(Text(f"\n{device}: {facts}", style="bold"), soft_wrap=True)
        table = Table(box=None, pad_edge=False)
        for heading in ("path", "", "worst row", "first call s", ""):
            table.add_column(heading, overflow="fold")
        for path, result in content["paths"].items():
            style = {"right": "green", "not here": "yellow"}.get(result["status"], "bold red")
            error, seconds = result.get("error"), result.get("seconds")
            name = f"{path} ({result['path']})" if result.get("path", path) != path else path
            table.add_row(name, Text(result["status"], style=style), "" if error is None else f"{error:.1e}",
                          "" if seconds is None else f"{seconds:.2f}", Text(str(result.get("reason") or "")))
        out.print(table)
    out.print()
    for problem in report["problems"]:
        out.print(Text(problem, style="bold red"), soft_wrap=True)
    if not report["problems"]:
        out.print(Text("every path that is here gives the right answer", style="bold green"))


def command(
    json_file: Annotated[Path | None, Option("--json", metavar="FILE", help="Write the report; -: print it.")] = None,
    cpu: Annotated[bool, Option("--cpu", help="Leave the CUDA devices alone.")] = False,
) -> None:
    """Versions, devices, caches; one tiny solve on each path, held to float64. What belongs in a bug report.

    Exit status: 0 every path that can run here gives the right answer, 1 one does not, or a cache cannot be written.
    """
    devices = [torch.device("cpu")]
    if not cpu:
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] + devices
    report = examine(devices)
    if json_file == Path("-"):
        json.dump(report, sys.stdout, indent=1)
        print()
    else:
        show(report)
        if json_file:
            write_json(report, json_file)
    raise typer.Exit(int(bool(report["problems"])))
