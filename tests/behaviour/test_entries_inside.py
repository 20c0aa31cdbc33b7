"""Public functions and methods of ours, called inside a compiled function, do what they do outside, in silence."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import ampcompile
from ampcompile.errors import AmpError
from tests.compiling import HALF, LOW


class Encoder(nn.Linear):
    """A module with another method than `forward`."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) * 2


class Setting:
    """What entries are called on: twins of one seed are alike. `copies`: of weights, as a compiled call made them."""

    def __init__(self, seed: int, copies: bool) -> None:
        torch.manual_seed(seed)
        self.model, self.x = Encoder(8, 8), torch.randn(2, 8)
        self.compiled = torch.compile(self.model, backend="amp", options={"lower": "aot_eager", "watch": True})
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.fused = ampcompile.optim.SGD(self.model.parameters(), 0.1)
        self.in_16_bits = torch.optim.SGD(nn.Linear(8, 8, dtype=LOW).parameters(), 0.1)
        self.scaler = ampcompile.GradScaler("cpu", init_scale=8.0)
        if copies:
            with torch.no_grad():
                self.compiled(self.x)
        self.numbers = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.scaler.scale((self.compiled if copies else self.model)(self.x).square().mean()).backward()

    def step(self, x: torch.Tensor) -> Any:
        """A step of training."""
        return self.model(x).sum().backward()

    @property
    def state(self) -> list[Any]:
        """All that an entry may change."""
        scaler = self.scaler.state_dict()
        return [*self.model.state_dict().values(), *(p.grad for p in self.model.parameters()), scaler]


def released(s: Setting) -> Any:
    s.optimizer.zero_grad()
    released = ampcompile.release_masters(s.model)
    dtype = s.model.weight.dtype
    released.restore(s.numbers)
    return dtype, s.model.weight.dtype


def in_blocks(s: Setting) -> Any:
    with ampcompile.keep_fp32:
        return s.x.to(LOW) @ s.x.T


def keep_module(s: Setting) -> Any:
    return [part(s.x.to(LOW)) for part in (ampcompile.keep_fp32(nn.GELU()), ampcompile.keep_fp32(nn.Tanh)())]


ENTRIES: dict[str, Callable[[Setting], Any]] = {
    "Policy": lambda s: str(ampcompile.Policy.parse("op softmax*=low")),
    "audit": lambda s: ampcompile.audit(s.model, lower="aot_eager")(s.x).error > 0,
    "capture_step": lambda s: type(ampcompile.capture_step(s.step, s.optimizer)).__name__,
    "compare": lambda s: (
        ampcompile.compare(*(ampcompile.record(s.model, lower="aot_eager")(s.x) for _ in range(2))).agree
    ),
    "compile_methods": lambda s: ampcompile.compile_methods(s.model, "encode", lower="aot_eager"),
    "explain": lambda s: len(ampcompile.explain(s.model)(s.x).casts),
    "export": lambda s: len(ampcompile.export(s.model, (s.x,)).graph.nodes),
    "free_copies": lambda s: ampcompile.free_copies(s.model),
    "invalidate": lambda s: ampcompile.invalidate(s.model),
    "keep_fp32": lambda s: (in_blocks(s), ampcompile.keep_fp32(torch.square)(s.x.to(LOW)), keep_module(s)),
    "keep_masters": lambda s: ampcompile.keep_masters(s.in_16_bits).remove(),
    "precision": lambda s: ampcompile.precision(HALF)(s.model.forward)(s.x),
    "profile_step": lambda s: ampcompile.profile_step(s.step, steps=1)(s.x).wall > 0,
    "record": lambda s: type(ampcompile.record(s.model, lower="aot_eager")(s.x)).__name__,
    "register_op": lambda s: ampcompile.register_op("made_up::op", "fp32"),
    "release_masters": released,
    "shard_policy": lambda s: ampcompile.shard_policy(s.model),  # there is no FSDP module: it says so
    "watch": lambda s: ampcompile.watch(s.compiled).report().first,
    "weight_stats": lambda s: ampcompile.weight_stats().bytes >= 0,
    "GradScaler": lambda s: ampcompile.GradScaler("cpu", init_scale=4.0).state_dict(),
}
METHODS: dict[str, Callable[[Setting], Any]] = {
    "clip_grad_norm_": lambda s: s.scaler.clip_grad_norm_(s.optimizer, 0.01),
    "clip_grad_value_": lambda s: s.scaler.clip_grad_value_(s.optimizer, 0.01),
    "get_backoff_factor": lambda s: s.scaler.get_backoff_factor(),
    "get_growth_factor": lambda s: s.scaler.get_growth_factor(),
    "get_growth_interval": lambda s: s.scaler.get_growth_interval(),
    "get_scale": lambda s: s.scaler.get_scale(),
    "is_enabled": lambda s: s.scaler.is_enabled(),
    "last_step_skipped": lambda s: s.scaler.last_step_skipped,
    "load_state_dict": lambda s: s.scaler.load_state_dict(s.scaler.state_dict() | {"scale": 16.0}),
    "scale": lambda s: s.scaler.scale(s.x),
    "set_backoff_factor": lambda s: s.scaler.set_backoff_factor(0.25),
    "set_growth_factor": lambda s: s.scaler.set_growth_factor(4.0),
    "set_growth_interval": lambda s: s.scaler.set_growth_interval(1),
    "state_dict": lambda s: s.scaler.state_dict(),
    "step": lambda s: s.scaler.step(s.optimizer),
    "step_skipped": lambda s: s.scaler.step_skipped(s.optimizer),
    "unscale_": lambda s: s.scaler.unscale_(s.optimizer),
    "update": lambda s: s.scaler.update(),
}

OPTIMIZER: dict[str, Callable[[Setting], Any]] = {
    "clip_grad_norm_": lambda s: s.fused.clip_grad_norm_(0.01),
    "step": lambda s: s.fused.step(),
}

READ_AND_SET = [*(name for name in METHODS if name.startswith("set_")), *(n for n in METHODS if n.startswith("get_"))]
CASES: dict[str, list[Callable[[Setting], Any]]] = {
    **{name: [call] for name, call in ENTRIES.items()},
    **{f"GradScaler.{name}": [call] for name, call in METHODS.items() if name not in READ_AND_SET},
    "what GradScaler is told and tells": [METHODS[name] for name in READ_AND_SET],
    **{f"optim.SGD.{name}": [call] for name, call in OPTIMIZER.items()},
}
READ_COPIES = {"free_copies", "invalidate", "release_masters", "watch", "weight_stats"}
READ_COPIES |= {"GradScaler.step", "optim.SGD.step"}


def outcome(run: Callable[[], Any]) -> Any:
    """What a call returns, or the error that it raises."""
    try:
        return run()
    except (AmpError, RuntimeError, ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"


def same(found: Any, expected: Any) -> bool:
    (a, shape), (b, other) = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    pairs = zip(a, b, strict=True) if shape == other else ()
    return shape == other and all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def check(calls: list[Callable[[Setting], Any]], backend: str, copies: bool = True) -> None:
    """Compare calls inside a compiled function with the same calls outside."""
    torch._dynamo.reset()
    outside, inside = Setting(seed := random.getrandbits(30), copies), Setting(seed, copies)
    options = {"options": {"lower": "aot_eager", "outputs": "autocast"}} if backend == "amp" else {}
    with torch.autocast("cpu") if backend == "amp" else nullcontext():
        expected = [outcome(lambda call=call: call(outside)) for call in calls]

    def f(x: torch.Tensor) -> Any:
        h = x * 2
        results = [call(inside) for call in calls]
        return h + 1, results

    found = outcome(lambda: torch.compile(f, backend=backend, **options)(torch.ones(2)))
    if errors := [each for each in expected if isinstance(each, str) and "Error: " in each]:
        assert found == errors[0]
        return
    assert not isinstance(found, str), found
    assert same(found[1], expected), (found[1], expected)
    assert same(inside.state, outside.state)


@pytest.mark.parametrize("name", CASES)
def test_an_entry_inside_is_the_entry_outside(name: str) -> None:
    check(CASES[name], "amp", copies=name in READ_COPIES)


@pytest.mark.ci
def test_entries_one_after_the_other_inside_another_backends_function() -> None:
    check([call for name, call in ENTRIES.items() if name != "shard_policy"], "eager")  # that one raises


def test_every_public_function_and_method_is_among_them() -> None:
    public = {n for n in ampcompile.__all__ if not n.endswith(("Error", "Warning"))}
    assert public == {*ENTRIES}
    assert {n for n in dir(ampcompile.GradScaler) if not n.startswith("_")} == {*METHODS}


@pytest.mark.parametrize(
    "backend", [*(pytest.param(name, marks=pytest.mark.ci) for name in ("eager", "aot_eager")), "amp"]
)
def test_drawn_methods_of_the_scaler_one_after_the_other(backend: str) -> None:
    for _ in range(4):
        names = random.choices([*METHODS], k=random.randint(2, 5))
        check([METHODS[name] for name in names], backend)
