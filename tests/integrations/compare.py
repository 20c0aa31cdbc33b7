"""One loop in float32, eagerly under the framework's own autocast, and with amp."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint

import ampcompile
from ampcompile.optim.plan import Plan
from ampcompile.torch_private import optimizers
from examples.recipes.recipe import distance
from tests.compiling import same_bits

# Of several filters that fit a warning the last counts: ours stay errors.
QUIET = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "error::ampcompile.AmpWarning"
)
LOWER = {"lower": "aot_eager"}


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters() if p.requires_grad]


def compare(train: Callable[[str], tuple[nn.Module, float]], steps: int = 12) -> nn.Module:
    """What amp trained. Its error beside float32 is eager autocast's; all steps are fused, and write all copies."""
    exact, _ = train("float32")
    eager, eager_loss = train("autocast")
    with fused_steps() as casts:
        ours, loss = train("amp")
    assert len(casts) == steps
    # A tied weight is cast once more, after the first step.
    assert 0 < casts[1] == casts[-1] == ampcompile.weight_stats().casts, "no weight is cast after a step"
    rounding = distance(weights(eager), weights(exact))
    assert 0 < distance(weights(ours), weights(exact)) < 1.2 * rounding
    assert distance(weights(ours), weights(eager)) < 0.3 * rounding
    assert loss == pytest.approx(eager_loss, rel=1e-3)
    return ours


@contextmanager
def fused_steps() -> Iterator[list[int]]:
    """Note the passes that have cast weights, at each fused step; torch's own take none."""
    casts: list[int] = []
    run = Plan.run

    def noting(*args: Any) -> None:
        casts.append(ampcompile.weight_stats().casts)
        run(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "run", noting)
        patch.setattr(optimizers, "bare_step", None)
        yield casts


def same_keys(saved: Any, model: nn.Module) -> None:
    """A checkpoint holds the model's own names, no `_orig_mod`, and its weights."""
    state = model.state_dict()
    assert set(saved) == set(state)
    assert all(saved[name].equal(state[name]) for name in saved)


def compare_scalers(train: Callable[[Any], float], caplog: pytest.LogCaptureFixture) -> None:
    """A scaler of ours ends as torch's does, after scales that overflowed; `train` takes it and returns the loss."""
    caplog.set_level("INFO", logger="ampcompile")
    scalers = [kind("cpu", init_scale=2.0**20, growth_interval=4) for kind in (GradScaler, ampcompile.GradScaler)]
    theirs, ours = ((train(scaler), scaler.get_scale()) for scaler in scalers)
    assert theirs == pytest.approx(ours) and ours[1] < 2.0**20
    assert "generic path" not in caplog.text, "steps are fused"


def compare_with_checkpoints(context: Callable[[], Any], backward: Callable[[Tensor], Any]) -> None:
    """In a library's context a compiled block has the same 16-bit gradients in a checkpoint as without."""
    block, x = nn.Linear(8, 8), torch.randn(4, 8)
    compiled = torch.compile(block, backend="amp", options=LOWER)

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        block.zero_grad()
        given = x.clone().requires_grad_()
        with context():
            y = run(given)
        backward(y.float().square().sum())
        return [given.grad, *(p.grad for p in block.parameters())]

    plain = gradients(compiled)
    for reentrant in (False, True):
        assert same_bits(gradients(lambda x, how=reentrant: checkpoint(compiled, x, use_reentrant=how)), plain)
    block.zero_grad()
    block(x).square().sum().backward()
    assert not same_bits([p.grad for p in block.parameters()], plain[1:])
