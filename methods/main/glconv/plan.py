"""From a problem and a device to the kernel that serves it: tables, a reason beside each entry, and one cost formula.

Pure Python: no GPU needed, nothing tried at run time, the same answer for the same arguments. The registers and the
shared memory in the tables are the largest that Triton 3.6, 3.7 and 3.9 take for any card that the row serves;
`python -m tools resources` compiles every row and compares.
"""
import functools
import math
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Device:
    """What a plan needs to know about a GPU."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_limit: int           # bytes a block may take (opt-in)
    shared_total: int           # bytes of a multiprocessor
    threads: int = 1536         # of a multiprocessor
    registers: int = 65536      # of a multiprocessor


# One card for every capability the kernels are compiled for: plans without a GPU at hand.
CARDS = {card.capability: card for card in (
    Device("A100", (8, 0), 108, 163 << 10, 164 << 10, threads=2048),
    Device("RTX A6000", (8, 6), 84, 99 << 10, 100 << 10),
    Device("L40S", (8, 9), 142, 99 << 10, 100 << 10),
    Device("H200", (9, 0), 132, 227 << 10, 228 << 10, threads=2048),
    Device("B200", (10, 0), 148, 227 << 10, 228 << 10, threads=2048),
    Device("RTX PRO 6000 Blackwell", (12, 0), 188, 99 << 10, 100 << 10),
)}


# Blocks that a multiprocessor holds at most; 16 where it is not known.
BLOCKS = {(8, 0): 32, (8, 9): 24, (9, 0): 32, (10, 0): 32, (12, 0): 24}


@functools.cache
def device_of(device: torch.device) -> Device:
    """The description of a CUDA device that is present."""
    properties = torch.cuda.get_device_properties(device)
    return Device(properties.name, (properties.major, properties.minor), properties.multi_processor_count,
                  properties.shared_memory_per_block_optin, properties.shared_memory_per_multiprocessor,
                  properties.max_threads_per_multi_processor, properties.regs_per_multiprocessor)


@dataclass(frozen=True)
class Row:
    """One way to run one fused kernel, for sequences of up to `size` = blocks*n1*n2 positions."""

    path: str                   # "portable" | "hopper"
    n1: int                     # rows of a tile: the first transform
    n2: int                     # columns of a tile: the second
    blocks: int                 # tiles of a sequence, one after the other in time
    warps: int
    registers: int              # a thread: the limit given to the assembler, in eights but for 255
    shared: int                 # bytes a block, at most
    reason: str
    stages: int = 2             # of the pipelined loads; 1: loads that are waited for
    unroll: bool = False        # the blocks of a sequence written out one after the other, not looped over
    stack: int = 0              # bytes a thread that may be spilled
    loop_spills: int = 0        # accesses to them inside the loop over sequences, where that measured faster than none
    stacked: bool = False       # complex products as one product of matrices put together: free with wgmma, where it
                                # saves waits; with mma.sync it moves data through shared memory
    exact: bool = False         # only for sequences of exactly `size`
    tiles: int = 1              # that one step of the Hopper kernel takes: blocks of a sequence, or as many sequences
    least_batch: int = 1        # from which it is the faster of two rows for the same lengths

    @property
    def size(self) -> int:
        return self.blocks * self.n1 * self.n2

    def resident(self, device: Device) -> int:
        """Blocks of this row that a multiprocessor holds at once; zero: it does not fit the card."""
        if self.shared > device.shared_limit:
            return 0
        registers = -(-self.registers // 8) * 8     # given out in eights
        return min(device.registers // (registers * 32 * self.warps), device.shared_total // (self.shared + 1024),
                   device.threads // (32 * self.warps), BLOCKS.get(device.capability, 16))


# The arithmetic of a tile is 8*(n1 + 2*n2) FLOP a position: 64x32 takes 1024, 64x16 and 32x32 take 768, 32x16 512.
# Triton gives a warp whole rows of a chained product, 16 at a time: a tile takes n1/16 warps, more would repeat work.
# A tile has at most 2048 positions: 1024 all over has a spectrum of 1024*sqrt(n1*n2) in one bin, FP16 ends at 65504.
SHORT = (
    Row("portable", 16, 16, 1, 1, 144, 4096, "one warp a sequence: no barrier waits; 14 a multiprocessor"),
    Row("portable", 32, 16, 1, 1, 208, 9216, "one warp a sequence: no barrier waits; nine a multiprocessor"),
    Row("portable", 32, 32, 1, 2, 200, 18432, "two warps a sequence, ten a multiprocessor"),
)
MMA_SYNC = (    # sm_80, 86, 89, 120
    *SHORT,
    Row("portable", 64, 32, 1, 4, 255, 40960, "two blocks a multiprocessor; a third stage would leave one"),
    Row("portable", 64, 16, 3, 4, 255, 27648, "tiles of 1024 positions: three, and nothing spills"),
    Row("portable", 64, 32, 2, 4, 255, 40960, "one tile's loads at a time: 40 KiB, so two blocks a multiprocessor"),
    Row("portable", 64, 16, 6, 4, 255, 27648, "the state of six tiles of 1024 fits the registers"),
    Row("portable", 64, 16, 8, 4, 255, 27648, "eight tiles of 1024 fit the registers, four of 2048 do not"),
    Row("portable", 128, 16, 6, 8, 255, 87040, "eight warps: eight positions of a tile a thread"),
    Row("portable", 128, 16, 8, 8, 255, 87040, "eight warps: eight positions of a tile a thread", stack=64),
)
WGMMA = (       # sm_90: measured on an H200 with Triton 3.6, times eager at batch 64 unless said otherwise
    Row("portable", 16, 16, 1, 1, 128, 5632, "16 warps a multiprocessor, three stages: 14.2, two stages 12.0, 19 warps "
        "of 104 registers 11.2", stages=3, stack=40),
    Row("portable", 32, 16, 1, 1, 168, 11776, "12 warps a multiprocessor, three stages: 15.0, two stages 12.5, 16 "
        "warps of 128 registers 10.5", stages=3, stack=72),
    Row("portable", 32, 32, 1, 2, 160, 24576, "six blocks a multiprocessor, three stages: 12.8, two stages 11.4, eight "
        "blocks of 128 registers 11.3", stages=3, stack=64),
    Row("portable", 64, 32, 1, 4, 128, 57344, "four blocks a multiprocessor, three stages: 12.3, three blocks of 168 "
        "registers 11.7, two stages 11.2", stages=3, stack=240, loop_spills=16, stacked=True, least_batch=32),
    Row("portable", 64, 32, 1, 4, 168, 53248, "small batches wait for their spectra and spills: three blocks 10.4 at "
        "batch 16, 7.9 at 4, 5.1 at 1; the row above 9.6, 6.7, 4.4", stages=3, stack=88),
    Row("portable", 64, 32, 2, 4, 255, 57344, "a tile at a time, three stages: 9.5 at batch 16, both tiles written out "
        "8.6", stages=3, stack=40, stacked=True),
    Row("portable", 64, 16, 6, 4, 255, 28672, "the state of six tiles of 1024 fits the registers", stacked=True),
    Row("portable", 64, 32, 4, 4, 255, 45056, "four tiles of 2048: 7.3 at batch 8 for all that it spills, eight of "
        "1024 5.1", stack=136, loop_spills=16, stacked=True),
    Row("portable", 128, 16, 6, 8, 255, 75776, "eight warps; pipelined loads would spill", stages=1, stacked=True),
    Row("portable", 128, 16, 8, 8, 255, 75776, "eight warps, 3.5 at batch 4; pipelined loads would spill", stages=1,
        stacked=True),
)
# sm_100: products of four warps and more go through tensor memory, whose address takes 8 bytes of shared memory.
TCGEN05 = (*SHORT, *(replace(row, shared=row.shared + 8, stack=104 if row.warps == 8 else 0)
                     for row in MMA_SYNC if row.warps >= 4))

HOPPER = (      # sm_90, measured on an H200
    Row("hopper", 64, 32, 1, 4, 168, 73800, "two sequences a step, three programs a multiprocessor; one sequence a "
        "step and four programs take 6 % longer", exact=True, tiles=2),
    Row("hopper", 64, 32, 1, 4, 168, 57416, "a batch of one: k's spectrum beside u's in the same stages, 15.2 us where "
        "one after the other took 15.9", exact=True, stack=32),
    Row("hopper", 64, 32, 2, 4, 168, 73800, "both blocks of a sequence a step: 1.4 times as fast as the portable one",
        exact=True, tiles=2, stack=88, loop_spills=17),
)


def table(capability: tuple[int, int]) -> tuple[Row, ...]:
    """Every row that may serve a capability, in order of preference among equals."""
    if capability < (8, 0):
        return ()
    return {9: (*HOPPER, *WGMMA), 10: TCGEN05, 11: TCGEN05}.get(capability[0], MMA_SYNC)


@dataclass(frozen=True)
class Plan:
    """How one problem is run. A path that is no fused kernel has a reason and nothing else."""

    path: str                   # "portable" | "hopper" | "spectral"
    reason: str
    n1: int = 0
    n2: int = 0
    blocks: int = 0
    warps: int = 0
    stages: int = 0
    unroll: bool = False
    registers: int = 0          # a thread, the assembler's limit
    shared: int = 0             # bytes a block, at most
    resident: int = 0           # blocks a multiprocessor
    programs: int = 0           # the grid; each takes an equal, contiguous share of the channel-major list of sequences
    stacked: bool = False       # complex products as one product
    packed: bool = True         # pointwise products as inline PTX; the interpreter runs the plain formula
    tiles: int = 1              # of one step of the Hopper kernel


# What making a channel's spectrum costs a program, in steps: nothing overlaps with it. Measured: 1.7 us where a step of
# the Hopper kernel takes 3.3, that of the portable one as long as two sequences.
PROLOGUE = {"portable": 2.0, "hopper": 0.5}


def choose_programs(steps: int, channels: int, slots: int, prologue: float) -> int:
    """The grid for `slots` programs at a time, `steps` for every channel.

    Equal parts of channels, equal numbers of whole channels, or shares that cross channels. The cost of a choice is its
    number of waves times the longest share in steps, with `prologue` for every channel that a share may touch.
    """
    total = steps * channels
    choices = []
    for parts in range(1, min(steps, 64) + 1):
        waves = -(-channels * parts // slots)
        choices.append((waves * (-(-steps // parts) + prologue), channels * parts))
    for whole in range(2, min(channels, 64) + 1):
        if channels % whole == 0:
            waves = -(-(channels // whole) // slots)
            choices.append((waves * whole * (steps + prologue), channels // whole))
    for waves in range(1, 5):
        programs = waves * slots
        if programs < total:
            share = -(-total // programs)
            choices.append((waves * (share + prologue * (1 + -(-(share - 1) // steps))), programs))
    return min(choices)[1]


def runs(row: Row, batch: int, channels: int, length: int, device: Device) -> bool:
    """Whether a row can serve a problem on a device."""
    if batch < row.least_batch or not row.resident(device) or row.size < length or (row.exact and row.size != length):
        return False
    # The Hopper kernel counts rows of a tile in 32 bits, from a base that may lie 64 GiB below the tensor.
    addressed = channels * length < 2 ** 31 and batch * channels * length < 2 ** 35
    return row.path != "hopper" or (row.tiles <= batch * row.blocks and addressed)


def make_plan(batch: int, channels: int, length: int, device: Device, kernel: str = "auto") -> Plan:
    """The plan for `batch` x `channels` sequences of `length` on a device.

    Args:
        kernel: "auto", or the fused kernel to use: "portable" or "hopper".

    Raises:
        ValueError: a size that is not positive, a kernel that is not known, or one that was asked for and cannot run.
    """
    for name, value in (("batch", batch), ("channels", channels), ("length", length)):
        if value < 1:
            raise ValueError(f"{name} is {value}; want at least 1")
    if kernel not in ("auto", "portable", "hopper"):
        raise ValueError(f"kernel is {kernel!r}; want 'auto', 'portable' or 'hopper'")
    rows = [row for row in table(device.capability) if kernel in ("auto", row.path)]
    able = [row for row in rows if runs(row, batch, channels, length, device)]
    if able:
        # Of the shortest that are long enough, the first in the table.
        row = min(able, key=lambda candidate: candidate.size)
        resident = row.resident(device)
        steps = -(-batch * row.blocks // row.tiles) if row.path == "hopper" else batch
        programs = choose_programs(steps, channels, resident * device.multiprocessors, PROLOGUE[row.path])
        return Plan(row.path, row.reason, row.n1, row.n2, row.blocks, row.warps, row.stages, row.unroll, row.registers,
                    row.shared, resident, programs, row.stacked, tiles=row.tiles)
    major, minor = device.capability
    name = "fused kernel" if kernel == "auto" else f"{kernel} kernel"
    if not rows:
        reason = f"no {name} for capability {major}.{minor}"
    elif longest := max((row.size for row in rows if row.resident(device)), default=0):
        reason = f"the {name} on {device.name} takes lengths up to {longest}, not {length}"
    else:
        reason = f"{device.name} gives a block {device.shared_limit} bytes of shared memory, too few"
    if kernel != "auto":
        raise ValueError(f"kernel: {kernel} cannot run: {reason}")
    return Plan("spectral", reason)


def flop(plan: Plan, batch: int, channels: int) -> float:
    """Tensor-core operations of a fused plan; a channel's kernel takes three quarters of a sequence's."""
    tile = 8 * plan.n1 * plan.n2 * (plan.n1 + 2 * plan.n2)
    return plan.blocks * tile * channels * (batch + 0.75)


def traffic(batch: int, channels: int, length: int) -> int:
    """Bytes that any kernel must move: three FP16 reads and one write a position, and the FP32 kernel once."""
    return channels * length * (8 * batch + 4)


def largest_input(plan: Plan) -> float:
    """The |x*in_gate| up to which nothing overflows on the way, whatever the pattern."""
    return 65504 / math.sqrt(plan.n1 * plan.n2)
