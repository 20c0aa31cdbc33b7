"""Other people's training loops give compiled what they give eagerly; what they refuse, they still refuse."""

import pytest
import torch

from examples.recipes.recipe import distance

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def weights(module):
    return [p.detach() for p in module.parameters()]


def test_transformers_trainer():
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate, which is not installed")
    from examples.ecosystem.transformers_trainer import train

    (ours, our_loss), (eager, eager_loss) = train(True, lower="aot_eager"), train(False)
    assert our_loss == pytest.approx(eager_loss, rel=0.01)
    assert distance(weights(ours), weights(eager)) < 0.01
    with pytest.raises(ValueError, match="not a valid DynamoBackend"):  # if not: the example can be simpler
        train(True, torch_compile=True, torch_compile_backend="amp")


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_accelerate(precision):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from examples.ecosystem.accelerate_loop import train

    accelerate.state.AcceleratorState._reset_state(True)
    eager, eager_loss = train(False)
    accelerate.state.AcceleratorState._reset_state(True)
    ours, our_loss = train(True, lower="aot_eager", precision=precision)
    assert our_loss == pytest.approx(eager_loss, rel=0.01)
    assert distance(weights(ours), weights(eager)) < 0.01
    with pytest.raises(ValueError, match="not a valid DynamoBackend"):  # if not: the example can be simpler
        accelerate.Accelerator(dynamo_backend="amp", cpu=True)


def test_lightning():
    pytest.importorskip("lightning", reason="lightning is not installed")
    from examples.ecosystem.lightning_module import train

    (ours, our_scaler), (eager, eager_scaler) = train(True, lower="aot_eager"), train(False)
    assert our_scaler.get_scale() == eager_scaler.get_scale() < 2.0**20
    assert ours.losses == pytest.approx(eager.losses, rel=0.02)
    assert distance(weights(ours), weights(eager)) < 0.01
    assert isinstance(ours.net, torch.nn.Sequential)
