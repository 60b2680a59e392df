"""The families of judged cases, and the inputs each one draws. Plain data until `make_inputs` is called."""
import fnmatch
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Data = dict[str, Any]   # what goes from process to process, and into reports: JSON as it is
CHANNELS = 768          # of every visible and sealed case on a GPU
SMALL_CHANNELS = 192     # of every case by default on a CPU
LENGTH = 2048
BATCHES = (1, 4, 16, 64)
SMALL_BATCHES = (1, 2, 5, 8)
# (streams, how gates are drawn, how k is drawn, scale of k): every visible batch size is run with each of these.
VISIBLE = ((1, "uniform", "decaying", 1.0), (4, "sigmoid", "white", 1.0), (12, "normal", "decaying", 0.1))
SEALED_GATES = ("uniform", "sigmoid", "normal", "tanh", "sparse", "heavy-tailed", "constant")
KERNELS = ("decaying", "white")
LENGTHS = (256, 16384)   # of sealed cases with other lengths, both ends included


@dataclass(frozen=True)
class Case:
    """One judged problem. Inputs are drawn from `seed` and the number of the call, so no two calls share any."""

    batch: int
    streams: int
    heads: int
    length: int
    gates: str      # how both gates are drawn: a key of GATES
    kernel: str     # how k is drawn: decaying | white
    scale: float    # k's norm a channel is about this
    seed: int

    @property
    def name(self) -> str:
        return (f"b{self.batch}-s{self.streams}x{self.heads}-l{self.length}-{self.gates}-{self.kernel}"
                f"-{self.scale:g}")

    @property
    def moved_bytes(self) -> int:
        """The floor of memory traffic: x, both gates and y once in FP16, k once in FP32."""
        rows = self.streams * self.heads * self.length
        return 8 * self.batch * rows + 4 * rows


def visible(small: bool = False) -> list[Case]:
    """Four batch sizes by three factorisations of the channels, each with its gates, kernel and scale, at L = 2048."""
    batches, channels = (SMALL_BATCHES, SMALL_CHANNELS) if small else (BATCHES, CHANNELS)
    return [Case(batch, streams, channels // streams, LENGTH, gates, kernel, scale, seed=1000 * batch + number)
            for batch in batches for number, (streams, gates, kernel, scale) in enumerate(VISIBLE)]


def sealed(seed: int, count: int, small: bool = False, lengths: bool = False) -> list[Case]:
    """`count` cases of the same family drawn from `seed`: factorisations that are not visible ones, other gate
    distributions, scales and input seeds; with `lengths` also other lengths, at a batch that keeps the size alike."""
    draw = random.Random(seed)
    batches, channels = (SMALL_BATCHES, SMALL_CHANNELS) if small else (BATCHES, CHANNELS)
    seen = {streams for streams, *_ in VISIBLE}
    factors = [streams for streams in range(1, channels + 1) if channels % streams == 0 and streams not in seen]
    cases = []
    for _ in range(count):
        batch, length = draw.choice(batches), LENGTH
        if lengths:
            # Even on a logarithmic scale; every second one is a power of two.
            length = round(2 ** draw.uniform(*map(math.log2, LENGTHS)))
            length = 2 ** round(math.log2(length)) if draw.random() < 0.5 else length
            batch = max(1, min(batches[-1], batch * LENGTH // length))
        streams = draw.choice(factors)
        cases.append(Case(batch, streams, channels // streams, length, draw.choice(SEALED_GATES), draw.choice(KERNELS),
                          scale=float(f"{10 ** draw.uniform(-2, 0.5):.3g}"), seed=draw.randrange(1 << 30)))
    return cases


def select(cases: Sequence[Case], patterns: str) -> list[Case]:
    """The cases whose names match one of the comma-separated patterns, which are shell-style, whole or a part of the
    name. Raises ValueError where a pattern matches none."""
    chosen = []
    for pattern in filter(None, (text.strip() for text in patterns.split(","))):
        matching = [case for case in cases if fnmatch.fnmatch(case.name, f"*{pattern}*")]
        if not matching:
            raise ValueError(f"no case matches {pattern!r}; known: {', '.join(case.name for case in cases)}")
        chosen += matching
    return [case for case in cases if case in chosen]


def make_inputs(case: Case, call: int, device: "torch.device") -> "tuple[torch.Tensor, ...]":
    """x, in_gate, out_gate, FP16 [batch, streams, heads, length], and k, FP32 [streams, heads, length], drawn on the
    device for call number `call` of this case."""
    import torch

    generator = torch.Generator(device).manual_seed(case.seed * 1_000_003 + call)
    channel_shape = (case.streams, case.heads, case.length)
    shape = (case.batch, *channel_shape)

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def uniform(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    gate: Callable[[], torch.Tensor] = {
        "uniform": lambda: uniform(shape),
        "sigmoid": lambda: normal(shape).sigmoid_(),
        "normal": lambda: normal(shape),
        "tanh": lambda: normal(shape).tanh_(),
        "sparse": lambda: normal(shape).mul_(uniform(shape) < 0.1),
        # Student's t with two degrees of freedom by its inverse distribution, cut at 30.
        "heavy-tailed": lambda: (p := uniform(shape).mul_(2).sub_(1)).mul_((2 / (1 - p * p)).sqrt_()).clamp_(-30, 30),
        "constant": lambda: uniform((case.batch, case.streams, case.heads, 1)).expand(shape),
    }[case.gates]
    x, in_gate, out_gate = (draw().half().contiguous() for draw in (lambda: normal(shape), gate, gate))
    k = normal(channel_shape)
    if case.kernel == "decaying":
        # Each channel dies off within a twentieth of the length to all of it.
        rate = 1 + 19 * uniform((case.streams, case.heads, 1))
        k *= torch.exp(-rate * torch.linspace(0, 1, case.length, device=device))
    k *= case.scale / k.norm(dim=-1, keepdim=True)
    return x, in_gate, out_gate, k
