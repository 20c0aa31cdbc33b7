"""Through checkpoints of torch.distributed a training goes on as it was, from files of our classes and of torch's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from tests.scaler.cases import assert_close, assert_equal

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),  # torch.distributed's own
]
KWARGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
AS_TITAN = [
    ("Adam", {"fused": True, "foreach": False}),
    ("AdamW", {"fused": False, "foreach": True}),
    ("AdamW", {"fused": False, "foreach": False}),
]


def made(start: int, kind: Any, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(start)
    net = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).to(dtype)
    return net, kind(net.parameters(), **KWARGS, **options)


def train(net: nn.Module, optimizer: Any, batches: range) -> list[Tensor]:
    for seed in batches:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        net(x.to(next(net.parameters()).dtype)).float().square().mean().backward()
        nn.utils.clip_grad_norm_(list(net.parameters()), 0.1)
        optimizer.step()
    return [param.detach() for param in net.parameters()]


def states(net: nn.Module, optimizer: Any, flat: bool) -> dict[str, Any]:
    """As torch.distributed has them, which takes a step of rate 0 if there is no state; `flat`: as torchtitan's."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    optimizer.zero_grad()  # with gradients it makes none
    model, state = get_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    return {"model": model, "optimizer": state}


def resume(net: nn.Module, optimizer: Any, flat: bool, folder: Path) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    found = states(net, optimizer, flat)
    checkpoint.load(found, checkpoint_id=folder)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_state_dict(
        net, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"], options=options
    )


@pytest.mark.parametrize(("name", "implementation"), AS_TITAN, ids=str)
@pytest.mark.parametrize("flat", [False, True])
def test_files_go_both_ways(name: str, implementation: dict[str, bool], flat: bool, tmp_path: Path) -> None:
    from torch.distributed import checkpoint

    kinds, files = [getattr(optim, name) for optim in (ampcompile.optim, torch.optim)], []
    for kind in kinds:
        net, optimizer = made(0, kind, **implementation)
        train(net, optimizer, range(3))
        files.append(states(net, optimizer, flat))
        checkpoint.save(files[-1], checkpoint_id=tmp_path / kind.__module__)
    assert [list(file["optimizer"]) for file in files] == [list(files[0]["optimizer"])] * 2
    expected = train(net, optimizer, range(3, 5))
    for kind, saver in zip(kinds, reversed(kinds), strict=True):
        other, resumed = made(1, kind, **implementation)
        resume(other, resumed, flat, tmp_path / saver.__module__)
        assert_close(train(other, resumed, range(3, 5)), expected)


@pytest.mark.parametrize("how", ["remainder", "float32", "stochastic"])
def test_masters_go_on_with_their_bits(how: str, tmp_path: Path) -> None:
    from torch.distributed import checkpoint

    whole, resumed = (made(start, ampcompile.optim.AdamW, torch.bfloat16, masters=how, seed=3) for start in (0, 1))
    train(*whole, range(3))
    checkpoint.save(states(*whole, False), checkpoint_id=tmp_path)
    train(*resumed, range(7, 8))
    resume(*resumed, False, tmp_path)
    assert_equal(train(*resumed, range(3, 6)), train(*whole, range(3, 6)))
    assert "step: fused" in str(resumed[1])
