"""Faults planted into the kernels of this process, for tests/gpu/planted.py and sanitize.py: never on by itself.

barrier:N   the N-th barrier (bar.sync) of every fused kernel is taken out of its assembly text, N from 0
shared      every plan of the portable kernel asks for 24 stages of pipelined loads, more than any card holds
slow:P      a solver that keeps the GPU busy for P per cent of its own time more (`slowed`)
"""
import dataclasses
import re
import tempfile
from collections.abc import Callable

import torch

BARRIER = re.compile(r"^\s*bar\.sync\s+0;\s*$", re.MULTILINE)
# What says which barriers guard a product: those between stores into shared memory and the tensor cores' reading.
LANDMARK = re.compile(r"^\s*(?:@%?\w+\s+)?"
                      r"(bar\.sync|st\.shared|stmatrix|wgmma\.mma_async|ldmatrix|ld\.shared|mma\.sync)", re.MULTILINE)
KERNELS = ("right_angle_kernel", "single_kernel")


def without_barrier(ptx: str, number: int) -> str:
    """Assembly text without its barrier of that number, counted from 0. Raises ValueError where it has too few."""
    found = list(BARRIER.finditer(ptx))
    if number >= len(found):
        raise ValueError(f"barrier {number} of {len(found)}")
    return ptx[:found[number].start()] + ptx[found[number].end():]


def guards_of_products(ptx: str) -> list[int]:
    """Numbers of the barriers that stand between stores into shared memory and a product or the loads of one."""
    marks = [mark[1] for mark in LANDMARK.finditer(ptx)]
    barriers = [place for place, mark in enumerate(marks) if mark == "bar.sync"]
    return [number for number, place in enumerate(barriers) if marks[place - 1:place] in (["st.shared"], ["stmatrix"])
            and marks[place + 1:place + 2] in (["wgmma.mma_async"], ["ldmatrix"])]


def remove_barrier(number: int) -> None:
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend

    knobs.cache.dir = tempfile.mkdtemp(prefix="glconv-planted-")     # kernels with faults are nobody else's
    assemble = CUDABackend.make_cubin

    def make_cubin(self, src, *arguments):
        if any(f".entry {name}" in src for name in KERNELS):
            src = without_barrier(src, number)
        return assemble(self, src, *arguments)

    CUDABackend.make_cubin = make_cubin


def ask_for_too_much() -> None:
    from glconv.fused import launch

    make = launch.make_plan

    def make_plan(*arguments):
        plan = make(*arguments)
        return dataclasses.replace(plan, stages=24) if plan.path == "portable" else plan

    launch.make_plan = make_plan


def slowed(solve: Callable[..., torch.Tensor], per_cent: float) -> Callable[..., torch.Tensor]:
    """`solve`, followed by that many per cent of its GPU time of waiting."""
    cycles: dict[torch.Size, int] = {}

    def slow(*tensors: torch.Tensor) -> torch.Tensor:
        shape = tensors[0].shape
        if shape not in cycles:
            cycles[shape] = int(measured_cycles(lambda: solve(*tensors)) * per_cent / 100)
        y = solve(*tensors)
        torch.cuda._sleep(cycles[shape])
        return y

    return slow


def measured_cycles(call: Callable[[], object]) -> float:
    """Cycles of `_sleep` that take as long as the call does on the GPU."""
    def milliseconds(run: Callable[[], object], repeats: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            run()
        torch.cuda._sleep(2_000_000)
        start.record()
        for _ in range(repeats):
            run()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / repeats

    return milliseconds(call, 20) / milliseconds(lambda: torch.cuda._sleep(1_000_000), 3) * 1_000_000


def install(fault: str) -> None:
    """Raises ValueError for a fault that is not known."""
    name, _, number = fault.partition(":")
    if name == "barrier":
        remove_barrier(int(number))
    elif name == "shared":
        ask_for_too_much()
    else:
        raise ValueError(f"unknown fault {fault!r}; known: barrier:N, shared")
