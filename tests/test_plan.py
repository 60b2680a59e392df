"""Plans: every problem gets one that fits its card, the same one every time, and the reason why."""
import dataclasses
import itertools
import math
import re

import pytest
from glconv import plan as plans
from glconv.plan import CARDS, Device, choose_programs, make_plan, table
from hypothesis import given
from hypothesis import strategies as st

A6000, A100, H200 = CARDS[8, 6], CARDS[8, 0], CARDS[9, 0]
CARD = st.sampled_from(list(CARDS.values()))


@given(batch=st.integers(1, 4096), channels=st.integers(1, 8192), length=st.integers(1, 40000), device=CARD,
       kernel=st.sampled_from(["auto", "portable"]))
def test_any_problem(batch, channels, length, device, kernel):
    if kernel == "portable" and length > 16384:
        with pytest.raises(ValueError, match=f"takes lengths up to 16384, not {length}"):
            make_plan(batch, channels, length, device, kernel)
        return
    plan = make_plan(batch, channels, length, device, kernel)
    assert plan == make_plan(batch, channels, length, device, kernel)
    assert plan.reason
    if plan.path == "spectral":
        assert length > 16384
        return
    assert length <= plan.blocks * plan.n1 * plan.n2
    assert plan.n1 * plan.n2 <= 2048
    assert plan.shared <= device.shared_limit
    assert plan.resident * (plan.shared + 1024) <= device.shared_total
    assert plan.resident * plan.warps * 32 * plan.registers <= device.registers
    assert plan.resident * plan.warps * 32 <= device.threads
    assert 1 <= plan.programs <= batch * channels
    assert plan.programs < 2 ** 31


def test_shortest_tile_that_is_long_enough():
    sizes = sorted({row.size for row in table((8, 6))})
    assert sizes[0] == 256
    assert sizes[-1] == 16384
    for length in (1, 2, 3, 7, 255, 256, 257, 1000, 2048, 2049, 5000, 14113, 16384):
        plan = make_plan(2, 3, length, A6000)
        assert plan.blocks * plan.n1 * plan.n2 == min(size for size in sizes if size >= length)


def test_the_published_card_holds_two_blocks():
    """49 KiB of shared memory each at L = 2048, and 99 KiB at most at any length."""
    plan = make_plan(64, 768, 2048, A6000)
    assert plan.path == "portable"
    assert plan.shared <= 49 << 10
    assert plan.resident >= 2
    assert all(row.shared <= 99 << 10 and row.resident(A6000) for row in table((8, 6)))


def test_smaller_cards_get_smaller_plans_or_the_spectral_path():
    card = dataclasses.replace(A6000, name="small card", shared_limit=48 << 10, shared_total=64 << 10)
    assert make_plan(4, 768, 2048, card).shared <= 48 << 10
    assert make_plan(4, 768, 8192, card).path == "portable"
    beyond = make_plan(4, 768, 16384, card)
    assert beyond.path == "spectral"
    assert beyond.reason == "the fused kernel on small card takes lengths up to 8192, not 16384"
    none = make_plan(4, 768, 2048, dataclasses.replace(card, shared_limit=1 << 10))
    assert none.path == "spectral"
    assert "1024 bytes of shared memory" in none.reason


def test_old_cards_take_the_spectral_path():
    turing = Device("T4", (7, 5), 40, 64 << 10, 64 << 10, threads=1024)
    plan = make_plan(4, 768, 2048, turing)
    assert (plan.path, plan.reason) == ("spectral", "no fused kernel for capability 7.5")


def test_unknown_capabilities_take_a_relative_plan():
    for capability in ((8, 7), (10, 3), (12, 1)):
        card = dataclasses.replace(A6000, capability=capability)
        assert make_plan(4, 768, 2048, card).path == "portable"


def test_hopper_kernel_only_where_it_runs():
    assert make_plan(64, 768, 2048, H200).path == "hopper"
    assert make_plan(64, 768, 2000, H200).path == "portable"
    assert make_plan(64, 768, 2048, H200, "portable").path == "portable"
    assert make_plan(64, 768, 2048, A100).path == "portable"
    with pytest.raises(ValueError, match="kernel: hopper cannot run: no hopper kernel for capability 8.6"):
        make_plan(64, 768, 2048, A6000, "hopper")


@pytest.mark.parametrize(("arguments", "text"), [
    ((0, 768, 2048), "batch is 0; want at least 1"), ((1, -1, 2048), "channels is -1; want at least 1"),
    ((1, 768, 0), "length is 0; want at least 1")])
def test_bad_sizes(arguments, text):
    with pytest.raises(ValueError, match=text):
        make_plan(*arguments, A6000)


def test_bad_kernel():
    with pytest.raises(ValueError, match=re.escape("kernel is 'gluon'; want 'auto', 'portable' or 'hopper'")):
        make_plan(1, 1, 1, A6000, "gluon")


@given(steps=st.integers(1, 100), channels=st.integers(1, 300), slots=st.integers(1, 600),
       prologue=st.sampled_from([0.5, 2.0]))
def test_programs_are_balanced(steps, channels, slots, prologue):
    """Counted share by share, the choice is no worse than a program a channel, or one for every slot of the card."""
    total = steps * channels

    def cost(programs):
        edges = [program * total // programs for program in range(programs + 1)]
        longest = max(end - begin + prologue * (-(-end // steps) - begin // steps)
                      for begin, end in itertools.pairwise(edges))
        return -(-programs // slots) * longest

    programs = choose_programs(steps, channels, slots, prologue)
    assert 1 <= programs <= total
    assert cost(programs) <= cost(channels)
    if slots < total:
        # A share of the formula may touch one channel more than those of this grid do.
        assert cost(programs) <= cost(slots) + 2 * prologue


def test_traffic_and_flop():
    assert plans.traffic(64, 768, 2048) == 768 * 2048 * (64 * 8 + 4)
    plan = make_plan(64, 768, 2048, A6000)
    assert plans.flop(plan, 64, 768) == 768 * 64.75 * 8 * 2048 * (plan.n1 + 2 * plan.n2)
    assert plans.largest_input(plan) == 65504 / math.sqrt(2048)
