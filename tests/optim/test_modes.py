"""Steps, clippings and scalers under modes and transforms are torch's, and those after them are right."""

import random
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ampcompile
from ampcompile.errors import OptimizerError
from ampcompile.optim.fused_step import step_of
from tests.scaler.cases import assert_equal


class Frozen(TorchDispatchMode):
    """No operation under it writes."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op._schema.is_mutable:
            return args[0] if op._schema.returns else None
        return op(*args, **(kwargs or {}))


def within(mode: Any) -> Any:
    def call(f: Any, x: Tensor) -> None:
        with mode():
            f(x)

    return call


ACTING = {
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "grad of functionalize": lambda f, x: torch.func.grad(torch.func.functionalize(f))(x),
    "make_fx": lambda f, x: make_fx(f)(x),
    "make_fx on fakes": lambda f, x: make_fx(f, None, "fake", _allow_non_fake_inputs=True)(x),
    "fakes": within(lambda: FakeTensorMode(allow_non_fake_inputs=True)),
    "a mode of the user's": within(Frozen),
}
OPTIONS = {
    "SGD": ({"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adam": ({"lr": 0.1, "amsgrad": True}, {"lr": 0.1, "foreach": False}),
    "AdamW": ({"lr": 0.1}, {"lr": 0.1, "fused": True}, {"lr": 0.1, "capturable": False, "foreach": True}),
}


class Loop:
    """A training in pieces: of our classes, or of torch's."""

    def __init__(self, ours: bool, kind: str, options: dict[str, Any], scaling: bool) -> None:
        self.params = [nn.Parameter(torch.linspace(1, 2, n)) for n in (3, 40)]
        self.optimizer = getattr(ampcompile.optim if ours else torch.optim, kind)(self.params, **options)
        scaler = ampcompile.GradScaler if ours else torch.amp.GradScaler
        self.scaler = scaler("cpu", init_scale=4.0, enabled=scaling, growth_interval=2)

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for param in self.params:
            param.grad = torch.randn(param.shape, generator=generator)

    def clip(self) -> None:
        self.scaler.scale(torch.ones(()))
        self.scaler.unscale_(self.optimizer)
        by_torch = partial(nn.utils.clip_grad_norm_, self.params)
        getattr(self.optimizer, "clip_grad_norm_", by_torch)(0.5)

    def step(self) -> None:
        self.scaler.scale(torch.ones(()))
        self.scaler.step(self.optimizer) if self.scaler.is_enabled() else self.optimizer.step()
        self.scaler.update()

    def do(self, *whats: str) -> list[str]:
        """Return the errors that actions raise, or nothing."""
        told = []
        for what in whats:
            try:
                getattr(self, what)()
                told.append("")
            except Exception as error:
                told.append(type(error).__name__)
        return told

    def run(self, mode: str, before: list[str], inside: list[str], after: list[str]) -> list[Any]:
        self.fill(0)
        told: list[Any] = self.do(*before)
        if "step" in before and before[-1] != "clip":
            self.fill(3)  # after a step of ours under a scaler they are still scaled

        def f(x: Tensor) -> Tensor:
            told.extend(self.do(*inside))
            return x.sum()

        try:
            ACTING[mode](f, torch.ones(2))
        except Exception as error:
            told.append(type(error).__name__)
        told.extend(param.detach().clone() for param in self.params)
        for seed in (1, 2):
            self.fill(seed)
            told += [*self.do(*after), *(param.detach().clone() for param in self.params)]
        return told


def draw() -> tuple[Any, ...]:
    rng = random.Random(int(torch.randint(2**31, ()).item()))
    kind, scaling = rng.choice(list(OPTIONS)), rng.random() < 0.3
    before = rng.choice([[], ["step"], ["clip"], ["clip", "step"]])
    inside = rng.choice([["step"], ["clip", "step"], *([] if scaling else [["clip"], ["step", "step"]])])
    if scaling and before == ["clip"]:  # once in an iteration
        inside = ["step"]
    return kind, rng.choice(OPTIONS[kind]), scaling, before, inside, rng.choice([["step"], ["clip", "step"]])


@pytest.mark.parametrize("mode", ACTING)
@pytest.mark.parametrize("number", range(6))
@pytest.mark.filterwarnings("ignore")
def test_a_mode_that_acts_sees_torchs_step_and_the_next_one_is_right(mode: str, number: int) -> None:
    kind, options, scaling, before, inside, after = draw()
    ours, torchs = (Loop(o, kind, options, scaling).run(mode, before, inside, after) for o in (True, False))
    for got, expected in zip(ours, torchs, strict=True):
        if isinstance(expected, Tensor):
            torch.testing.assert_close(
                got, expected, msg=lambda m: f"{kind, options, scaling, before, inside, after} {m}"
            )
        elif expected and not got:
            break  # torch's can't go on from here
        else:
            assert bool(got) == bool(expected), (kind, options, scaling, before, inside, after, ours, torchs)


@pytest.mark.parametrize("mode", ACTING)
@pytest.mark.parametrize("own", [{"masters": "remainder"}, {"masters": "stochastic"}, {"states": "bfloat16"}], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_a_step_with_masters_or_coded_states_is_refused_there_and_writes_nothing(mode: str, own: Any) -> None:
    param, errors = nn.Parameter(torch.ones(3).to(torch.bfloat16 if "masters" in own else torch.float32)), []
    optimizer, what = ampcompile.optim.AdamW([param], lr=0.1, **own), "masters" if "masters" in own else "coded states"

    def f(x: Tensor) -> Tensor:
        with pytest.raises(OptimizerError, match=f"found a step with {what} under .*, expected one outside of it"):
            optimizer.step()
        errors.append(optimizer)
        return x.sum()

    param.grad = torch.ones_like(param)
    ACTING[mode](f, torch.ones(2))
    assert errors and not optimizer.state and (param == 1).all()
    optimizer.step()
    assert not (param == 1).all()


WATCHING: dict[str, Any] = {
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "MemTracker": MemTracker,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "a default device": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("mode", WATCHING)
def test_what_only_watches_leaves_the_step_as_it_is(mode: str) -> None:
    kind, options, scaling, *_ = draw()
    results = []
    for within in (nullcontext, WATCHING[mode]):
        loop = Loop(True, kind, options, scaling)
        for seed in range(3):
            loop.fill(seed)
            with within() if seed else nullcontext():
                loop.clip()
                loop.step()
                assert step_of(loop.optimizer).reason is None
        results.append([param.detach() for param in loop.params])
    assert_equal(*results)
