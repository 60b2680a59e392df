"""Honest timing: every variant on its own inputs, cold in L2, interleaved in one run, medians with their spread."""
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Times of one variant, in milliseconds a call."""

    gpu: float      # device time alone: the events stand behind a filler, so host issue time is hidden
    call: float     # events around a call on an idle device: host issue time included
    host: float     # time until the call returns to Python
    spread: float   # (75th - 25th percentile) / median of `gpu`


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


class L2Flush:
    """Overwrites a buffer of several L2 sizes, so that the next kernel reads from memory."""

    def __init__(self, device: torch.device) -> None:
        size = max(4 * torch.cuda.get_device_properties(device).L2_cache_size, 1 << 26)
        self.buffer = torch.empty(size // 4, dtype=torch.int32, device=device)

    def __call__(self) -> None:
        self.buffer.zero_()


def no_arguments() -> tuple:
    return ()


def time_cuda(variants: dict[str, Callable[..., object]], repeats: int, device: torch.device, issue_ms: float = 1.0,
              fresh: Callable[[], tuple] = no_arguments) -> dict[str, Timing]:
    """Median times of several variants, interleaved call by call.

    Two passes. GPU time: flush L2 and keep the device busy for about `issue_ms`, then event, call, event, so the
    interval holds device work only. Call latency: flush, wait until the device is idle, event, call, event. `fresh`
    makes the arguments of each call, before the flush and outside the interval.
    """
    flush = L2Flush(device)
    busy_cycles = int(issue_ms * 1e-3 * 1.9e9)
    gpu: dict[str, list[float]] = {name: [] for name in variants}
    call: dict[str, list[float]] = {name: [] for name in variants}
    host: dict[str, list[float]] = {name: [] for name in variants}
    for call_on_idle in (False, True):
        pending = []
        for _ in range(repeats):
            for name, variant in variants.items():
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                arguments = fresh()
                flush()
                if call_on_idle:
                    torch.cuda.synchronize(device)
                else:
                    torch.cuda._sleep(busy_cycles)
                start.record()
                before = time.perf_counter()
                result = variant(*arguments)
                elapsed = (time.perf_counter() - before) * 1e3
                stop.record()
                if call_on_idle:
                    host[name].append(elapsed)
                pending.append(((call if call_on_idle else gpu)[name], start, stop))
                del result, arguments
            torch.cuda.synchronize(device)
        for times, start, stop in pending:
            times.append(start.elapsed_time(stop))
    return {name: Timing(statistics.median(gpu[name]), statistics.median(call[name]), statistics.median(host[name]),
                         (percentile(gpu[name], 0.75) - percentile(gpu[name], 0.25)) / statistics.median(gpu[name]))
            for name in variants}


def time_cpu(variants: dict[str, Callable[..., object]], repeats: int,
             fresh: Callable[[], tuple] = no_arguments) -> dict[str, Timing]:
    """Median wall times of several variants on the CPU, interleaved call by call; `fresh` as in `time_cuda`."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, variant in variants.items():
            arguments = fresh()
            before = time.perf_counter()
            result = variant(*arguments)
            times[name].append((time.perf_counter() - before) * 1e3)
            del result, arguments
    return {name: Timing(*(statistics.median(values),) * 3,
                         (percentile(values, 0.75) - percentile(values, 0.25)) / statistics.median(values))
            for name, values in times.items()}


def copy_bandwidth(device: torch.device, size: int = 1 << 31, repeats: int = 15) -> float:
    """Bytes a second, read plus written, of a device-to-device copy: the roofline every share is given against."""
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    if device.type == "cuda":
        timing = time_cuda({"copy": lambda: target.copy_(source)}, repeats, device)["copy"].gpu
    else:
        timing = time_cpu({"copy": lambda: target.copy_(source)}, repeats)["copy"].gpu
    return 2 * size / (timing * 1e-3)
