"""What can go wrong around a kernel on a GPU: stray writes and reads, offsets past 2^31, memory that is short, threads,
streams, captured graphs, other devices, cards without a kernel."""
import contextlib
import dataclasses
import functools
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import fuzzing
import glconv
import pytest
import torch
from glconv import SolverConfig, gated_causal_conv
from glconv.fused import launch
from glconv.plan import CARDS, device_of

pytestmark = pytest.mark.gpu
GPU = Path(__file__).resolve().parent
GUARD = 2048        # elements before and after a guarded tensor
PATTERN = 0x5A5A    # what stands there
SHAPES = ((3, 1, 5, 2048), (1, 2, 3, 2048), (1, 1, 1, 7), (3, 2, 3, 250), (2, 2, 3, 1023), (64, 1, 3, 1024),
          (3, 1, 2, 4096), (2, 1, 3, 8001))
KERNELS = ("portable", "hopper")


@pytest.fixture(params=KERNELS)
def kernel(request):
    card = device_of(torch.device("cuda", torch.cuda.current_device()))
    if request.param == "hopper" and card.capability[0] != 9:
        pytest.skip("the Hopper kernel needs capability 9.x")
    return request.param


def serves(kernel: str, length: int) -> bool:
    """Whether the kernel alone takes this length."""
    try:
        launch.plan_for(glconv.Problem(2, 1, 2, length, torch.device("cuda", 0)), kernel)
    except ValueError:
        return False
    return True


def alike(kernel: str, *sizes: tuple[int, int, int]) -> bool:
    """Whether problems of these (batch, channels, length) run the same code, on whatever grid."""
    device = torch.device("cuda", 0)
    plans = [launch.plan_for(glconv.Problem(batch, 1, channels, length, device), kernel)
             for batch, channels, length in sizes]
    return len({dataclasses.replace(plan, programs=0, resident=0, reason="") for plan in plans}) == 1


def draw(batch, streams, heads, length, seed=1, device="cuda"):
    problem = fuzzing.Draw(batch, streams, heads, length, "normal", "sigmoid", "uniform", "decaying", 1.0, 1.0, seed)
    return fuzzing.inputs(problem, device)


def assert_right(y, tensors):
    finding = fuzzing.examine(y, tensors, fuzzing.fused(tensors[0].shape[-1]))
    assert finding.right, str(finding)


class Guarded:
    """Tensors with a known pattern on both sides, which must be there afterwards."""

    def __init__(self):
        self.buffers = []

    def empty(self, sizes, *_):
        """NaN inside; as aligned as a tensor of its own."""
        buffer = torch.full((math.prod(sizes) + 2 * GUARD,), PATTERN, dtype=torch.int16, device="cuda")
        self.buffers.append(buffer)
        return buffer[GUARD:-GUARD].view(torch.float16).view(sizes).fill_(math.nan)

    def copy(self, tensor):
        if tensor.dtype != torch.float16:
            return tensor
        return self.empty(tensor.shape).copy_(tensor)

    def assert_whole(self):
        for buffer in self.buffers:
            for side, guard in (("before", buffer[:GUARD]), ("after", buffer[-GUARD:])):
                strays = (guard != PATTERN).nonzero().flatten().tolist()
                assert not strays, f"{len(strays)} elements written {side} a tensor, the first at {strays[0]}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_poisoned_and_guarded(monkeypatch, kernel, shape):
    if not serves(kernel, shape[-1]):
        pytest.skip(f"no {kernel} kernel for this length")
    guarded, drawn = Guarded(), draw(*shape)
    gated_causal_conv(*drawn, SolverConfig(kernel=kernel))      # compiles: no other allocation stands in for the output
    tensors = tuple(guarded.copy(tensor) for tensor in drawn)
    monkeypatch.setattr(launch, "empty", guarded.empty)
    y = gated_causal_conv(*tensors, SolverConfig(kernel=kernel))
    monkeypatch.undo()
    assert len(guarded.buffers) == 4
    assert_right(y, drawn)
    guarded.assert_whole()


@pytest.mark.parametrize("at", [-1, 0])
def test_a_stray_write_is_seen(at):
    guarded = Guarded()
    y = guarded.empty((3, 5))
    guarded.assert_whole()
    guarded.buffers[0][GUARD - 1 if at else y.numel() + GUARD] = 0
    with pytest.raises(AssertionError, match="1 elements written"):
        guarded.assert_whole()


def run(*arguments, timeout=120, **variables):
    return subprocess.run([sys.executable, *map(str, arguments)], env=os.environ | variables, capture_output=True,
                          text=True, timeout=timeout, cwd=GPU.parents[1])


def test_nothing_reads_or_writes_past_mapped_memory():
    done = run(GPU / "edges.py")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "calls at the edges of mapped memory, 0 wrong" in done.stdout


def test_a_read_past_mapped_memory_faults():
    done = run(GPU / "edges.py", "--overrun")
    assert done.returncode != 0
    assert "illegal memory access" in done.stderr


def test_offsets_past_31_bits(kernel):
    """One tensor of more than 2^31 elements: its first rows, those on both sides of the mark and the last come out as
    those of a small call do, to the bit where the plan differs in its grid alone."""
    channels, length = 768, 2048
    batch = 2**31 // (channels * length) + 6
    free, _ = torch.cuda.mem_get_info()
    if free < 4 * 2 * batch * channels * length + (2 << 30):
        pytest.skip("needs 20 GB of device memory")
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(batch, 1, channels, length, generator=generator, device="cuda", dtype=torch.float16)
    gate = torch.rand(batch, 1, channels, length, generator=generator, device="cuda", dtype=torch.float16)
    k = torch.randn(1, channels, length, generator=generator, device="cuda") / 45
    assert x.numel() > 2**31
    y = gated_causal_conv(x, gate, gate, k, SolverConfig(kernel=kernel))
    for first in (0, 2**31 // (channels * length) - 1, batch - 2):
        rows = slice(first, first + 2)
        part = x[rows].clone(), gate[rows].clone(), gate[rows].clone(), k
        small = gated_causal_conv(*part, SolverConfig(kernel=kernel))
        assert torch.equal(small, y[rows]) or not alike(kernel, (2, channels, length), (batch, channels, length))
        assert_right(y[rows].clone(), part)
    del x, gate, y
    torch.cuda.empty_cache()


def test_out_of_memory_raises_and_the_next_call_works(kernel):
    tensors = draw(8, 1, 768, 2048)
    expected = gated_causal_conv(*tensors, SolverConfig(kernel=kernel))
    kept = expected.clone()
    del expected
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / total)
    hoard = []
    try:
        with contextlib.suppress(torch.OutOfMemoryError):   # what is reserved may have room for an output, or several
            while True:
                hoard.append(torch.empty_like(tensors[0]))
        with pytest.raises(torch.OutOfMemoryError):
            gated_causal_conv(*tensors, SolverConfig(kernel=kernel))
    finally:
        hoard.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(gated_causal_conv(*tensors, SolverConfig(kernel=kernel)), kept)


def test_threads(kernel, forgetful):
    """Four threads, two problems, each thread its own inputs, first calls included."""
    config = SolverConfig(kernel=kernel)
    inputs = [draw(5, 1, 12 + number % 2, 2048, seed=number) for number in range(4)]
    results = [[] for _ in inputs]

    def work(number):
        results[number] += [gated_causal_conv(*inputs[number], config) for _ in range(25)]
        torch.cuda.synchronize()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tensors, mine in zip(inputs, results):
        assert len(mine) == 25
        assert_right(mine[0], tensors)
        assert all(torch.equal(y, mine[0]) for y in mine)


def test_streams(kernel):
    """Calls that alternate between two streams, each on inputs that its own stream writes late."""
    config = SolverConfig(kernel=kernel)
    values = [draw(4, 1, 24, 2048, seed=seed) for seed in (1, 2)]
    expected = [gated_causal_conv(*tensors, config) for tensors in values]
    streams = [torch.cuda.Stream() for _ in values]
    late = [tuple(torch.zeros_like(tensor) for tensor in tensors) for tensors in values]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for stream, slots, tensors in zip(streams, late, values):
            with torch.cuda.stream(stream):
                for slot in slots:
                    slot.zero_()
                torch.cuda._sleep(300_000)
                for slot, tensor in zip(slots, tensors):
                    slot.copy_(tensor)
                results.append(gated_causal_conv(*slots, config))
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected[number % 2]) for number, y in enumerate(results))


def test_capture_and_replay_with_new_inputs(kernel):
    config = SolverConfig(kernel=kernel)
    slots, others, third = (draw(4, 1, 24, 2048, seed=seed) for seed in (1, 2, 3))
    expected = [gated_causal_conv(*tensors, config) for tensors in (others, third)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = gated_causal_conv(*slots, config)
        second = gated_causal_conv(first, *slots[1:], config)
    for tensors, y in zip((others, third), expected):
        for slot, tensor in zip(slots, tensors):
            slot.copy_(tensor)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(first, y)
        assert torch.equal(second, gated_causal_conv(y, *tensors[1:], config))


def test_a_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second CUDA device")
    tensors = draw(3, 1, 5, 2048, device="cuda:1")
    with torch.cuda.device(0):
        y = gated_causal_conv(*tensors)
        assert torch.cuda.current_device() == 0
    assert y.device == torch.device("cuda:1")
    assert_right(y, tensors)


def test_results_do_not_depend_on_the_grid_or_on_neighbours(kernel):
    """A row is the same alone and among others, in other batches, channels and shares of the grid: to the bit where the
    plan differs in its grid alone."""
    config = SolverConfig(kernel=kernel)
    x, in_gate, out_gate, k = draw(37, 1, 50, 2048)
    y = gated_causal_conv(x, in_gate, out_gate, k, config)
    for batch, channel in ((0, 0), (17, 23), (35, 48)):
        rows, lanes = slice(batch, batch + 2), slice(channel, channel + 2)
        part = *(tensor[rows, :, lanes].contiguous() for tensor in (x, in_gate, out_gate)), k[:, lanes].contiguous()
        alone = gated_causal_conv(*part, config)
        assert torch.equal(alone, y[rows, :, lanes]) or not alike(kernel, (2, 2, 2048), (37, 50, 2048))
        assert_right(y[rows, :, lanes].contiguous(), part)


def test_the_same_bits_again_and_again(kernel):
    """A race shows as a difference between calls: many of them, with much in flight."""
    config = SolverConfig(kernel=kernel)
    for shape in ((16, 1, 768, 2048), (64, 1, 96, 1024), (5, 1, 768, 4096)):
        if not serves(kernel, shape[-1]):
            continue
        tensors = draw(*shape)
        first = gated_causal_conv(*tensors, config)
        assert_right(first, tensors)
        for _ in range(20):
            assert torch.equal(gated_causal_conv(*tensors, config), first)


@pytest.fixture
def old_card(monkeypatch, forgetful):
    """This GPU, described as one of capability 7.5."""
    here = device_of(torch.device("cuda", torch.cuda.current_device()))
    card = dataclasses.replace(here, capability=(7, 5))
    monkeypatch.setattr(launch, "device_of", lambda device: card)


def test_card_without_a_kernel(old_card):
    tensors = draw(3, 1, 5, 2048)
    route = glconv.describe(*tensors, SolverConfig(compile=False))
    assert (route.path, route.reason) == ("spectral", "no fused kernel for capability 7.5")
    y = gated_causal_conv(*tensors, SolverConfig(compile=False))
    finding = fuzzing.examine(y, tensors, fuzzing.half(2048))
    assert finding.right, str(finding)
    with pytest.raises(ValueError, match=r"kernel: portable cannot run: no portable kernel for capability 7\.5"):
        gated_causal_conv(*tensors, SolverConfig(kernel="portable"))
    with pytest.raises(ValueError, match=r"graph: fused has no kernel for .* capability 7\.5; want graph: auto"):
        gated_causal_conv(*tensors, SolverConfig(graph="fused"))


SOLVE = """
import sys, torch
sys.path[:0] = [{tests!r}, {package!r}]
import fuzzing, glconv
tensors = fuzzing.inputs(fuzzing.Draw(2, 1, 3, 2048, "normal", "sigmoid", "uniform", "white", 1.0, 1.0, 1), "cuda")
finding = fuzzing.examine(glconv.gated_causal_conv(*tensors), tensors, fuzzing.fused(2048))
print("right" if finding.right else finding)
"""


@functools.cache
def program() -> str:
    return SOLVE.format(tests=str(GPU.parent), package=str(GPU.parents[1] / "methods" / "main"))


def test_kernel_cache_that_cannot_be_written():
    """It works, or the error names the folder: never a hang, never a wrong result."""
    done = run("-c", program(), TRITON_CACHE_DIR="/dev/null/cache")
    assert "right" in done.stdout or "/dev/null/cache" in done.stderr, done.stdout + done.stderr[-2000:]
    assert (done.returncode == 0) == ("right" in done.stdout)


def test_every_card_has_a_plan_here():
    """The tables are for cards; the one at hand must be described as one of its capability."""
    here = device_of(torch.device("cuda", torch.cuda.current_device()))
    known = CARDS.get(here.capability)
    if known is None:
        pytest.skip(f"no card of capability {here.capability} is described")
    assert here.shared_limit == known.shared_limit
    assert here.registers == known.registers
    assert here.threads == known.threads
