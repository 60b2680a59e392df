"""The code of an sm_86 card on a Hopper GPU: right, and how fast against the eager baseline in the same run.

    python tests/gpu/ampere_on_hopper.py [--batch 64] [--json]

The portable kernel is compiled for sm_86, its PTX assembled for sm_90 and launched through the CUDA driver, so the GPU
runs Ampere's instructions (mma.sync, cp.async) in place of its own. Exit status 1 when the result is wrong, when the
code spills, when two blocks do not fit a multiprocessor of an sm_86, or when the speed-up is below --least.
"""
import argparse
import ctypes
import dataclasses
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "methods" / "main")]

from glconv import dft, reference  # noqa: E402
from glconv.plan import CARDS, PROLOGUE, Plan, Row, choose_programs, device_of, make_plan  # noqa: E402

from tools.resources import BINARIES, MachineCode, compile_portable, machine_code  # noqa: E402
from tools.timing import time_cuda  # noqa: E402
from tools.worker import frozen_eager  # noqa: E402

MAX_DYNAMIC_SHARED = 8      # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PARAMETERS = {"u64": ctypes.c_uint64, "b64": ctypes.c_uint64, "u32": ctypes.c_int32, "b32": ctypes.c_int32,
              "s32": ctypes.c_int32, "f32": ctypes.c_float}


class Kernel:
    """A kernel loaded from machine code through the CUDA driver."""

    def __init__(self, cubin: bytes, ptx: str, name: str, shared: int, threads: int) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        torch.cuda.current_stream()     # a context, made by torch
        self.call("cuModuleLoadData", ctypes.byref(self.module), cubin)
        self.call("cuModuleGetFunction", ctypes.byref(self.function), self.module, name.encode())
        self.call("cuFuncSetAttribute", self.function, MAX_DYNAMIC_SHARED, shared)
        head = ptx[ptx.index(".entry"):]
        head = head[:head.index(")")]
        self.types = [PARAMETERS[kind] for kind in re.findall(r"\.param\s+\.(\w+)", head)]
        self.shared, self.threads = shared, threads

    def call(self, function: str, *arguments: object) -> None:
        status = getattr(self.driver, function)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{function}: {text.value.decode() if text.value else status}")

    def launch(self, programs: int, arguments: list[int | float]) -> None:
        """`arguments` in the kernel's order; those the compiler added at the end are null pointers."""
        arguments = arguments + [0] * (len(self.types) - len(arguments))
        values = [kind(value) for kind, value in zip(self.types, arguments, strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.call("cuLaunchKernel", self.function, programs, 1, 1, self.threads, 1, 1, self.shared, stream, pointers,
                  None)


def build(plan: Plan, length: int) -> tuple[Kernel, MachineCode, int]:
    """(the kernel, what an sm_86 would run, bytes of shared memory)."""
    compiled = compile_portable(plan, 86, length == plan.blocks * plan.n1 * plan.n2, math.gcd(length, 16))
    ptx, shared = compiled.asm["ptx"], compiled.metadata.shared
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        subprocess.run([BINARIES / "ptxas", "-arch=sm_90", source, "-o", cubin], check=True)
        kernel = Kernel(cubin.read_bytes(), ptx, compiled.metadata.name, shared, 32 * plan.warps)
    return kernel, machine_code(compiled.asm["cubin"]), shared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--channels", type=int, default=768)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--least", type=float, default=0.0, help="smallest speed-up over eager, GPU time")
    parser.add_argument("--tile", help="another plan than the table's: n1xn2xblocks, for instance 64x16x2")
    parser.add_argument("--warps", type=int)
    parser.add_argument("--stages", type=int)
    parser.add_argument("--unroll", action="store_true")
    parser.add_argument("--registers", type=int)
    parser.add_argument("--programs", type=int, help="the grid; by default what the plan's formula gives for this GPU")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    device = torch.device("cuda", torch.cuda.current_device())
    here, card = device_of(device), CARDS[8, 6]
    if here.capability[0] != 9:
        parser.error(f"{here.name} has capability {here.capability}; want 9.x")
    batch, channels, length = options.batch, options.channels, options.length
    plan = make_plan(batch, channels, length, card, "portable")
    changes = {name: getattr(options, name) for name in ("warps", "stages", "registers") if getattr(options, name)}
    if options.tile:
        n1, n2, blocks = map(int, options.tile.split("x"))
        changes |= {"n1": n1, "n2": n2, "blocks": blocks, "unroll": options.unroll, "warps": options.warps or n1 // 16}
    plan = dataclasses.replace(plan, **changes)
    kernel, code, shared = build(plan, length)
    measured = Row(plan.path, plan.n1, plan.n2, plan.blocks, plan.warps, code.registers, shared, plan.reason)
    slots = measured.resident(here) * here.multiprocessors
    programs = options.programs or choose_programs(batch, channels, slots, PROLOGUE["portable"])
    two_fit = measured.resident(card) >= 2

    torch.manual_seed(0)
    x, in_gate, out_gate = (torch.randn(batch, 4, channels // 4, length, device=device).half() for _ in range(3))
    in_gate = in_gate.sigmoid()
    decay = 0.1 * torch.exp(-torch.arange(length, device=device) / 200)
    k = torch.randn(4, channels // 4, length, device=device) * decay
    y = torch.full_like(x, float("nan"))
    align = math.gcd(length, 16)
    tensors = (x, in_gate, out_gate, k, y, *dft.factors(plan.n1, plan.n2, device))
    arguments = [*(tensor.data_ptr() for tensor in tensors), batch, channels, length // align,
                 dft.gain(plan.n1, plan.n2)]

    eager = frozen_eager()
    kernel.launch(programs, arguments)
    worst = 0.0
    for b in range(0, batch, 8):    # in parts: float64 takes eight times the space
        exact = reference.oracle(*(tensor[b:b + 8] for tensor in (x, in_gate, out_gate)), k)
        worst = max(worst, ((y[b:b + 8].double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max().item())
    times = time_cuda({"eager": lambda: eager(x, in_gate, out_gate, k),
                       "ampere": lambda: kernel.launch(programs, arguments)}, options.repeats, device)
    speedup = times["eager"].gpu / times["ampere"].gpu
    result = {"batch": batch, "channels": channels, "length": length, "tile": f"{plan.n1}x{plan.n2}x{plan.blocks}",
              "warps": plan.warps, "stages": plan.stages, "unroll": plan.unroll, "programs": programs,
              "sm_86": {"registers": code.registers, "stack": code.stack, "shared": shared, "loop": code.loop,
                        "two_blocks": two_fit, **code.counts},
              "worst_row_l2": worst, "eager_ms": times["eager"].gpu, "ms": times["ampere"].gpu,
              "spread": times["ampere"].spread, "speedup": speedup}
    print(json.dumps(result) if options.json else "\n".join(f"{name:14}{value}" for name, value in result.items()))
    return int(not worst <= 1e-3 or code.stack > 0 or not two_fit or speedup < options.least)


if __name__ == "__main__":
    sys.exit(main())
