"""The portable kernel through Triton's interpreter, on problems drawn at random. tests/test_fuzz.py starts this file
with TRITON_INTERPRET=1."""
import dataclasses
import math
import os
import random

import fuzzing
import pytest
import torch
from glconv.plan import CARDS, make_plan

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
ROWS = 10           # at most, for the interpreter takes a tenth of a second for each
PROBLEMS = 40


def solve(problem, card, programs):
    from glconv.fused import portable

    tensors = fuzzing.inputs(problem)
    plan = make_plan(problem.batch, problem.streams * problem.heads, problem.length, card, "portable")
    plan = dataclasses.replace(plan, packed=False, programs=min(plan.programs, programs))
    y = torch.full_like(tensors[0], math.nan)
    portable.run(*tensors, plan, y)
    return fuzzing.examine(y, tensors, fuzzing.fused(problem.length))


@pytest.mark.parametrize("seed", range(4))
def test_drawn_problems(seed):
    """All tiles of all cards, whole and masked, shares of the grid that begin and end within a channel."""
    rng = random.Random(seed)
    cards = [CARDS[8, 6], CARDS[9, 0]]
    for _ in range(PROBLEMS // 4):
        problem = fuzzing.draw(rng, 12000, lengths=(1, 6144), batches=(1, ROWS))
        if problem.batch * problem.streams * problem.heads > ROWS:
            problem = dataclasses.replace(problem, streams=1, heads=max(1, ROWS // problem.batch))
        card, programs = rng.choice(cards), rng.choice((1, 2, 3, 5))
        finding = solve(problem, card, programs)
        assert finding.right, f"{finding}: {problem} on {card.name} in {programs} programs"
