"""Drawn training programs with our optimizers and with torch's: the same norms, weights, states and scales.

`tests/scaler/test_differential.py` draws calls of a scaler in any order, right or wrong; here they are in the order of
loops, while anything between two steps may change. One history is left out, as docs/optimizer.md names it: gradients
that are added to clipped ones, which `.grad` of ours still has as they were.
"""

import copy
import io
import math
import pickle
import random
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR

import ampcompile
from ampcompile.optim.masters import masters_of
from ampcompile.optim.plan import NARROW
from tests.scaler.cases import all_params, assert_equal, scaled

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


# Masters and coded states: the bits of a training that nothing interrupts and no scaler scales

NAMES: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.01, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "weight_decay": 0.1},
    "AdamW": {"lr": 0.01, "fused": True},
}
MASTERS, STATES = (None, "remainder", "remainder8", "float32", "stochastic"), ("float32", "bfloat16", "8bit")
KEPT = [kept for kept in product(MASTERS, STATES) if kept != (None, "float32")]
WAYS = ("ours", "subclass", "exchanged", "exchanged before")


def copy_weights(params: list[nn.Parameter], to: list[nn.Parameter]) -> None:
    for param, value in zip(to, params, strict=False):
        param.data.copy_(value.data)


class Kept(Side):
    """A model of odd shapes with its optimizer, which keeps masters, codes states, or both; and a scaler, perhaps."""

    def __init__(self, name: str, kept: tuple[str | None, str], way: str, how: str, half: Any, seed: int = 0) -> None:
        self.name, self.kept, self.way, self.half, self.schedules = name, kept, way, half, list[Any]()
        generator = torch.Generator().manual_seed(seed)
        weights = [normal(shape, generator) for shape in ((64, 67), (33, 7), (2, 3, 4, 2), (), (129,))]
        weights[2] = weights[2].contiguous(memory_format=torch.channels_last)
        low = [torch.bfloat16 if kept[0] else torch.float32] * 4 + [torch.float32]
        low[3] = half if kept[0] == "float32" else low[3]
        params = [nn.Parameter(weight.to(dtype)) for weight, dtype in zip(weights, low, strict=True)]
        given = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]
        settings = NAMES[name] | ({"amsgrad": True} if name == "Adam" and kept[1] == "float32" else {})
        if way.startswith("exchanged"):
            self.optimizer = getattr(torch.optim, name)(given, **settings)
            if way == "exchanged before":
                ampcompile.GradScaler("cpu", enabled=False).step(self.optimizer)
                self.schedule(lambda optimizer: ExponentialLR(optimizer, 1.0))
            ampcompile.keep_masters(self.optimizer, kept[0], states=kept[1], seed=3)
        else:
            self.optimizer = CLASSES[way](name)(given, **settings, masters=kept[0], states=kept[1], seed=3)
        scaler = SCALERS[how][0]
        self.scaler = scaler and scaled(scaler, init_scale=16.0, growth_interval=3, enabled="disabled" not in how)

    def wide(self) -> "Kept":
        """Its float32 twin, without masters."""
        other = Kept(self.name, (None, "float32"), "ours", "none", None)
        copy_weights(self.params, other.params)
        return other

    def resume(self, model_first: bool) -> None:
        """Go on from a file, in another model and optimizer."""
        file = io.BytesIO()
        torch.save((self.params, self.optimizer.state_dict()), file)
        file.seek(0)
        params, state = torch.load(file, weights_only=True)
        other = Kept(self.name, self.kept, self.way, "none", self.half, seed=1)
        for group in self.optimizer.param_groups[2:]:
            other.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros_like(group["params"][0]))]})
        for load_model in (model_first, not model_first):
            copy_weights(params, other.params) if load_model else other.optimizer.load_state_dict(state)
        self.take(other.optimizer)

    def use_copy_of_scaler(self) -> None:
        self.scaler = pickle.loads(pickle.dumps(self.scaler))
        if self.scaler:
            self.scaler.scale(torch.ones(()))

    def give(self, seed: int, bad: float | None, how: str) -> None:
        """Gradients of bfloat16 numbers that float16 holds, too, scaled or not."""
        generator, scale = torch.Generator().manual_seed(seed), self.scaler.get_scale() if self.scaler else 1.0
        self.optimizer.zero_grad(set_to_none=how != "in place")
        for number, param in enumerate(self.params):
            grad = normal(param.shape, generator).bfloat16().float() * scale
            grad = torch.where(grad.abs() < scale * 2.0**-10, 0.0, grad)
            if bad is not None and number == 0:
                grad[-1, -1] = bad
            if how == "new, one of float32" and number == 1:
                param.grad_dtype = torch.float32
            wide = param.grad_dtype if number == 1 else param.dtype
            value = torch.empty_like(param, dtype=wide).detach().copy_(grad)
            if how == "with other strides" and param.dim() == 2:
                value = value.t().contiguous().t()
            if param.grad is None:
                param.grad = value
            else:
                param.grad.copy_(value)

    def train(self, clip: float | None, bad: float | None) -> None:
        """By a closure where nothing is clipped, which would be clipped in place."""
        if clip is not None:
            self.clip("scaler", [("clip_grad_norm_", clip)])
        if self.scaler:
            self.step("once", clip is not None)
        elif bad is None:
            self.optimizer.step(*[lambda: None] * (clip is None))
        else:  # as by a scaler that found it
            self.optimizer.found_inf = torch.ones(())
            self.optimizer.step()
            del self.optimizer.found_inf

    def tensors(self) -> dict[str, Tensor]:
        """The float32 weights, the parameters, and all else that is kept."""
        held, masters = {f"{i}": param.detach() for i, param in enumerate(self.params)}, masters_of(self.optimizer)
        for i, param in enumerate(self.params):
            state = self.optimizer.state.get(param, {})
            if {"remainder", "master_param"} & state.keys() and param.dtype in NARROW:
                held[f"{i} weight"] = masters.read_weight(param.detach(), state)
            own = state.keys() - {"remainder", "checksums", "master_param"}  # without a remainder sums may be any
            held |= {f"{i} {name}": state[name] for name in sorted(own) if isinstance(state[name], Tensor)}
        return held


def write(side: Kept) -> None:
    for param in side.params[:2]:
        param.data.mul_(1.5)


def write_the_same(side: Kept) -> None:
    for param in side.params:
        before = param.detach().clone()
        param.data.mul_(0.5)
        param.data.copy_(before)


def add_large_group(side: Kept) -> None:
    late = nn.Parameter(torch.full((64, 64), 0.5, dtype=side.params[0].dtype))
    side.optimizer.add_param_group({"params": [late], "lr": 0.01})
    side.schedules = []


UNSEEN = ("nothing", "copied deep", "copied flat", "pickled", "a state loaded", "a weight elsewhere")
INTERRUPTIONS: dict[str, Callable[[Any], Any]] = {name: CHANGES[name] for name in UNSEEN} | {
    "resumed": lambda side: side.resume(True),
    "resumed, the model last": lambda side: side.resume(False),
    "the same bits written": write_the_same,
    "a scaler's pickle": Kept.use_copy_of_scaler,
}
OF_BOTH = {"weights written": write, "a group added": add_large_group, "a rate": set_all("lr", lambda: 0.005)}
"""What changes the numbers, done to every side"""


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("kept", "way"),
    [
        pytest.param(kept, way, marks=pytest.mark.ci if (i + j) % 2 else (), id=f"{way}-{kept}")
        for i, way in enumerate(WAYS)
        for j, kept in enumerate(KEPT)
    ],
)
def test_what_keeps_masters_or_codes_states_has_the_bits_of_an_uninterrupted_run(
    kept: tuple[str | None, str], way: str
) -> None:
    """And masters, where none are rounded at random, those of a run in float32."""
    rng = random.Random(int(torch.randint(2**31, ()).item()))
    for name, how in zip(NAMES, rng.sample(list(SCALERS), 3), strict=True):
        half = torch.bfloat16 if how == "torch's" else torch.float16  # which torch's scaler doesn't unscale
        sides, told = [Kept(name, kept, way, how, half), Kept(name, kept, "ours", "none", half)], list[Any]()
        try:
            if kept[0] in ("remainder", "float32") and kept[1] == "float32":
                sides.append(sides[1].wide())
            for turn in range(8):
                change = rng.choice([*INTERRUPTIONS, *OF_BOTH]) if turn and rng.random() < 0.8 else "nothing"
                bad = rng.choice((None, None, math.inf, math.nan)) if how in ("torch's", "ours") else None
                clip, fill = rng.choice((None, 0.5, 30.0)), rng.choice(("in place", "new", "new, one of float32"))
                told.append((change, bad, clip, fill))
                INTERRUPTIONS.get(change, lambda side: None)(sides[0])
                for side in sides:
                    OF_BOTH.get(change, lambda side: None)(side)
                    if change == "weights written":
                        copy_weights(sides[0].params[:2], side.params)
                for side in sides:
                    side.give(turn, bad, fill)
                    side.train(clip, bad)
                assert_same_training(*sides)
            sides[0].give(9, None, "with other strides")  # that step is torch's
            sides[1].give(9, None, "new")
            for side in sides[:2]:
                side.train(None, None)
            assert_nearly_the_same(*sides[:2])
        except BaseException as error:
            error.add_note(f"{name}, {how}: {told}")
            raise


def assert_same_training(mine: Kept, whole: Kept, wide: Kept | None = None) -> None:
    held, expected = mine.tensors(), whole.tensors()
    for key, value in expected.items():
        if key in held or ("weight" not in key and value.any()):  # a step that torch's scaler skips makes no state
            assert_equal([held[key]], [value])
    assert held.keys() <= expected.keys()
    for key, value in (wide.tensors() if wide else {}).items():
        of_file = held.get(f"{key} weight", held.get(key))
        if of_file is not None and of_file.dtype == value.dtype:  # else of a first step of SGD's that was skipped
            assert_equal([of_file], [value])


def assert_nearly_the_same(mine: Kept, whole: Kept) -> None:
    """After a step that rounds otherwise in the last digit, and so at random now and then."""
    why = "torch's own" if mine.kept[0] is None else "on float32 masters is torch's"
    assert f"step: {why}: a parameter has strides" in str(mine.optimizer)
    assert whole.name == "SGD" or "step: fused" in str(whole.optimizer)
    held, expected = mine.tensors(), whole.tensors()
    assert held.keys() == expected.keys()
    for key, value in expected.items():
        if value.dtype in (torch.int8, torch.uint8):
            assert ((value.int() - held[key].int()).abs() <= 1).all() and (value == held[key]).float().mean() > 0.98
        elif value.is_floating_point():
            rtol = 2e-4 if value.dtype == torch.float32 else 2.0**-7
            torch.testing.assert_close(held[key], value, rtol=rtol, atol=1e-6)
        else:
            assert torch.equal(held[key], value)
