"""Every tensor of a call at the very end, or start, of mapped memory: what reads or writes past it faults.

    python3 tests/gpu/edges.py [--overrun]

Memory comes from the driver's virtual memory calls, a mapping with unmapped pages on both sides for each tensor. A
fault ends the process's use of the GPU, so tests/gpu/test_gpu_faults.py runs this file in one of its own. --overrun
plants a tensor that is longer than its mapping: then this file must fail.
"""
import argparse
import ctypes
import math
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "methods" / "main")]

import fuzzing  # noqa: E402
import glconv  # noqa: E402
from glconv.fused import launch  # noqa: E402

# batch, streams, heads, length: rows that fill their tiles and rows that do not, odd counts, one and several tiles.
SHAPES = ((3, 1, 5, 2048), (1, 1, 1, 7), (3, 1, 3, 250), (2, 2, 3, 1023), (5, 1, 1, 1024), (2, 1, 3, 2049),
          (3, 1, 1, 4096), (1, 1, 2, 4001), (2, 1, 1, 8192))


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))       # 1: a device


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", Location), ("win32", ctypes.c_void_p),
                ("flags", ctypes.c_ubyte * 8))


class Access(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))    # 3: read and write


def call(name: str, *arguments: object) -> None:
    """A function of the CUDA driver; plain integers go as 64 bits (addresses, sizes, handles, flags)."""
    values = (ctypes.c_uint64(value) if isinstance(value, int) else value for value in arguments)
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*values)
    if status:
        raise RuntimeError(f"{name} failed with {status}")


class Mapping:
    """`size` bytes or more of device memory, alone in a reserved range three times as long."""

    def __init__(self, size: int, device: int) -> None:
        location = Location(1, device)
        properties = Properties(type=1, location=location)      # 1: pinned
        step, start, handle = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
        call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(properties), 0)
        self.size = -(-size // step.value) * step.value
        call("cuMemAddressReserve", ctypes.byref(start), 3 * self.size, 0, 0, 0)
        call("cuMemCreate", ctypes.byref(handle), self.size, ctypes.byref(properties), 0)
        self.start = start.value + self.size
        call("cuMemMap", self.start, self.size, 0, handle, 0)
        call("cuMemSetAccess", self.start, self.size, ctypes.byref(Access(location, 3)), 1)


class Memory:
    """An address as torch.as_tensor reads it."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        kind = {torch.float16: "<f2", torch.float32: "<f4"}[dtype]
        self.__cuda_array_interface__ = {"shape": tuple(shape), "typestr": kind, "data": (address, False), "version": 3}


def at_edge(shape: tuple[int, ...], dtype: torch.dtype, end: bool, beyond: int = 0) -> torch.Tensor:
    """A new tensor that ends where its mapping ends, or starts where it starts; `beyond`: elements past the end."""
    size = math.prod(shape) * dtype.itemsize
    mapping = Mapping(size, torch.cuda.current_device())
    address = mapping.start + (mapping.size - size + beyond * dtype.itemsize if end else 0)
    return torch.as_tensor(Memory(address, shape, dtype), device="cuda")


def solve(shape: tuple[int, ...], kernel: str, end: bool) -> fuzzing.Finding:
    """One problem with all its tensors, the result too, at an edge."""
    problem = fuzzing.Draw(*shape, "normal", "sigmoid", "uniform", "decaying", 1.0, 1.0, seed=1)
    drawn = fuzzing.inputs(problem, "cuda")
    tensors = []
    for tensor in drawn:
        tensors.append(at_edge(tensor.shape, tensor.dtype, end))
        tensors[-1].copy_(tensor)
    allocate = launch.empty
    launch.empty = lambda sizes, strides, dtype: at_edge(sizes, dtype, end).fill_(math.nan)
    try:
        y = glconv.gated_causal_conv(*tensors, glconv.SolverConfig(kernel=kernel))
    finally:
        launch.empty = allocate
    torch.cuda.synchronize()
    return fuzzing.examine(y, drawn, fuzzing.fused(problem.length))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overrun", action="store_true")
    options = parser.parse_args()
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    if options.overrun:
        at_edge((1024,), torch.float16, True, beyond=512).sum().item()
        print("read past the end of a mapping without a fault")
        return 0
    wrong = count = 0
    for kernel in ("portable", "auto"):
        for shape in SHAPES:
            for end in (True, False):
                finding = solve(shape, kernel, end)
                count, wrong = count + 1, wrong + (not finding.right)
                if not finding.right:
                    print(f"WRONG {kernel} {shape} at the {'end' if end else 'start'}: {finding}")
    print(f"{count} calls at the edges of mapped memory, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
