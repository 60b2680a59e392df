"""Problems nobody thought of, and how large an error each may have: shared by the CPU tests and the long device run.

A `Draw` is one problem in a line of text; `inputs` makes its tensors, `examine` holds a result against float64 row by
row. What is allowed follows from the inputs (`limits`), not from a constant that was chosen to pass.
"""
import math
import random
import re
from dataclasses import dataclass, fields

import torch
from glconv import dft
from glconv.reference import oracle

GATES = ("uniform", "sigmoid", "sparse", "heavy-tailed", "constant", "one-hot")
KERNELS = ("decaying", "white", "impulse")
SIGNALS = ("normal", "constant")
LENGTHS, BATCHES = (1, 16384), (1, 70)
K_SCALES, X_SCALES = (1e-6, 1e4), (1e-4, 1e2)
LARGEST_INPUT = 1000.0      # of |x * in_gate|: below what an FP16 transform of a tile of 2048 positions can hold
LARGEST_OUTPUT = 30000.0    # of |y|: within FP16 with room for its error


@dataclass(frozen=True)
class Draw:
    """One problem: everything its tensors are made from. `str` of it is a line that `parse` reads."""

    batch: int
    streams: int
    heads: int
    length: int
    signal: str
    in_gates: str
    out_gates: str
    kernel: str
    x_scale: float      # standard deviation, or value, of x
    k_scale: float      # norm of k, a channel
    seed: int

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def parse(text: str) -> Draw:
    """The Draw that `str` wrote. Raises ValueError for any other text."""
    given = dict(re.findall(r"(\w+)=([^,\s]+)", text))
    kinds = {field.name: field.type for field in fields(Draw)}
    if set(given) != set(kinds):
        raise ValueError(f"{text!r} is no draw; want {'=..., '.join(kinds)}=...")
    return Draw(**{name: kinds[name](value) for name, value in given.items()})


def log_uniform(rng: random.Random, least: float, most: float) -> float:
    return math.exp(rng.uniform(math.log(least), math.log(most)))


def draw(rng: random.Random, elements: int, lengths: tuple[int, int] = LENGTHS,
         batches: tuple[int, int] = BATCHES) -> Draw:
    """A problem of at most about `elements` positions in all. Two lengths in five lie at or next to a power of two."""
    length = round(log_uniform(rng, *lengths))
    if rng.random() < 0.4:
        length = 2 ** round(math.log2(length)) + rng.choice((-1, 0, 0, 1))
    length = min(max(length, lengths[0]), lengths[1])
    batch = min(round(log_uniform(rng, *batches)), max(1, elements // length))
    channels = max(1, min(round(log_uniform(rng, 1, 800)), elements // (length * batch)))
    streams = rng.choice([factor for factor in range(1, channels + 1) if channels % factor == 0])
    k_scale = float(f"{log_uniform(rng, *K_SCALES):.3g}")
    return Draw(batch, streams, channels // streams, length, rng.choice((*SIGNALS, SIGNALS[0], SIGNALS[0])),
                rng.choice(GATES), rng.choice(GATES), rng.choice(KERNELS),
                float(f"{log_uniform(rng, *X_SCALES):.3g}"), k_scale, rng.randrange(1 << 30))


def inputs(problem: Draw, device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
    """x, in_gate, out_gate, FP16 [batch, streams, heads, length], and k, FP32 [streams, heads, length]. x and out_gate
    are brought down by powers of two where x * in_gate or y would leave what FP16 can carry."""
    generator = torch.Generator(device).manual_seed(problem.seed)
    channel_shape = problem.streams, problem.heads, problem.length
    shape = problem.batch, *channel_shape

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def uniform(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def one_hot(shape: tuple[int, ...], values: torch.Tensor) -> torch.Tensor:
        """Zero but for `values` at one position of each row."""
        at = torch.randint(shape[-1], (*shape[:-1], 1), generator=generator, device=device)
        return torch.zeros(shape, device=device).scatter_(-1, at, values)

    def gate(name: str) -> torch.Tensor:
        if name == "uniform":
            return uniform(shape)
        if name == "sigmoid":
            return normal(shape).sigmoid_()
        if name == "sparse":
            return normal(shape).mul_(uniform(shape) < 0.1)
        if name == "heavy-tailed":      # Student's t with two degrees of freedom
            p = uniform(shape).mul_(2).sub_(1).clamp_(-0.9999, 0.9999)
            return p.mul_((2 / (1 - p * p)).sqrt_())
        if name == "constant":
            return (0.5 + uniform((*shape[:-1], 1))).expand(shape)
        return one_hot(shape, 0.5 + uniform((*shape[:-1], 1)))

    x = normal(shape) if problem.signal == "normal" else torch.ones(shape, device=device)
    x, in_gate, out_gate = x * problem.x_scale, gate(problem.in_gates), gate(problem.out_gates)
    if problem.kernel == "impulse":
        k = one_hot(channel_shape, torch.ones((*channel_shape[:-1], 1), device=device))
    else:
        k = normal(channel_shape)
        if problem.kernel == "decaying":
            rate = 1 + 19 * uniform((*channel_shape[:-1], 1))
            k *= torch.exp(-rate * torch.linspace(0, 1, problem.length, device=device))
    k *= problem.k_scale / k.norm(dim=-1, keepdim=True).clamp_min(1e-30)

    x, in_gate = (x * down((x * in_gate).abs().max(), LARGEST_INPUT)).half(), in_gate.half()
    largest = oracle(x, in_gate, out_gate, k).abs().max()
    return x, in_gate, (out_gate * down(largest, LARGEST_OUTPUT)).half().contiguous(), k


def down(largest: torch.Tensor, limit: float) -> float:
    """The power of two, at most 1, that brings `largest` to `limit` or below."""
    return 2.0 ** -max(0, math.ceil(math.log2(max(largest.item(), 1e-30) / limit)))


# A rounding to the nearest of 11 bits is at most HALF_UNIT, relative; its root mean square over all mantissas is
# HALF_UNIT / sqrt(8 ln 2). Below FP16's normal numbers it is at most 2^-25 whatever the value, 2^-25 / sqrt(3) in the
# mean.
HALF_UNIT, SINGLE_UNIT, HALF_FLOOR = 2.0**-11, 2.0**-24, 2.0**-25
MEAN = 1 / math.sqrt(8 * math.log(2))
COLUMNS = 32        # of a tile of a fused kernel, at most
TILES = (16, 16), (32, 16), (32, 32), (64, 16), (64, 32), (128, 16)     # of the fused kernels


@dataclass(frozen=True)
class Arithmetic:
    """How often a path rounds between its inputs and its result, each time by `unit` relative: what its noise is."""

    name: str
    unit: float
    roundings: float
    tile: int = 0               # positions of an FP16 transform without a scale of its own; 0: there is none
    floors: float = 0.0         # energy of the roundings of small values to FP16's least number, of one of u = 1
    faint: float = 0.0          # the same of one small element, whose roundings may all point one way: their sum
    near: float = 0.0           # roundings that stay with the element they were made in
    tiled: bool = False         # sequences of more than one tile
    paired: bool = False        # two batch rows share an inverse transform


def fused(length: int) -> Arithmetic:
    """Matrices in FP16. Rounded: u, F1, F1 u, T, T F1 u, F2, A, K, A K, F2 again, V, V T, F1 again, half as much again
    for each of the three products with a rounded part; and the sums over ceil(L / 1024) tiles at most."""
    tile = min(2048, max(256, 2 ** math.ceil(math.log2(length))))
    blocks = math.ceil(length / 1024)
    energies, sums = zip(*(floors(n1, n2, blocks) for n1, n2 in TILES if n1 * n2 <= tile))
    return Arithmetic("fused", HALF_UNIT, 14.5 + 0.5 * blocks, tile, max(energies), max(sums), tiled=length > tile)


def floors(n1: int, n2: int, blocks: int) -> tuple[float, float]:
    """Energy and sum, in units of FP16's least rounding of u, of what rounding to that number adds. F1 and F2 enter
    below their unitary size (`dft.ROW_SCALES`, `COLUMN_SCALES`) and shrink all that follows, which brings it nearer to
    that number; K, of a mean square of at least 4, takes some of that back. FP16 sums are rounded every 16 terms.

    The emulation of tests/test_portable.py, at u of 2e-5 and the least K, comes within a quarter of the energy
    (counted, emulated: 16x16 4.6, 3.7; 32x16 9.5, 8.5; 64x16 12.2, 11.5; 64x32 19.7, 18.0; 32x32 39.5, 36.3).
    """
    row, column = dft.ROW_SCALES[n1], dft.COLUMN_SCALES[n2]
    first, spectrum, product = 1 / row, 1 / (row * column), 1 / (2 * (row * column) ** 2)
    sizes = first, spectrum, product, product / column
    precise = n1 * n2 <= 512            # products with twiddles in FP32: one rounding, not two after another
    half_sums = n1 <= 64 and not precise
    counts = (1 if precise else 2 + (n1 / 16 if half_sums else 1), 2 * n2 / 16 if half_sums else 1, 1 + blocks,
              1 if precise else 3)
    return 1 + sum(count * size**2 for count, size in zip(counts, sizes)), sum(sizes)


def single(length: int) -> Arithmetic:
    """FP32 transforms: a butterfly has a product and a sum, and there are log2(2L) of them each way. Where L has a
    large prime factor each is a convolution with a chirp (Bluestein), by two transforms of up to four times the size:
    ten times the noise (an H200 passed eight times by a tenth, in one of 655 problems)."""
    rest = length
    for factor in (2, 3, 5, 7):
        while rest % factor == 0:
            rest //= factor
    stages = math.log2(2 * length) if rest == 1 else 25 * math.log2(8 * length)
    return Arithmetic("single", SINGLE_UNIT, 8 + 4 * stages, paired=True)


def half(length: int) -> Arithmetic:
    """FP16 transforms of size 2L: log2(2L) butterflies each way, of u and back (k's transform is FP32). Half of the
    energy has a complex product, of two roundings a part, with a rounded twiddle, and all of it a sum: 2.3 roundings'
    energy a butterfly. cuFFT's measure 6.3: 2.2e-3 of relative L2 on an H200 for three transforms at L = 2048, as if
    its twiddles erred by the energy of seven more. The last butterflies' noise is that of their own few elements, which
    counts where a result is one: 6.3 (1 + 1/2 + ...)."""
    return Arithmetic("half", HALF_UNIT, 6 + 2 * 6.3 * math.log2(2 * length), near=2 * 6.3, paired=True)


def participation(rows: torch.Tensor) -> torch.Tensor:
    """How many elements of each row carry its energy: L for equal ones, 1 for one, at least 1."""
    energy = rows.abs().square()
    energy = energy / energy.amax(-1, keepdim=True).clamp_min(1e-300)
    return (energy.sum(-1).square() / energy.square().sum(-1).clamp_min(1e-300)).clamp_min(1)


def safety(carrier: torch.Tensor, least: float = 1.25, most: float = 6.0) -> torch.Tensor:
    """Of the limit over the expected error, a row. Many independent roundings add up to what is expected within a few
    per cent. Few do not: where a row has its energy in one element, in time or in frequency, the roundings of that one
    element are the error, and they may all lie at their bound, 1/MEAN = 2.4 times the mean, and point one way. Of
    10^7 such rows on an H200 the furthest came to 5.2 times the mean."""
    return least + (most - least) / participation(carrier).sqrt()


def weighted_spectrum(u: torch.Tensor) -> torch.Tensor:
    """The transform modulo z^L - i."""
    return torch.fft.fft(u * torch.exp(1j * math.pi / (2 * u.shape[-1]) * torch.arange(u.shape[-1], device=u.device)))


def limits(tensors: tuple[torch.Tensor, ...], arithmetic: Arithmetic) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest error allowed: (L2 norm of each row, float64 [batch, streams, heads]; of each element, as y).

    With u = x * in_gate, v = the whole linear convolution of u and k (2L - 1 positions) and r the mean relative error
    of a rounding, each of n roundings adds noise of energy r^2 |v|^2, or r^2 |u|^2 |k|^2 where the kernel's spectrum
    misses u's. (Sequences of several tiles: 2 |v|^2 over the positions kept, for neighbouring tiles share theirs.) A
    transform spreads it evenly, and half of it falls on the L positions that are kept. FP16's least number f adds
    f^2 |k|^2 a position for each rounding before and after the product, m of them for u = 1 (`floors`):

        noise energy a position = n r^2 max(|v|, |u| |k|)^2 / 2L + m f^2 |k|^2

    A result in a few positions has the noise of the last stage in their columns of the tile alone, as much in all; that
    of an FP16 FFT's last stages lies in the positions themselves (`near`; a pair's rows round theirs together). It
    passes through the output gate, and y is rounded to FP16 once. The limit is `safety` times that, for a row; an
    element may lie twelve times further from zero than the mean: six for the furthest of 10^8, and the noise is not
    spread quite evenly. Over sequences of several tiles it is not at all: a tile holds the noise of the products that
    end in it (`tile_noise`). What FP16's least number takes from the spectrum of a few small elements is no noise: it
    is a part of v (`lost`).
    """
    x, in_gate, out_gate, k = (tensor.double() for tensor in tensors)
    length = x.shape[-1]
    u = x * in_gate
    whole = torch.fft.irfft(torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(k, n=2 * length), n=2 * length)
    v, k_norm = whole[..., :length], k.norm(dim=-1)
    carried = torch.maximum(whole.norm(dim=-1), u.norm(dim=-1) * k_norm)
    if arithmetic.tiled:
        carried = torch.maximum(carried, math.sqrt(2) * v.norm(dim=-1))
    own = v.abs()
    if arithmetic.paired:
        carried = loudest_of_pair(carried, u.abs().amax(-1))
        own = loudest_of_pair(own, u.abs().amax(-1, keepdim=True))
    floor = HALF_FLOOR / math.sqrt(3)
    energy = arithmetic.roundings * (arithmetic.unit * MEAN * carried).square() / (2 * length)
    lost = 0.0
    if arithmetic.tile:
        energy *= (COLUMNS / participation(whole)).clamp_min(1)
        energy += arithmetic.floors * (floor * k_norm).square()
        share = arithmetic.faint * HALF_FLOOR * math.sqrt(2 * arithmetic.tile) / u.norm(dim=-1).clamp_min(1e-300)
        lost = (share / participation(u).sqrt()).clamp_max(1)[..., None] * (v * out_gate).abs()
    noise = energy.sqrt()[..., None] * out_gate.abs()
    spread = noise
    if arithmetic.tiled:
        spread = torch.maximum(noise, tile_noise(u, k, arithmetic) * out_gate.abs())
    near = math.sqrt(arithmetic.near) * arithmetic.unit * MEAN * own * out_gate.abs()
    y = v * out_gate
    rounding = HALF_UNIT * y.abs()
    factor = torch.maximum(safety(u), safety(weighted_spectrum(u)))
    # Many equal elements may all be rounded by much, and the same way.
    certain = (y.half().double() - y).nan_to_num().norm(dim=-1)
    parts = (torch.maximum(factor, safety(noise, most=8.0)) * (noise + lost).norm(dim=-1),
             safety(near) * near.norm(dim=-1),
             torch.maximum(safety(y) * MEAN * rounding.norm(dim=-1), 1.1 * certain),
             torch.full_like(carried, HALF_FLOOR * math.sqrt(length)))
    return torch.stack(parts).norm(dim=0), factor[..., None] * (12 * spread + lost) + 6 * near + rounding + HALF_FLOOR


def tile_noise(u: torch.Tensor, k: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    """Root mean square of the noise at each position, float64 as u, where tile j is the sum over i <= j of a product of
    u's tile i with k's tiles j - i and j - i - 1, which leaves its noise evenly on the tile's positions."""
    size, length = arithmetic.tile, u.shape[-1]
    tiles = math.ceil(length / size)
    u, k = (torch.nn.functional.pad(t, (0, tiles * size - length)).unflatten(-1, (tiles, size)).norm(dim=-1)
            for t in (u, k))
    k = k + torch.nn.functional.pad(k, (1, 0))[..., :-1]
    energy = torch.zeros_like(u)
    for i in range(tiles):
        energy[..., i:] += (u[..., i:i + 1] * k[..., :tiles - i]).square()
    noise = (arithmetic.roundings * energy / size).sqrt() * (arithmetic.unit * MEAN)
    return noise.repeat_interleave(size, -1)[..., :length]


def loudest_of_pair(carried: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    """What rows 2p and 2p + 1 carry where they share a transform, each brought to a power of two of its own peak."""
    scale = torch.exp2(torch.floor(torch.log2(peak.clamp_min(1e-30))))
    batch = carried.shape[0]
    partner = torch.tensor([min(row ^ 1, batch - 1) for row in range(batch)], device=carried.device)
    return torch.maximum(carried, carried[partner] * (scale / scale[partner]))


@dataclass(frozen=True)
class Finding:
    """How a result stands to its limits: a ratio above 1 is a failure."""

    row: float          # worst error of a row over its limit
    element: float      # worst error of an element over its limit
    where: tuple[int, ...]      # batch, stream, head of the worst row
    text: str = ""      # what is wrong beyond size: form, NaN

    @property
    def right(self) -> bool:
        return not self.text and self.row <= 1 and self.element <= 1

    def __str__(self) -> str:
        return self.text or (f"row {list(self.where)}: {self.row:.2f} of the L2 limit; worst element "
                             f"{self.element:.2f} of its limit")


def examine(y: torch.Tensor, tensors: tuple[torch.Tensor, ...], arithmetic: Arithmetic) -> Finding:
    """A result against float64."""
    x = tensors[0]
    form = y.shape, y.dtype, y.device, y.is_contiguous()
    if form != (x.shape, torch.float16, x.device, True):
        return Finding(math.inf, math.inf, (), f"form {form}")
    difference = y.double() - oracle(*tensors)
    row, element = limits(tensors, arithmetic)
    ratios = (difference.norm(dim=-1) / row).nan_to_num(math.inf, math.inf)
    worst = torch.unravel_index(ratios.argmax(), ratios.shape)
    where = tuple(int(index) for index in worst)
    bad = ~torch.isfinite(y)
    text = f"{int(bad.sum())} elements are not finite, the first at {bad.nonzero()[0].tolist()}" if bad.any() else ""
    furthest = (difference.abs() / element).nan_to_num(math.inf, math.inf).max()
    return Finding(ratios.max().item(), furthest.item(), where, text)
