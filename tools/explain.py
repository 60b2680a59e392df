"""python -m tools explain: the plan for a problem, what it moves and computes, and what time that should take."""
import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Annotated

import torch
from glconv.plan import CARDS, PROLOGUE, Device, Plan, device_of, flop, largest_input, make_plan, traffic
from typer import Option

from .resources import parse_capability


@dataclass(frozen=True)
class Rates:
    """What a card does at best: data sheet figures."""

    bandwidth: float        # bytes a second
    tensor: float           # FP16 products with FP32 sums, FLOP a second
    clock: float            # Hz


RATES = {
    (8, 0): Rates(2.04e12, 312e12, 1.41e9),
    (8, 6): Rates(0.768e12, 155e12, 1.80e9),
    (8, 9): Rates(0.864e12, 181e12, 2.52e9),
    (9, 0): Rates(4.8e12, 989e12, 1.75e9),
    (10, 0): Rates(8.0e12, 2250e12, 1.85e9),
    (12, 0): Rates(1.79e12, 500e12, 2.40e9),
}
COPY = 0.875            # of the data sheet's bandwidth that a copy reaches: 4.2 of 4.8 TB/s measured on an H200
EAGER = 20.0            # eager's time in units of the copy roofline, lengths from 256 to 16384, measured on an H200
LAUNCH = 3e-6           # seconds of a kernel's start and end
# Cycles of a multiprocessor for a position of a tile besides its tensor-core products, from times of 64 x 768 sequences
# of 2048 on an H200: the portable kernel as code for sm_86 0.359 ms, for sm_90 0.290; the Hopper kernel 0.222.
OTHER_CYCLES = {"mma": 0.31, "wgmma": 0.26, "hopper": 0.02}


def estimate(plan: Plan, device: Device, batch: int, channels: int, length: int) -> dict[str, float]:
    """Bytes, FLOP, the floors they set and the time expected, in SI units; for a spectral plan, bytes and their floor.

    Loads, tensor cores and the other instructions overlap between the few blocks of a multiprocessor, but not wholly:
    the time expected is the root of the sum of squares of memory's time and of the instructions', which is right to
    about a tenth for the kernels that were measured.
    """
    rates = RATES[device.capability]
    moved = traffic(batch, channels, length)
    roofline = moved / (COPY * rates.bandwidth)
    if plan.path == "spectral":
        return {"bytes": moved, "roofline_s": roofline}
    arithmetic = flop(plan, batch, channels)
    products = arithmetic / rates.tensor
    total = batch * channels
    slots = plan.resident * device.multiprocessors
    code = "hopper" if plan.path == "hopper" else "wgmma" if device.capability[0] == 9 and plan.warps >= 4 else "mma"
    other = OTHER_CYCLES[code] * plan.blocks * plan.n1 * plan.n2 * total / (device.multiprocessors * rates.clock)
    # The longest share against an even one: whole sequences, waves, a prologue for every channel that is touched.
    share = -(-total // plan.programs)
    prologues = PROLOGUE[plan.path] * (1 if plan.programs % channels == 0 else 1 + -(-(share - 1) // batch))
    balance = -(-plan.programs // slots) * (share + prologues) * slots / total
    expected = math.hypot(roofline, products + other) * balance + LAUNCH
    return {"bytes": moved, "roofline_s": roofline, "flop": arithmetic, "products_s": products, "other_s": other,
            "balance": balance, "expected_s": expected, "share": roofline / expected,
            "speedup": EAGER * roofline / expected}


def describe(plan: Plan, device: Device, batch: int, channels: int, length: int) -> str:
    """The plan and its estimate as text."""
    numbers, rates = estimate(plan, device, batch, channels, length), RATES[device.capability]
    major, minor = device.capability
    copy = f"{COPY * rates.bandwidth / 1e9:.0f} GB/s, what a copy reaches"
    lines = [f"{batch} x {channels} sequences of {length} on {device.name} (capability {major}.{minor}, "
             f"{device.multiprocessors} multiprocessors)", "",
             f"path          {plan.path}", f"why           {plan.reason}",
             f"memory        {numbers['bytes'] / 1e6:.2f} MB: three reads and a write of FP16 a position, the FP32 "
             f"kernel once; {numbers['roofline_s'] * 1e3:.4f} ms at {copy}"]
    if plan.path == "spectral":
        return "\n".join([*lines, "", "FFTs through memory move several times as much; no time is predicted."])
    positions = plan.blocks * plan.n1 * plan.n2
    sequences = -(-batch * channels // plan.programs)
    return "\n".join([
        *lines,
        f"tiles         {plan.blocks} of {plan.n1} x {plan.n2} a sequence"
        + (f", {positions - length} positions masked" if positions > length else ""),
        f"block         {plan.warps} warps, {plan.stages} stages of loads, at most {plan.registers} registers a thread "
        f"and {plan.shared} bytes of shared memory of the {device.shared_limit} that the card gives",
        f"grid          {plan.programs} programs of at most {sequences} sequences, {plan.resident} at a time on a "
        f"multiprocessor; the longest share is {numbers['balance']:.2f} times an even one",
        f"arithmetic    {numbers['flop'] / 1e9:.1f} GFLOP on the tensor cores, {numbers['products_s'] * 1e3:.4f} ms at "
        f"{rates.tensor / 1e12:.0f} TFLOP/s; other instructions {numbers['other_s'] * 1e3:.4f} ms",
        f"range         nothing overflows while |x*in_gate| <= {math.floor(largest_input(plan))}, whatever the pattern",
        f"expected      {numbers['expected_s'] * 1e3:.4f} ms: {numbers['share']:.0%} of the copy roofline, "
        f"{numbers['speedup']:.1f} times eager",
        "",
        f"Assumed: memory reaches {copy}; memory and instructions overlap in part (root of the sum of squares); "
        "instructions other than products take the cycles that they take on an H200; eager takes "
        f"{EAGER:.0f} times the copy roofline, as on an H200. Not measured on {device.name}"
        + (" by this command." if major == 9 else ".")])


def command(
    batch: Annotated[int, Option(min=1)],
    streams: Annotated[int, Option(min=1)],
    heads: Annotated[int, Option(min=1)],
    length: Annotated[int, Option(min=1)],
    capability: Annotated[str | None, Option(help="Such as 8.6; by default that of the GPU here.")] = None,
    kernel: Annotated[str, Option(help="auto, portable or hopper.")] = "auto",
    as_json: Annotated[bool, Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """The plan for a problem, with its reasons; what it moves and computes; the time that should take."""
    if capability:
        device = parse_capability(capability)
    elif torch.cuda.is_available():
        device = device_of(torch.device("cuda", torch.cuda.current_device()))
    else:
        device = CARDS[9, 0]
    plan = make_plan(batch, streams * heads, length, device, kernel)
    if as_json:
        print(json.dumps({"device": dataclasses.asdict(device), "plan": dataclasses.asdict(plan),
                          "estimate": estimate(plan, device, batch, streams * heads, length)}, indent=1))
    else:
        print(describe(plan, device, batch, streams * heads, length))
