"""Drawn training programs with our optimizers and with torch's: the same norms, weights, states and scales.

`tests/scaler/test_differential.py` draws calls of a scaler in any order, right or wrong; here they are in the order of
loops, while anything between two steps may change. One history is left out, as docs/optimizer.md names it: gradients
that are added to clipped ones, which `.grad` of ours still has as they were.
"""

import copy
import math
import pickle
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR

import ampcompile
from tests.scaler.cases import all_params, scaled

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    ("Adam", {"amsgrad": True, "fused": True}),
    ("AdamW", {}),
    ("AdamW", {"fused": True, "maximize": True}),
]


class MySGD(ampcompile.optim.SGD):
    """Subclasses without a step of their own."""


class MyAdam(ampcompile.optim.Adam):
    pass


class MyAdamW(ampcompile.optim.AdamW):
    pass


CLASSES: dict[str, Callable[[str], Any]] = {
    "ours": lambda name: getattr(ampcompile.optim, name),
    "hooked": lambda name: getattr(ampcompile.optim, name),
    "with a float64 parameter": lambda name: getattr(ampcompile.optim, name),
    "subclass": lambda name: {"SGD": MySGD, "Adam": MyAdam, "AdamW": MyAdamW}[name],
    "exchanged": lambda name: getattr(torch.optim, name),
}
SCALERS: dict[str, tuple[Any, Any]] = {
    "none": (None, None),
    "torch's": (torch.amp.GradScaler, torch.amp.GradScaler),
    "ours": (ampcompile.GradScaler, torch.amp.GradScaler),
    "ours, disabled": (ampcompile.GradScaler, torch.amp.GradScaler),
}


def normal(shape: Any, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32)


class Side:
    """An optimizer, perhaps with a scaler and schedulers."""

    def __init__(self, kind: Any, options: dict[str, Any], scaler: Any, how: str, held: str) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = [normal(shape, generator) for shape in ((4, 4), (4, 4), (), (2, 3, 4))]
        if held == "with a float64 parameter":
            drawn[3] = drawn[3].double()
        params = [nn.Parameter(values) for values in drawn]
        self.optimizer = kind([{"params": params[:2]}, {"params": params[2:], "lr": 0.2}], lr=0.1, **options)
        if held == "hooked":
            self.optimizer.register_step_post_hook(lambda *_: None)
        self.scaler = scaler and scaled(scaler, init_scale=16.0, growth_interval=2, enabled="disabled" not in how)
        self.schedules: list[Any] = []

    @property
    def ours(self) -> bool:
        return isinstance(self.optimizer, ampcompile.optim.FusedOptimizer)

    @property
    def params(self) -> list[nn.Parameter]:
        return all_params(self.optimizer)

    def exchange(self) -> None:
        """Let a scaler of ours meet an optimizer of torch's."""
        self.optimizer.zero_grad()
        ampcompile.GradScaler("cpu", enabled=False).step(self.optimizer)

    def take(self, optimizer: Any) -> None:
        """Go on with a copy."""
        if self.ours and not hasattr(optimizer, "clip_grad_norm_"):
            self.optimizer = optimizer
            self.exchange()  # it was pickled as torch's class
        self.optimizer, self.schedules = optimizer, []

    def schedule(self, make: Any) -> None:
        self.schedules = [*self.schedules, make(self.optimizer)][:1]

    def fill(self, how: str, seed: int, bad: float | None, missing: int | None) -> None:
        """Negated ones are of the norm that the last were of."""
        if how.startswith("zero"):
            self.optimizer.zero_grad(set_to_none=how == "zeroed, none")
        scale, negated = self.scaler.get_scale() if self.scaler else 1.0, how == "unseen, negated"
        generator = torch.Generator().manual_seed(seed - negated)
        for number, param in enumerate(self.params):
            new = normal(param.shape, generator) * (-scale if negated else scale)
            values = torch.empty_like(param).detach().copy_(new)
            if bad is not None and number == 0:
                values[-1, -1] = bad
            if number == missing and not how.startswith("unseen"):
                param.grad = None
            elif param.grad is None or how == "replaced" or param.grad.stride() != param.stride():
                param.grad = values
            elif how in ("accumulated", "zeroed"):
                param.grad += values
            else:
                (param.grad.data if how.startswith("unseen") else param.grad).copy_(values)

    def clip(self, by: str, calls: list[tuple[Any, ...]]) -> list[Any]:
        """By our scaler, the optimizer's own method or torch's functions; norms, or the words of errors."""
        by_scaler, results = by == "scaler" and isinstance(self.scaler, ampcompile.GradScaler), []
        if self.scaler is not None and not by_scaler:
            self.scaler.unscale_(self.optimizer)
        for name, *arguments in calls:
            clip = partial(getattr(nn.utils, name), self.params)
            if by_scaler:
                clip = partial(getattr(self.scaler, name), self.optimizer)
            elif self.ours and by != "torch" and name == "clip_grad_norm_":
                clip = self.optimizer.clip_grad_norm_
            try:
                results.append(clip(*arguments))
            except RuntimeError as error:
                results.append(str(error))
        return results

    def step(self, how: str, checked: bool) -> None:
        if self.scaler is None:
            for _ in range({"left out": 0, "twice": 2}.get(how, 1)):
                self.optimizer.step()
        else:
            if how != "left out":
                self.scaler.step(self.optimizer)
            elif not checked:
                self.scaler.unscale_(self.optimizer)
            if self.scaler.is_enabled() or how != "left out":
                self.scaler.update()
        for schedule in self.schedules:
            schedule.step()


def set_all(name: str, value: Callable[[], Any]) -> Callable[[Side], Any]:
    def change(side: Side) -> None:
        for group in side.optimizer.param_groups:
            if name in group:
                group[name] = value()

    return change


def add_group(side: Side) -> None:
    side.optimizer.add_param_group({"params": [nn.Parameter(torch.full((3, 3), 0.5, dtype=torch.float32))], "lr": 0.3})
    side.schedules = []  # torch's go on with the groups that there were


def transpose(side: Side) -> None:
    """At the same address: the state that there is has other strides then, which torch's fused step doesn't see."""
    if not side.optimizer.defaults["fused"]:
        side.params[0].data = side.params[0].data.t()


def double_states(side: Side) -> None:
    for param in side.params[:2]:
        for name, value in side.optimizer.state[param].items():
            if name != "step" and isinstance(value, Tensor):
                side.optimizer.state[param][name] = value * 2


def swap_states(side: Side) -> None:
    state, (first, second, *_) = side.optimizer.state, side.params
    if all(state.get(param, {}).get("step", 0) > 0 for param in (first, second)):
        state[first], state[second] = state[second], state[first]


def move_a_parameter(side: Side) -> None:
    first, second = side.optimizer.param_groups[:2]
    if len(first["params"]) > 1:
        second["params"].insert(0, first["params"].pop())


CHANGES: dict[str, Callable[[Side], Any]] = {
    "nothing": lambda side: None,
    "copied deep": lambda side: side.take(copy.deepcopy(side.optimizer)),
    "copied flat": lambda side: side.take(copy.copy(side.optimizer)),
    "pickled": lambda side: side.take(pickle.loads(pickle.dumps(side.optimizer))),
    "a scheduler": lambda side: side.schedule(lambda optimizer: ExponentialLR(optimizer, 0.9)),
    "one of cosines": lambda side: side.schedule(lambda optimizer: CosineAnnealingLR(optimizer, 20)),
    "one cycle": lambda side: side.schedule(
        lambda optimizer: OneCycleLR(optimizer, 0.1, 40, cycle_momentum=optimizer.defaults.get("momentum") != 0)
    ),
    "a scaler's state": lambda side: side.scaler and side.scaler.load_state_dict(side.scaler.state_dict()),
    "a weight elsewhere": lambda side: setattr(side.params[0], "data", side.params[0].data.clone()),
    "a weight transposed in place": transpose,
    "frozen": lambda side: side.params[2].requires_grad_(False),
    "a group added": add_group,
    "a state loaded": lambda side: side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict())),
    "other tensors of state": double_states,
    "states swapped": swap_states,
    "a state forgotten": lambda side: side.optimizer.state.pop(side.params[1], None),
    "a parameter in another group": move_a_parameter,
    "a learning rate": set_all("lr", lambda: 0.01),
    "a learning rate that is a tensor": set_all("lr", lambda: torch.tensor(0.01, dtype=torch.float32)),
    "betas": set_all("betas", lambda: (0.5, 0.6)),
    "weight decay": set_all("weight_decay", lambda: 0.3),
    "maximize": set_all("maximize", lambda: True),
    "momentum": set_all("momentum", lambda: 0.5),
    "no momentum": set_all("momentum", lambda: 0.0),
    "amsgrad off": set_all("amsgrad", lambda: False),
    "amsgrad off in one group": lambda side: side.optimizer.param_groups[0].update(amsgrad=False),
}
FILLS = ("zeroed, none", "zeroed", "in place", "unseen", "unseen, negated", "replaced", "accumulated")
BETWEEN: dict[str, Callable[[Side], Any]] = {
    "a hook": lambda side: side.optimizer.register_step_pre_hook(lambda *_: None),
    "some gradients gone": lambda side: [setattr(param, "grad", None) for param in side.params[1:]],
    "another scaler": lambda side: setattr(side, "scaler", pickle.loads(pickle.dumps(side.scaler))),
}
"""What happens between a clipping and the step"""


def drawn_clip(rng: random.Random, how: str) -> tuple[str, list[tuple[Any, ...]]]:
    by, value = rng.choice(("scaler", "scaler", "scaler", "method", "torch")), rng.choice((0.5, 3.0, math.inf))
    norm = (rng.choice((0.5, 0.5, 3.0, math.inf, torch.tensor(0.7))), rng.choice((2.0, 2.0, 1.0, "inf")))
    by_norm, again = ("clip_grad_norm_", *norm, rng.random() < 0.3), ("clip_grad_norm_", 0.3)
    by_value = ("clip_grad_value_", value)
    calls: list[list[tuple[Any, ...]]] = [[by_norm], [by_norm], [by_norm, again], [by_value], [by_value, by_norm]]
    if how.startswith("ours") and by == "scaler":  # torch's function would write what the first has measured
        calls.append([by_norm, by_value])
    return by, rng.choice(calls)


def drawn(rng: random.Random, how: str, changes: list[str]) -> list[dict[str, Any]]:
    """A program: what each iteration does. Only what torch's loop could do as well."""
    enabled, program, clip, bad = how in ("torch's", "ours"), list[dict[str, Any]](), None, None
    waits = False  # a clipping whose step wasn't taken: the loop zeroes its gradients, or clips again
    for number in range(8):
        fills = FILLS[:2] if waits else FILLS[:6] if enabled or bad or (clip and clip[0] != "torch") else FILLS
        clip, bad = rng.choice((None, drawn_clip(rng, how))), rng.choice((None, None, math.inf, math.nan))
        step = rng.choice(("once", "once", "once", "left out", "twice"))
        bad = bad if enabled or step == "left out" else None
        waits = how != "ours" and clip is not None and (step == "left out" or bad is not None)
        changing = number > 1 and rng.random() < 0.6
        program.append(
            {
                "change": rng.choice(changes) if changing else "nothing",
                "load": rng.random() < 0.15,
                "fill": (rng.choice(fills), number, bad, rng.choice((None, None, None, 1))),
                "clip": clip,
                "between": rng.choice(list(BETWEEN)[: 3 if "disabled" in how else 2])
                if clip and rng.random() < 0.3
                else None,
                "step": "once" if step == "twice" and enabled else step,
            }
        )
    return program


def run(kind: tuple[str, dict[str, Any]], held: str, how: str, program: list[dict[str, Any]]) -> None:
    name, options = kind
    mine, theirs = sides = [
        Side(make, options, scaler, how, held)
        for make, scaler in zip((CLASSES[held](name), getattr(torch.optim, name)), SCALERS[how], strict=True)
    ]
    for number, turn in enumerate(program):
        if turn["load"] and number:  # files go both ways
            files = [copy.deepcopy(side.optimizer.state_dict()) for side in sides]
            if all(files[1]["state"].values()) and files[0]["state"].keys() == files[1]["state"].keys():
                for side, file in zip(sides, reversed(files), strict=True):
                    side.optimizer.load_state_dict(file)
        if number == 2 and not mine.ours and held == "exchanged":
            mine.exchange()
            theirs.optimizer.zero_grad()
        norms = []
        for side in sides:
            CHANGES[turn["change"]](side)
            side.fill(*turn["fill"])
            if turn["clip"]:
                norms.append(side.clip(*turn["clip"]))
            if turn["between"]:
                BETWEEN[turn["between"]](side)
            side.step(turn["step"], turn["clip"] is not None)
        for pair in zip(*norms, strict=True):
            if isinstance(pair[1], Tensor):
                torch.testing.assert_close(*pair, rtol=1e-5, atol=0, equal_nan=True)
            else:
                assert pair[0] == pair[1]
        compare(mine, theirs)
    transposed = any(turn["change"] == "a weight transposed in place" for turn in program)
    stays = held == "exchanged" and any(turn["between"] == "a hook" for turn in program)  # a scaler leaves it torch's
    if turn["step"] != "left out" and not (transposed or stays) and held != "with a float64 parameter":
        assert "step: fused" in str(mine.optimizer) or torch.get_default_dtype() == torch.float64


def compare(mine: Side, theirs: Side) -> None:
    if mine.scaler is not None:
        assert mine.scaler.get_scale() == theirs.scaler.get_scale()
    for ours, others in zip(mine.params, theirs.params, strict=True):
        torch.testing.assert_close(ours, others, rtol=1e-5, atol=1e-6)
        state, expected = mine.optimizer.state.get(ours, {}), theirs.optimizer.state.get(others, {})
        if not (any(value is not None for value in expected.values()) and state):  # only skipped steps so far
            assert all(value is None or not value.any() for value in (*state.values(), *expected.values()))
            continue
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            exact = {"rtol": 0, "atol": 0} if name == "step" else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(state[name], value, **exact)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("how", SCALERS)
@pytest.mark.parametrize("held", CLASSES)
def test_programs_train_as_with_torchs_classes(held: str, how: str) -> None:
    """Also where the user's default type isn't float32."""
    rng = random.Random(int(torch.randint(2**31, ()).item()))
    for turn in range(15):
        kind, program = KINDS[turn % len(KINDS)], drawn(rng, how, list(CHANGES))
        default = (torch.float32, torch.float32, torch.float64, torch.bfloat16)[turn % 4]
        torch.set_default_dtype(default)
        try:
            run(kind, held, how, program)
        except BaseException as error:
            error.add_note(f"{default} {kind} {program}")
            raise
        finally:
            torch.set_default_dtype(torch.float32)
