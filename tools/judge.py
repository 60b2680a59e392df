"""python -m tools judge: is a method right, and how much faster than the eager baseline is it?

This side orchestrates: it copies the method folder, starts `tools.worker` on the copy in a fresh process, keeps its
time limits and hands the results to `tools.report`. It imports no torch unless it has to find out about the device.
"""
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text
from typer import Option

from . import cases as families
from . import report
from .cases import Case, Data

ROOT = Path(__file__).resolve().parent.parent
# The worker gets these variables of the environment and no others: no credentials, no proxies.
ENVIRONMENT = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH",
               "LD_LIBRARY_PATH", "CC", "CXX", "XDG_CACHE_HOME", "GLCONV_CONFIG")
ENVIRONMENT_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "TORCH", "PYTORCH_", "TRITON_", "OMP_", "MKL_", "OPENBLAS_")
LOAD_LIMIT = 180.0      # seconds to import torch, measure the machine and load the method
PROCESSES = 2           # a method that loses its process (hang, crash) gets one more, then its other cases are not run


class Unusable(Exception):
    """The method cannot be judged at all; the text says why."""


@dataclass
class Verdict:
    """What came of one run: the machine, and for each case a result with status right, wrong or not run."""

    machine: Data = field(default_factory=dict)
    results: list[Data] = field(default_factory=list)


def find_method(name: str) -> Path:
    """The folder of a method: a path, or the name of one under methods/. It must hold solver.py."""
    for folder in (Path(name), ROOT / "methods" / name):
        if (folder / "solver.py").is_file():
            return folder.resolve()
    known = ", ".join(sorted(path.parent.name for path in (ROOT / "methods").glob("*/solver.py")))
    raise Unusable(f"no method at {name!r}: want a folder that holds solver.py, or one of {known}")


def find_device(name: str) -> str:
    """The device that `auto` stands for, or the name itself where torch knows such a device here."""
    if name == "cpu":
        return name
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise Unusable(f"no device {name!r}: {error}") from None
    if device.type not in ("cpu", "cuda"):
        raise Unusable(f"device {name!r} is not supported; want auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Unusable(f"device {name!r} is not here: torch sees {torch.cuda.device_count()} CUDA devices")
    return name


def find_cases(wanted: str, sealed: int | None, count: int, lengths: bool, small: bool) -> tuple[str, list[Case]]:
    """The family's name and its cases for the options of the command line. Raises ValueError for what fits none."""
    if lengths and sealed is None:
        raise ValueError("--lengths is for sealed cases; want --sealed SEED with it")
    if wanted in ("visible", "small"):
        small, wanted = wanted == "small", "auto"
    family = "small cases" if small else "visible cases"
    drawn = families.visible(small)
    if sealed is not None:
        family = f"sealed {sealed}, {count} {'small ' if small else ''}cases{' of many lengths' if lengths else ''}"
        drawn = families.sealed(sealed, count, small, lengths)
    return (family, drawn) if wanted == "auto" else (f"{family}: {wanted}", families.select(drawn, wanted))


def check_config(path: Path) -> None:
    """Raises what SolverConfig has to say about a file, before a process is started for it."""
    from glconv.config import SolverConfig

    SolverConfig.from_yaml(path)


def environment(config: Path | None) -> dict[str, str]:
    """The allow-listed part of this process's environment, and the config file for the solver."""
    kept = {name: value for name, value in os.environ.items()
            if name in ENVIRONMENT or name.startswith(ENVIRONMENT_PREFIXES)}
    return kept | ({"GLCONV_CONFIG": str(config)} if config else {})


class Worker:
    """One fresh process over the copied folder, in a process group of its own; its messages come with a time limit."""

    def __init__(self, job: Data, variables: dict[str, str], errors: Path) -> None:
        self.errors = errors
        with errors.open("ab") as stream:
            self.process = subprocess.Popen([sys.executable, "-m", "tools.worker"], cwd=ROOT, env=variables,
                                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream,
                                            start_new_session=True, text=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()
        with contextlib.suppress(BrokenPipeError), self.process.stdin as stdin:    # its end is reported by `receive`
            json.dump(job, stdin)

    def _read(self, messages: Iterable[str]) -> None:
        for line in messages:
            self.lines.put(line)
        self.lines.put(None)

    def receive(self, limit: float) -> Data | None:
        """The next message, or None where the process has ended. Raises TimeoutError past `limit` seconds."""
        try:
            line = self.lines.get(timeout=limit)
        except queue.Empty:
            raise TimeoutError from None
        return json.loads(line) if line else None

    def ended(self) -> str:
        """How the process ended, with the last line it wrote to standard error."""
        try:
            status = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "its process closed its messages and lives on"
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        tail = self.errors.read_text(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(tail) if line.strip()), "")
        return f"its process ended with {how}" + (f": {said[:200]}" if said else "")

    def close(self) -> None:
        """Ends the process and all it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def judge(method: Path, cases: Sequence[Case], device: str, *, config: Path | None = None, repeats: int = 30,
          time_limit: float = 180.0, progress: Callable[[int, str], None] = lambda done, text: None) -> Verdict:
    """Runs `cases` of the method in `method` (a folder with solver.py) on `device` and returns the verdict.

    `time_limit`: seconds for one case, compilation included. `progress` is told how many cases are done and what runs.
    Raises Unusable where the method cannot be loaded.
    """
    verdict = Verdict(results=[{"status": "not run", "reason": "the method lost its process before"} for _ in cases])
    with tempfile.TemporaryDirectory(prefix="glconv-judge-") as scratch:
        folder = Path(scratch) / "method"
        shutil.copytree(method, folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        waiting = list(range(len(cases)))
        for _ in range(PROCESSES):
            job = {"folder": str(folder), "device": device, "repeats": repeats,
                   "describe_machine": not verdict.machine,
                   "cases": [(number, asdict(cases[number])) for number in waiting]}
            worker = Worker(job, environment(config), Path(scratch) / "errors.txt")
            try:
                for number in _listen(worker, verdict, time_limit):
                    waiting.remove(number)
                    progress(len(cases) - len(waiting), cases[number].name)
            finally:
                worker.close()
            if not waiting:
                break
    return verdict


def _listen(worker: Worker, verdict: Verdict, time_limit: float) -> Iterator[int]:
    """Follows one worker to its end, writes results into the verdict, and yields the number of each finished case."""
    running: int | None = None
    loaded = False
    while True:
        try:
            message = worker.receive(time_limit if loaded else LOAD_LIMIT)
            lost = worker.ended() if message is None else None
        except TimeoutError:
            lost = f"ran past the time limit of {time_limit:g} s" if loaded else f"did not load in {LOAD_LIMIT:g} s"
        if lost:
            if not loaded:
                raise Unusable(f"the method cannot be judged: {lost}")
            if running is not None:
                verdict.results[running] = {"status": "wrong", "reason": lost}
                yield running
            return
        match message:
            case {"event": "ready", "machine": machine}:
                verdict.machine = machine or verdict.machine
            case {"event": "unusable", "reason": reason}:
                raise Unusable(f"the method {reason}")
            case {"event": "loaded"}:
                loaded = True
            case {"event": "start", "case": number}:
                running = number
            case {"event": "case", "case": number, "result": result}:
                verdict.results[number] = result
                yield number
                running = None
            case {"event": "done"}:
                return


def command(
    method: Annotated[str, Option(help="Folder that holds solver.py, or the name of one under methods/.")] = "main",
    config: Annotated[Path | None, Option(help="YAML file for the solver, such as configs/max-autotune.yaml.",
                                          exists=True, dir_okay=False)] = None,
    cases: Annotated[str, Option(help="visible (768 channels), small (192), auto (visible on a GPU, small on a CPU), "
                                 "or patterns of case names, comma separated.")] = "auto",
    sealed: Annotated[int | None, Option(metavar="SEED", help="Judge cases drawn from this seed instead.")] = None,
    count: Annotated[int, Option(min=1, help="How many cases --sealed draws.")] = 24,
    lengths: Annotated[bool, Option("--lengths", help="Let --sealed draw other lengths than 2048 too.")] = False,
    device: Annotated[str, Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    repeats: Annotated[int | None, Option(min=3, help="Timed calls a case; 30 on a GPU, 15 on a CPU.")] = None,
    time_limit: Annotated[float, Option(min=1, metavar="SECONDS", help="For a case, compilation included.")] = 180,
    json_file: Annotated[Path | None, Option("--json", metavar="FILE", help="Write the whole report here.")] = None,
    plot_file: Annotated[Path | None, Option("--plot", metavar="FILE.png", help="Draw the speed-ups here.")] = None,
    list_cases: Annotated[bool, Option("--list", help="Name the cases and stop.")] = False,
) -> None:
    """Is a method right, and how much faster than the eager baseline is it?

    Copies the method's folder, runs it in a fresh process on fresh inputs, compares every result with float64, and
    times whole calls and the GPU alone, interleaved with the eager baseline. Exit status: 0 all right, 1 a case is
    wrong (the score is then 0), 2 nothing could be judged.
    """
    console = report.console()
    try:
        folder = find_method(method)
        if config:
            check_config(config)
        device = find_device(device)
        family, chosen = find_cases(cases, sealed, count, lengths, small=device == "cpu")
        if list_cases:
            for case in chosen:
                console.print(case.name, highlight=False)
            return
        if repeats is None:
            repeats = 15 if device == "cpu" else 30
        with report.progress(len(chosen)) as advance:
            verdict = judge(folder, chosen, device, config=config and config.resolve(), repeats=repeats,
                            time_limit=time_limit, progress=advance)
    except (Unusable, ValueError, TypeError) as error:
        console.print(Text(str(error), style="bold red"), soft_wrap=True)
        raise typer.Exit(2) from None
    result = report.make_report(method, str(config) if config else None, family, verdict.machine, chosen,
                                verdict.results)
    report.print_report(result, console)
    if json_file:
        report.write_json(result, json_file)
    if plot_file:
        report.plot(result, plot_file)
    raise typer.Exit(0 if result["correct"] else 1)
