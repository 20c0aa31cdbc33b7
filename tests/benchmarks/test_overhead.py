"""What a call costs the host: the same lines for few weights and for many."""

import pytest
import torch

from benchmarks.architectures import TinyLinears, WithLoss
from tests.devices import DEVICES
from tests.weights.bindings import lines_of


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("training", [False, True])
def test_a_call_runs_the_same_lines_for_many_weights_as_for_few(device: str, training: bool) -> None:
    def lines(count: int) -> int:
        torch._dynamo.reset()
        model, x = WithLoss(TinyLinears(count)).to(device).train(training), torch.ones(2, 16, device=device)
        run = torch.compile(model, backend="amp", options={"dtype": torch.bfloat16, "lower": "aot_eager"})
        with torch.set_grad_enabled(training):
            for _ in range(4):
                run(x)
            return lines_of(lambda: run(x))

    few, many = lines(8), lines(32)
    assert 0 < few == many
