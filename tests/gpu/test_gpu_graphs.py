"""All 53 ladder versions on a GPU in their own precision. Here they run uncompiled, for compiling 53 graphs takes
minutes; `python -m tools ladder` compiles each and checks it against float64 before it times."""
import pytest
import torch
from glconv.reference import oracle, row_errors

import graphs
from tools.cases import Case, make_inputs
from tools.worker import L2_LIMIT, ROW_LIMIT

pytestmark = pytest.mark.gpu
VERSIONS = {version.name: version for version in graphs.ladder()}
BATCHES = (1, 3, 4, 16, 64)
# Beyond the published set: sizes that are no power of two, and longer ones.
OTHER = ((2, 100), (3, 1009), (4, 8192))


@pytest.fixture(scope="module", params=[*((batch, 2048) for batch in BATCHES), *OTHER], ids=str)
def problem(request):
    batch, length = request.param
    inputs = make_inputs(Case(batch, 1, 96, length, "uniform", "decaying", 1.0, seed=batch), 0, torch.device("cuda"))
    return inputs, oracle(*inputs)


@pytest.mark.parametrize("name", VERSIONS)
def test_right_in_its_own_precision(problem, name):
    inputs, exact = problem
    solver = graphs.Solver(VERSIONS[name], inputs[0].device)
    solver.compiles = False
    for _ in range(3):      # v12 replays from the third call on
        y = solver(*inputs)
    assert (y.shape, y.dtype, y.is_contiguous()) == (inputs[0].shape, torch.float16, True)
    assert (y.double() - exact).norm() / exact.norm() <= L2_LIMIT
    assert row_errors(y, exact).max() <= ROW_LIMIT


@pytest.mark.parametrize("name", ["v01", "v05", "v12", "v15", "v40", "v49"])
def test_right_under_its_own_graph_settings(name):
    inputs = make_inputs(Case(4, 1, 12, 2048, "uniform", "decaying", 1.0, seed=4), 0, torch.device("cuda"))
    solver = VERSIONS[name].solver(inputs[0].device)
    for _ in range(3):
        y = solver(*inputs)
    assert row_errors(y, oracle(*inputs)).max() <= ROW_LIMIT
