"""In loops that others write: containers of optimizers, checkpoints of torch.distributed."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import ampcompile
from tests.scaler.cases import assert_close, assert_equal

DISTRIBUTED = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch was built without torch.distributed"
)
KWARGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
AS_TITAN = [
    ("Adam", {"fused": True, "foreach": False}),
    ("AdamW", {"fused": False, "foreach": True}),
    ("AdamW", {"fused": False, "foreach": False}),
]


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).to(dtype)


def values(net: nn.Module) -> list[Tensor]:
    return [value.detach() for value in net.state_dict().values() if value.is_floating_point()]


class Container(torch.optim.Optimizer):
    """One optimizer for each part of a model, as torchtitan's: an optimizer by name, which is given no step."""

    def __init__(self, parts: list[nn.Module], kind: Any, kwargs: dict[str, Any]) -> None:
        self.parts, self.optimizers = parts, [kind(part.parameters(), **kwargs) for part in parts]
        super().__init__([param for part in parts for param in part.parameters()], kwargs)

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        pairs = zip(self.parts, self.optimizers, strict=True)
        return {k: v for pair in pairs for k, v in get_optimizer_state_dict(*pair, options=flat).items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, saved, options=flat)


def parts_of(net: nn.Sequential) -> list[nn.Module]:
    """Two parts with names of their own, as the stages of a pipeline have them."""
    return [nn.ModuleDict({"first": net[0]}), nn.ModuleDict({"last": net[2]})]


def train(net: nn.Module, optimizer: Any, batches: range, schedulers: Any = (), clip: bool = True) -> None:
    for seed in batches:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        net(x.to(next(net.parameters()).dtype)).float().square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(list(net.parameters()), 0.1)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


@DISTRIBUTED
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # torch.distributed's own
@pytest.mark.parametrize(("name", "implementation"), AS_TITAN, ids=str)
def test_a_container_of_optimizers_trains_saves_and_resumes_as_with_torchs(
    name: str, implementation: dict[str, bool], tmp_path: Path
) -> None:
    from torch.distributed import checkpoint

    kwargs, both = KWARGS | implementation, (ampcompile.optim, torch.optim)
    made = []
    for optim in both:
        container = Container(parts_of(net := model()), getattr(optim, name), kwargs)
        train(net, container, range(3), [LambdaLR(each, lambda step: 0.9**step) for each in container])
        checkpoint.save(
            {"model": net.state_dict(), "optimizer": container.state_dict()}, checkpoint_id=tmp_path / optim.__name__
        )
        made.append((net, container))
    (mine, ours), (theirs, torchs) = made
    assert_close(values(mine), values(theirs))
    saved, expected = ours.state_dict(), torchs.state_dict()
    assert list(saved) == list(expected)
    for key, value in expected.items():
        assert type(saved[key]) is type(value)
        assert_close([saved[key]], [value]) if isinstance(value, Tensor) else None
    assert all(each._ampcompile_step.reason is None for each in ours)

    mine.zero_grad()  # with gradients torch.distributed would make no state to load into
    beside = Container(parts_of(mine), getattr(torch.optim, name), kwargs)
    beside.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(mine, beside, range(3, 5))
    for optim, saver in zip(both, reversed(both), strict=True):
        resumed = Container(parts_of(other := model(1)), getattr(optim, name), kwargs)
        state = {"model": other.state_dict(), "optimizer": resumed.state_dict()}  # which makes state by a step of 0
        checkpoint.load(state, checkpoint_id=tmp_path / saver.__name__)
        other.load_state_dict(state["model"])
        resumed.load_state_dict(state["optimizer"])
        train(other, resumed, range(3, 5))
        assert_close(values(other), values(mine))


@DISTRIBUTED
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("how", ["remainder", "float32", "stochastic"])
def test_masters_go_through_a_distributed_checkpoint_and_on_with_their_bits(how: str, tmp_path: Path) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def made(seed: int) -> tuple[nn.Module, Any]:
        net = model(seed, torch.bfloat16)
        return net, ampcompile.optim.AdamW(net.parameters(), **KWARGS, masters=how, seed=3)

    (net, optimizer), (other, resumed) = made(0), made(1)
    train(net, optimizer, range(3))
    state = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    checkpoint.save(state, checkpoint_id=tmp_path)
    train(other, resumed, range(7, 8))
    found = dict(zip(("model", "optimizer"), get_state_dict(other, resumed), strict=True))
    checkpoint.load(found, checkpoint_id=tmp_path)
    set_state_dict(other, resumed, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    for each, by in ((net, optimizer), (other, resumed)):
        train(each, by, range(3, 6))
    assert_equal(values(other), values(net))
    assert resumed._ampcompile_step.reason is None
