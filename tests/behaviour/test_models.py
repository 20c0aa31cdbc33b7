"""Real architectures: eager autocast's output dtypes, gradients as exact as its own, and no graph break more."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compiling import LOW, Recorder, compiled, dtypes, eager, error, gradients
from tests.tiny_models import CASES, build, loss, outputs

DEFAULT = ("llama", "bert", "resnet")
SEEDS = 3

pytestmark = [
    pytest.mark.units,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
slow_unless_default = [pytest.param(n, marks=[] if n in DEFAULT else pytest.mark.slow) for n in CASES]


def in_double(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def gradient_errors(name: str, **options: Any) -> tuple[float, float, Recorder]:
    """Summed over seeds, of eager autocast and of amp; amp compiles once and is given new weights."""
    ours, _ = build(name)
    run, recorder = compiled(ours, **options)
    theirs_error = ours_error = 0.0
    for _ in range(SEEDS):
        model, inputs = build(name)
        ours.load_state_dict(model.state_dict())
        assert dtypes(outputs(run, inputs)) == dtypes(eager(outputs, model, inputs))
        exact = gradients(copy.deepcopy(model).double(), lambda m, x=inputs: loss(m, in_double(x)))
        theirs = gradients(model, lambda m, x=inputs: eager(loss, m, x))
        theirs_error += error(theirs, exact)
        ours_error += error(gradients(ours, lambda _, x=inputs: loss(run, x)), exact)
    return theirs_error, ours_error, recorder


@pytest.mark.parametrize("name", slow_unless_default)
def test_gradients_are_as_exact_as_eager_autocasts(name):
    theirs, ours, recorder = gradient_errors(name)
    assert 0 < ours <= 1.1 * theirs
    assert recorder.compared > 20 and not recorder.disagreements
    assert len(recorder.graphs) <= stock_graphs(*build(name), torch.autocast("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_as_exact_through_inductor(name):
    theirs, ours, _ = gradient_errors(name, lower="inductor")
    assert 0 < ours <= 1.1 * theirs


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [LOW, torch.float16])
def test_output_dtypes_and_graphs_are_those_of_eager_autocast_and_stock_torch(name, dtype):
    model, inputs = build(name)
    with torch.no_grad():
        expected = eager(outputs, model, inputs, dtype=dtype)
        run, recorder = compiled(model, dtype=dtype)
        results = outputs(run, inputs)
    assert dtypes(results) == dtypes(expected)
    for ours, theirs in zip(results, expected, strict=True):
        if theirs.isfinite().all():
            assert torch.allclose(ours.float(), theirs.float(), rtol=0.05, atol=0.05 * float(theirs.float().std()))
    assert len(recorder.graphs) <= stock_graphs(model, inputs, torch.autocast("cpu", dtype))


def stock_graphs(model: nn.Module, inputs: dict[str, Tensor], around: contextlib.AbstractContextManager[Any]) -> int:
    graphs = []
    torch._dynamo.reset()
    run = torch.compile(model, backend=lambda gm, _: graphs.append(gm) or gm)
    with around:
        outputs(run, inputs)
    return len(graphs)
