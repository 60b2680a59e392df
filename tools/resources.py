"""python -m tools resources: what the fused kernels take of a card, compiled for it with no GPU at hand."""
import dataclasses
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import triton
from glconv.fused import portable
from glconv.plan import CARDS, Device, Plan, Row, table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from typer import BadParameter, Exit, Option

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Instructions of the machine code that tell how a kernel works: tensor-core products of each generation, products in
# packed half precision, asynchronous copies, and spills (local memory).
COUNTED = {"HMMA": "mma", "HGMMA": "wgmma", "UTCHMMA": "tcgen05", "HFMA2": "hfma2", "LDGSTS": "cp.async",
           "UBLKCP": "bulk copy", "STL": "spill stores", "LDL": "spill loads"}
TENSOR = ("HMMA", "HGMMA", "UTCHMMA")


@dataclasses.dataclass(frozen=True)
class Resources:
    """One compiled variant."""

    capability: str
    card: str
    path: str
    tile: str               # n1 x n2 x blocks
    variant: str            # "full" length or "masked"
    warps: int
    stages: int
    registers: int          # a thread
    stack: int              # bytes a thread: what was spilled, outside of loops where there are no problems
    shared: int             # bytes a block
    shared_limit: int
    resident: int           # blocks a multiprocessor, by these figures
    instructions: int
    loop: int               # instructions of the main loop
    counts: dict[str, int]
    problems: list[str]


def compile_portable(row: Row | Plan, capability: int, full: bool = True, align: int = 16) -> Any:
    """The portable kernel as the launcher would have it compiled, for another card.

    Args:
        capability: 86 for sm_86.
        full: lengths of exactly blocks*n1*n2; else any other, a multiple of `align`.
    """
    constants = portable.constants(row, full, align)
    names = portable.right_angle_kernel.arg_names
    types = {"k_p": "*fp32", "gain": "fp32", "batch": "i32", "channels": "i32", "units": "i32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp16") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name.endswith("_p")}
    values = {(names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": row.warps, "maxnreg": row.registers}
    return triton.compile(ASTSource(portable.right_angle_kernel, signature, values, aligned),
                          target=GPUTarget("cuda", capability, 32), options=options)


@dataclasses.dataclass(frozen=True)
class MachineCode:
    """What a compiled kernel's machine code shows."""

    registers: int          # a thread
    stack: int              # bytes a thread
    instructions: int
    loop: int               # instructions of the longest innermost loop with tensor-core products
    counts: dict[str, int]  # instructions of each kind in COUNTED
    loop_spills: int        # accesses to local memory in such loops


def dump(cubin: bytes, option: str) -> str:
    """What cuobjdump says of machine code: --dump-sass, --dump-resource-usage, ..."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([BINARIES / "cuobjdump", option, file.name], capture_output=True, text=True,
                              check=True).stdout


def machine_code(cubin: bytes) -> MachineCode:
    usage, code = dump(cubin, "--dump-resource-usage"), dump(cubin, "--dump-sass")
    taken = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert taken is not None
    registers, stack = map(int, taken.groups())
    found = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+\s+)?(\w+)([^;]*);", code)
    operations = [(int(address, 16), operation, rest) for address, operation, rest in found]
    # A loop: from the target of a branch backwards to the branch. Only those with none inside.
    jumps = [(int(target, 16), address) for address, operation, rest in operations if operation == "BRA"
             for target in re.findall(r"0x([0-9a-f]+)", rest)[-1:]]
    loops = [(start, end) for start, end in jumps if start < end]
    innermost = [loop for loop in loops if not any(other != loop and loop[0] <= other[0] and other[1] <= loop[1]
                                                   for other in loops)]
    bodies = [[operation for address, operation, _ in operations if start <= address <= end]
              for start, end in innermost]
    bodies = [body for body in bodies if any(operation in TENSOR for operation in body)]
    names = [operation for _, operation, _ in operations]
    counts = {name: names.count(operation) for operation, name in COUNTED.items()}
    return MachineCode(registers, stack, len(names), max(map(len, bodies), default=0),
                       {name: count for name, count in counts.items() if count},
                       sum(body.count("LDL") + body.count("STL") for body in bodies))


def measure(row: Row, device: Device, full: bool, align: int = 16) -> Resources:
    """Compiles one row for one card and holds it against the card and against the table."""
    capability = 10 * device.capability[0] + device.capability[1]
    compiled = COMPILERS[row.path](row, capability, full, align)
    code, shared = machine_code(compiled.asm["cubin"]), compiled.metadata.shared
    resident = dataclasses.replace(row, registers=code.registers, shared=shared).resident(device)
    problems = []
    if shared > device.shared_limit:
        problems.append(f"{shared} bytes of shared memory, the card gives {device.shared_limit}")
    if code.stack > row.stack:
        problems.append(f"spills {code.stack} bytes a thread, the table allows {row.stack}")
    if code.loop_spills > row.loop_spills:
        problems.append(f"{code.loop_spills} accesses to spilled values in a loop")
    if resident < row.resident(device):
        problems.append(f"{resident} blocks a multiprocessor, the table says {row.resident(device)}")
    if code.registers > row.registers or shared > row.shared:
        problems.append(f"the table says at most {row.registers} registers and {row.shared} bytes")
    return Resources(f"{device.capability[0]}.{device.capability[1]}", device.name, row.path,
                     f"{row.n1}x{row.n2}x{row.blocks}", "full" if full else "masked", row.warps, row.stages,
                     code.registers, code.stack, shared, device.shared_limit, resident, code.instructions, code.loop,
                     code.counts, problems)


def compile_hopper(row: Row | Plan, capability: int, full: bool = True, align: int = 16) -> Any:
    """The Hopper kernel as the launcher would have it compiled. It takes full lengths only."""
    from glconv.fused import hopper
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language import NVMMASharedLayout, float16

    shape = [row.tiles, row.n1, row.n2]
    box = f"tensordesc<fp16{shape},{NVMMASharedLayout.get_default_for(shape, float16)!r}>"
    kernel, constants = hopper.kernel_of(row)
    names = kernel.arg_names
    pointers = {name: "*fp32" if name == "k_ptr" else "*fp16" for name in names if name.endswith("_ptr")}
    types = {**pointers, "window": box, "gain": "fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    values = {(names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": row.warps, "maxnreg": row.registers}
    return triton.compile(GluonASTSource(kernel, signature, values, aligned),
                          target=GPUTarget("cuda", capability, 32), options=options)


COMPILERS = {"portable": compile_portable, "hopper": compile_hopper}


def parse_capability(text: str) -> Device:
    """The known card of a capability given as 8.6, 86 or sm_86."""
    digits = re.sub(r"^sm_?|\.", "", text)
    known = {f"{major}{minor}": card for (major, minor), card in CARDS.items()}
    if digits not in known:
        raise BadParameter(f"capability {text!r}; known: {', '.join(f'{a}.{b}' for a, b in CARDS)}")
    return known[digits]


def report(cards: list[Device], rows: str | None = None) -> list[Resources]:
    """Every row of the tables, at its own length and masked, for each card. `rows`: part of "path n1xn2xblocks"."""
    results = []
    for card in cards:
        for row in table(card.capability):
            if rows and rows not in f"{row.path} {row.n1}x{row.n2}x{row.blocks}":
                continue
            results += [measure(row, card, full) for full in ((True,) if row.exact else (True, False))]
    return results


def command(
    capability: Annotated[list[str] | None, Option(help="Such as 8.6; may be repeated. Default: all.")] = None,
    rows: Annotated[str | None, Option(help="Only rows with this in 'path n1xn2xblocks', such as '64x32x1'.")] = None,
    as_json: Annotated[bool, Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Registers, spills, shared memory and tensor-core instructions of every plan, compiled for GPUs that are not here.

    Exit status 1 when a plan spills, exceeds the card's shared memory or the figures in the plan tables.
    """
    cards = [parse_capability(text) for text in capability] if capability else list(CARDS.values())
    results = report(cards, rows)
    if not results:
        raise BadParameter(f"no row matches {rows!r}")
    failures = sum(bool(result.problems) for result in results)
    if as_json:
        print(json.dumps({"triton": triton.__version__, "failures": failures,
                          "plans": [dataclasses.asdict(result) for result in results]}, indent=1))
    else:
        show(results)
    raise Exit(int(failures > 0))


def show(results: list[Resources]) -> None:
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=f"Triton {triton.__version__}", title_justify="left", box=None, header_style="bold")
    for heading in ("card", "path", "tile", "length", "warps", "stages", "registers", "stack", "shared", "of limit",
                    "blocks", "instructions", "in loop", "of which", "problems"):
        words = heading in ("card", "path", "tile", "of which", "problems")
        grid.add_column(heading, justify="left" if words else "right")
    for result in results:
        grid.add_row(f"{result.capability} {result.card}", result.path, result.tile, result.variant, str(result.warps),
                     str(result.stages), str(result.registers), str(result.stack), str(result.shared),
                     f"{result.shared / result.shared_limit:.0%}", str(result.resident), str(result.instructions),
                     str(result.loop),
                     " ".join(f"{count} {name}" for name, count in result.counts.items()), "; ".join(result.problems),
                     style="red" if result.problems else None)
    Console(width=None if os.isatty(1) else 240).print(grid)
