"""What the plans take of cards that are not here, and what the tools say about it."""
import dataclasses
import json
from pathlib import Path

import pytest
from commands import run_tools
from glconv.plan import CARDS, make_plan, table

from tools import explain, resources

ROOT = Path(__file__).resolve().parent.parent


def row_of(capability, tile):
    return next(row for row in table(capability)
                if row.path == "portable" and f"{row.n1}x{row.n2}x{row.blocks}" == tile)


# The path of the published card, both cards' main plans, and the longest ones.
@pytest.mark.parametrize(("capability", "tile", "full"), [
    ((8, 6), "64x32x1", True), ((8, 6), "64x32x1", False), ((8, 6), "128x16x8", True), ((9, 0), "64x32x1", True),
    ((9, 0), "128x16x8", True), ((12, 0), "64x16x8", True), ((10, 0), "32x32x1", True)])
def test_plans_fit_their_cards(capability, tile, full):
    result = resources.measure(row_of(capability, tile), CARDS[capability], full)
    assert result.problems == []
    assert result.shared <= result.shared_limit
    assert result.loop > 100


def test_the_published_card():
    """sm_86: tensor cores through mma, asynchronous loads, nothing spilled, two blocks of at most 49 KiB."""
    result = resources.measure(row_of((8, 6), "64x32x1"), CARDS[8, 6], True)
    assert result.stack == 0
    assert result.shared <= 49 << 10
    assert result.resident >= 2
    assert result.counts["mma"] >= 128
    assert result.counts["cp.async"] >= 6
    assert "wgmma" not in result.counts


def test_hopper_takes_wgmma():
    assert resources.measure(row_of((9, 0), "64x32x1"), CARDS[9, 0], True).counts["wgmma"] >= 32


@pytest.mark.parametrize(("change", "text"), [
    ({"registers": 64}, "spills"), ({"shared": 1000}, "the table says at most 144 registers and 1000 bytes")])
def test_what_is_wrong_is_found(change, text):
    row = dataclasses.replace(row_of((8, 6), "16x16x1"), **change)
    assert text in " ".join(resources.measure(row, CARDS[8, 6], True).problems)


def test_too_much_shared_memory_is_found():
    card = dataclasses.replace(CARDS[8, 6], shared_limit=2048)
    assert "the card gives 2048" in " ".join(resources.measure(row_of((8, 6), "16x16x1"), card, True).problems)


def test_resources_command():
    done = run_tools("resources", "--capability", "8.6", "--rows", "16x16x1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["failures"] == 0
    assert {plan["variant"] for plan in report["plans"]} == {"full", "masked"}
    assert all(plan["stack"] == 0 and plan["shared"] <= plan["shared_limit"] for plan in report["plans"])
    unknown = run_tools("resources", "--capability", "7.0")
    assert unknown.returncode == 2
    assert "known: 8.0, 8.6, 8.9, 9.0, 10.0, 12.0" in " ".join(unknown.stderr.split())


def test_exit_status_tells_of_a_problem(monkeypatch, capsys):
    spilling = dataclasses.replace(row_of((8, 6), "16x16x1"), registers=64)
    monkeypatch.setattr(resources, "table", lambda capability: (spilling,))
    with pytest.raises(resources.Exit) as status:
        resources.command(["8.6"], None, True)
    assert status.value.exit_code == 1
    assert json.loads(capsys.readouterr().out)["failures"] == 2


def test_explain_command():
    sizes = ("--batch", "8", "--streams", "4", "--heads", "192", "--length", "2048")
    done = run_tools("explain", *sizes, "--capability", "8.6")
    assert done.returncode == 0, done.stderr
    for part in ("RTX A6000", "path          portable", "arithmetic", "of the copy roofline", "times eager", "Assumed"):
        assert part in done.stdout
    told = json.loads(run_tools("explain", *sizes, "--capability", "8.6", "--json").stdout)
    assert told["plan"] == dataclasses.asdict(make_plan(8, 768, 2048, CARDS[8, 6]))
    assert told["estimate"]["bytes"] == 768 * 2048 * (8 * 8 + 4)
    long = run_tools("explain", "--batch", 1, "--streams", 1, "--heads", 1, "--length", 20000, "--capability", 8.6)
    assert "path          spectral" in long.stdout
    assert "takes lengths up to 16384, not 20000" in long.stdout


@pytest.mark.parametrize("capability", CARDS)
@pytest.mark.parametrize(("batch", "length"), [(64, 2048), (1, 2048), (64, 256), (16, 4096), (4, 16384), (3, 5000)])
def test_estimates_stay_above_the_floors(capability, batch, length):
    device = CARDS[capability]
    plan = make_plan(batch, 768, length, device)
    numbers = explain.estimate(plan, device, batch, 768, length)
    assert numbers["expected_s"] > max(numbers["roofline_s"], numbers["products_s"])
    assert 0 < numbers["share"] < 1
