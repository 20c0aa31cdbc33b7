"""Random calls of torch's GradScaler and of ours, right and wrong ones: same errors, same stages, same scale.

Clipping by our methods, which torch's hasn't, has its place in `tests/optim/test_machine.py` and `test_clip.py`.
"""

import math
import os
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.amp.grad_scaler import OptState

import ampcompile
from ampcompile.scaler.grad_scaler import GradScaler
from tests.scaler.cases import assert_close, assert_equal

SHAPES = [(3, 5), (7,), (), (2, 3, 4)]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.1, nesterov=True),
    "SGD dampened": lambda p: torch.optim.SGD(p, 0.1, 0.9, dampening=0.3, maximize=True),
    "SGD fused": lambda p: torch.optim.SGD(p, torch.tensor(0.1), weight_decay=0.1, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, 0.1, fused=True, maximize=True),
    "AdamW": lambda p: torch.optim.AdamW(p, torch.tensor(0.1), foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True, eps=1e-3),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True, amsgrad=True),
    "AdamW float64": lambda p: torch.optim.AdamW(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, 0.1, fused=True),
}
OURS = [f"{name} ours" for name in OPTIMIZERS if name.split()[0] in ("SGD", "Adam", "AdamW")]
"""The same as classes of ours, beside torch's."""
BAD = (None, None, None, math.inf, -math.inf, math.nan)


class Side:
    """A scaler and two optimizers; `ours` says which scaler."""

    def __init__(self, ours: bool, names: list[str], options: dict[str, Any]) -> None:
        unbounded = {"min_scale": 0.0, "max_scale": math.inf}
        self.scaler = GradScaler("cpu", **options, **unbounded) if ours else torch.amp.GradScaler("cpu", **options)
        self.optimizers = []
        for seed, name in enumerate(names):
            generator = torch.Generator().manual_seed(seed)
            dtype = torch.float64 if "float64" in name else torch.float32
            params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype, generator=generator)) for shape in SHAPES]
            groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.01}]
            own = ours and name in OURS
            with pytest.MonkeyPatch.context() as patch:
                if own:
                    patch.setattr(torch, "optim", ampcompile.optim)
                self.optimizers.append(OPTIMIZERS[name.removesuffix(" ours")](groups))
            assert type(self.optimizers[-1]).__module__.startswith("ampcompile" if own else "torch")

    def params(self, which: int) -> list[torch.nn.Parameter]:
        return [param for group in self.optimizers[which].param_groups for param in group["params"]]

    def stage(self, which: int) -> OptState:
        states = self.scaler._per_optimizer_states if self.scaler.is_enabled() else {}
        return states[key]["stage"] if (key := id(self.optimizers[which])) in states else OptState.READY

    def attempt(self, action: Callable[["Side"], Any]) -> Any:
        """The result of an action, or its error."""
        try:
            return action(self)
        except Exception as error:
            return type(error), str(error)


class Twins:
    """Both sides, kept comparable and compared after every action."""

    def __init__(self, names: list[str], options: dict[str, Any]) -> None:
        self.names, self.enabled = names, options.get("enabled", True)
        self.ours, self.stock = (Side(ours, names, options) for ours in (True, False))
        for which in (0, 1):
            self.fill(which, 0, None)

    def do(self, action: Callable[[Side], Any]) -> Any:
        ours, stock = self.ours.attempt(action), self.stock.attempt(action)
        assert str(ours) == str(stock)
        return stock

    def fill(self, which: int, seed: int, bad: float | None, in_place: bool = False) -> None:
        """Gradients of a new iteration: other tensors, or in the same memory after `zero_grad(set_to_none=False)`."""
        for side in (self.ours, self.stock):
            generator = torch.Generator().manual_seed(seed)
            for i, param in enumerate(side.params(which)):
                grad = (torch.randn(param.shape, generator=generator) * side.scaler.get_scale()).to(param.dtype)
                if in_place and param.grad is not None:
                    param.grad.zero_().add_(grad)
                else:
                    param.grad = None if i and seed % (i + 2) == 1 else grad
            if bad is not None:
                side.params(which)[0].grad[seed % 3, seed % 5] = bad

    def accumulate(self, which: int, seed: int) -> None:
        for side in (self.ours, self.stock):
            generator = torch.Generator().manual_seed(seed)
            for param in side.params(which):
                grad = torch.randn(param.shape, generator=generator) * side.scaler.get_scale()
                if param.grad is not None:
                    param.grad += grad.to(param.dtype)

    def hook(self, which: int) -> None:
        """From here on torch's own step is taken."""
        for side in (self.ours, self.stock):
            side.optimizers[which].register_step_pre_hook(lambda *_: None)

    def drop_grads(self, which: int) -> None:
        """All but one: a step without any is where ours means to differ."""
        for side in (self.ours, self.stock):
            for param in side.params(which)[1:]:
                param.grad = None

    def scale(self) -> None:
        self.do(lambda side: side.scaler.scale([torch.ones(()), (torch.full((2,), 3.0),)]))

    def unscale(self, which: int) -> None:
        self.do(lambda side: side.scaler.unscale_(side.optimizers[which]))

    def torchs_clip(self, which: int) -> None:
        norms = [torch.nn.utils.clip_grad_norm_(side.params(which), 0.5) for side in (self.ours, self.stock)]
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0, equal_nan=True)

    def own_step(self, which: int) -> None:
        """Of the optimizer, without the scaler: meant for gradients that are unscaled."""
        if not self.enabled or self.stock.stage(which) is not OptState.READY:
            self.do(lambda side: side.optimizers[which].step())

    def step(self, which: int, *args: Any, seed: int = 0, **kwargs: Any) -> None:
        before, ours = self.stock.stage(which), self.ours.scaler
        result = self.do(lambda side: side.scaler.step(side.optimizers[which], *args, **kwargs))
        if result is None and before is not OptState.STEPPED:
            skipped = False
            if self.enabled:
                flags = self.stock.scaler._found_inf_per_device(self.stock.optimizers[which]).values()
                skipped = any(flag.item() != 0 for flag in flags)
            for flag in (ours.last_step_skipped, ours.step_skipped(self.ours.optimizers[which])):
                assert flag.dtype == torch.bool and flag.item() == skipped
            self.fill(which, seed, None)  # torch's step unscales the gradients too

    def update(self, new_scale: Any) -> None:
        self.do(lambda side: side.scaler.update(new_scale))

    def state_dict(self, scale: float | None) -> None:
        assert self.ours.scaler.state_dict() == self.stock.scaler.state_dict()
        other = {} if scale is None else {"scale": scale}
        for side in (self.ours, self.stock):
            side.scaler.load_state_dict({**side.scaler.state_dict(), "growth_interval": 2, **other})

    def optimizer_state_dict(self, which: int) -> None:
        for side in (self.ours, self.stock):
            side.optimizers[which].load_state_dict(deepcopy(side.optimizers[which].state_dict()))

    def pickle(self) -> None:
        def replace(side: Side) -> None:
            side.scaler = pickle.loads(pickle.dumps(side.scaler))

        self.do(replace)

    def compare(self) -> None:
        ours, stock = self.ours.scaler, self.stock.scaler
        if self.enabled:
            for name in ("_scale", "_growth_tracker"):
                a, b = getattr(ours, name), getattr(stock, name)
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
            assert (ours._init_scale, ours._init_growth_tracker) == (stock._init_scale, stock._init_growth_tracker)
        for which, name in enumerate(self.names):
            sides = (self.ours, self.stock)
            states = [s.scaler._per_optimizer_states if self.enabled else {} for s in sides]
            mine, theirs = (state.get(id(s.optimizers[which])) for state, s in zip(states, sides, strict=True))
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine["stage"] == theirs["stage"]
                found = [{d: f.item() for d, f in state["found_inf_per_device"].items()} for state in (mine, theirs)]
                assert found[0] == found[1]
            exact = name.split()[0] in ("RMSprop", "Adagrad") or "float64" in name
            compare = assert_equal if exact else assert_close
            compare(*(side.params(which) for side in sides))
            compare(*([param.grad for param in side.params(which)] for side in sides))
            self.compare_states(which, compare)

    def compare_states(self, which: int, compare: Callable[..., None]) -> None:
        for a, b in zip(self.ours.params(which), self.stock.params(which), strict=True):
            mine, theirs = self.ours.optimizers[which].state.get(a, {}), self.stock.optimizers[which].state.get(b, {})
            if mine and not any(value is not None for value in theirs.values()):  # only skipped steps so far
                assert all(not value.any() for value in mine.values())
                continue
            assert list(mine) == list(theirs)
            for key in mine:
                expected = theirs[key]
                if key == "max_exp_avg_sq":
                    # Of NaN, which `maximum` keeps, torch's fused step on a CPU keeps none in the last elements of a
                    # tensor: those that fill no vector, whose length is the CPU's, are compared with `std::max`.
                    expected = torch.where(theirs["exp_avg_sq"].isnan(), torch.nan, expected)
                (assert_equal if key == "step" else compare)([mine[key]], [expected])


seeds = st.integers(0, 1000)
which = st.integers(0, 1)
closures = st.sampled_from([((), {}), ((), {}), ((), {}), ((None,), {}), ((), {"closure": None})])
actions = st.one_of(
    st.tuples(st.just("fill"), which, seeds, st.sampled_from(BAD), st.booleans()),
    st.tuples(st.just("accumulate"), which, seeds),
    st.tuples(st.just("drop_grads"), which),
    st.tuples(st.just("hook"), which),
    st.tuples(st.just("scale")),
    st.tuples(st.just("unscale"), which),
    st.tuples(st.just("torchs_clip"), which),
    st.tuples(st.just("step"), which, closures),
    st.tuples(st.just("own_step"), which),
    st.tuples(st.just("update"), st.sampled_from([None, None, None, None, 64.0, 3.0, torch.tensor(5.0), 2])),
    st.tuples(st.just("state_dict"), st.sampled_from([None, 8.0])),
    st.tuples(st.just("optimizer_state_dict"), which),
    st.tuples(st.just("pickle")),
)
options = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([2.0**16, 3.0, 1.0, 8]),
        "growth_factor": st.sampled_from([2.0, 1.1]),
        "backoff_factor": st.sampled_from([0.5, 0.7]),
        "growth_interval": st.sampled_from([1, 2, 3, 2000]),
        "enabled": st.booleans(),
    }
)


EXAMPLES = int(os.environ.get("AMPCOMPILE_SCALER_PROGRAMS", 110))


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.lists(st.sampled_from([*sorted(OPTIMIZERS), *OURS]), min_size=2, max_size=2),
    options,
    st.lists(actions, min_size=8, max_size=30),
)
def test_random_programs(names: list[str], options: dict[str, Any], program: list[tuple[Any, ...]]) -> None:
    run(names, options, [("scale",), *program])


STEP, UPDATE = ("step", 0, ((), {})), ("update", None)


@pytest.mark.parametrize("seed", [0, 14])
def test_a_not_a_number_in_any_lane(seed: int) -> None:
    """Without a scaler nothing is skipped: the first or the last of 15 elements becomes NaN, in all of its state."""
    run(["AdamW fused", "Adam"], {"enabled": False}, [("fill", 0, seed, math.nan), ("step", 0, ((), {}))] * 2)


def run(names: list[str], options: dict[str, Any], program: list[tuple[Any, ...]]) -> None:
    twins = Twins(names, options)
    for i, (action, *arguments) in enumerate(program):
        if action == "step":
            which, (args, kwargs) = arguments
            twins.step(which, *args, seed=i, **kwargs)
        else:
            getattr(twins, action)(*arguments)
        twins.compare()


def test_before_the_first_scale_everything_fails_alike() -> None:
    for action in (("unscale", 0), STEP, UPDATE, ("update", 2.0), ("state_dict", None), ("pickle",)):
        run(["AdamW", "RMSprop"], {}, [action])
