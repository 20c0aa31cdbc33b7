"""Real architectures: eager autocast's output dtypes, gradients as exact as its own, and no graph break more."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compiling import compiled, dtypes, eager, error, gradients
from tests.tiny_models import CASES, build, loss, outputs

MARKS = {"llama": (), "bert": pytest.mark.ci, "resnet": pytest.mark.ci}
"""Others are slow."""
SEEDS = 3

pytestmark = [
    pytest.mark.units,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def in_double(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, pytest.mark.slow)) for n in CASES])
def test_gradients_are_as_exact_as_eager_autocasts(name: str) -> None:
    """Summed over seeds; amp compiles once and is given new weights."""
    ours, inputs = build(name)
    run, recorder = compiled(ours)
    theirs_error = ours_error = 0.0
    for _ in range(SEEDS):
        model, inputs = build(name)
        ours.load_state_dict(model.state_dict())
        assert dtypes(outputs(run, inputs)) == dtypes(eager(outputs, model, inputs))
        exact = gradients(copy.deepcopy(model).double(), lambda m, x=inputs: loss(m, in_double(x)))
        theirs = gradients(model, lambda m, x=inputs: eager(loss, m, x))
        theirs_error += error(theirs, exact)
        ours_error += error(gradients(ours, lambda _, x=inputs: loss(run, x)), exact)
    assert 0 < ours_error <= 1.1 * theirs_error
    assert recorder.compared > 20 and not recorder.disagreements
    graphs: list[Any] = []
    torch._dynamo.reset()
    eager(outputs, torch.compile(model, backend=lambda gm, _: graphs.append(gm) or gm), inputs)
    assert len(recorder.graphs) <= len(graphs)
