"""Random programs on torch's GradScaler and on ours: same errors, same stages, same scale, same training."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.amp.grad_scaler import OptState

from ampcompile.scaler import GradScaler
from tests.scaler_cases import assert_close, assert_equal

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
BAD = (None, None, None, math.inf, -math.inf, math.nan)


class Side:
    """A scaler and two optimizers; `ours` says which scaler."""

    def __init__(self, ours: bool, names: list[str], options: dict[str, Any]) -> None:
        unbounded = {"min_scale": 0.0, "max_scale": math.inf}
        self.scaler = GradScaler("cpu", **options, **unbounded) if ours else torch.amp.GradScaler("cpu", **options)
        self.optimizers = []
        for seed, name in enumerate(names):
            torch.manual_seed(seed)
            dtype = torch.float64 if "float64" in name else torch.float32
            params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
            groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.01}]
            self.optimizers.append(OPTIMIZERS[name](groups))

    def params(self, which: int) -> list[torch.nn.Parameter]:
        return [param for group in self.optimizers[which].param_groups for param in group["params"]]

    def attempt(self, action: Callable[["Side"], Any]) -> Any:
        """The result of an action, or its error."""
        try:
            return action(self)
        except Exception as error:
            return type(error), str(error)


class Twins:
    """Both sides, kept comparable and compared after every action."""

    def __init__(self, names: list[str], options: dict[str, Any]) -> None:
        self.names = names
        self.ours, self.stock = (Side(ours, names, options) for ours in (True, False))
        self.clipped = [False, False]
        self.scaled = False
        for which in (0, 1):
            self.fill(which, 0, None)

    def do(self, action: Callable[[Side], Any]) -> Any:
        ours, stock = self.ours.attempt(action), self.stock.attempt(action)
        assert str(ours) == str(stock)
        return stock

    def fill(self, which: int, seed: int, bad: float | None) -> None:
        if self.clipped[which]:
            return  # ours left the clipping to the step
        for side in (self.ours, self.stock):
            generator = torch.Generator().manual_seed(seed)
            for i, param in enumerate(side.params(which)):
                grad = torch.randn(param.shape, generator=generator) * side.scaler.get_scale()
                param.grad = None if i and seed % (i + 2) == 1 else grad.to(param.dtype)
            if bad is not None:
                side.params(which)[0].grad[seed % 3, seed % 5] = bad

    def scale(self) -> None:
        self.do(lambda side: side.scaler.scale([torch.ones(()), (torch.full((2,), 3.0),)]))

    def unscale(self, which: int) -> None:
        self.do(lambda side: side.scaler.unscale_(side.optimizers[which]))

    def torchs_clip(self, which: int) -> None:
        if not self.clipped[which]:
            self.do(lambda side: float(torch.nn.utils.clip_grad_norm_(side.params(which), 0.5)))

    def our_clip(self, which: int) -> None:
        """Ours in one call; torch's as that call replaces it."""
        scaler, optimizer = self.stock.scaler, self.stock.optimizers[which]
        if scaler._scale is None or scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED:
            return
        if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            scaler.unscale_(optimizer)
        expected = torch.nn.utils.clip_grad_norm_(self.stock.params(which), 0.5)
        actual = self.ours.scaler.clip_grad_norm_(self.ours.optimizers[which], 0.5)
        torch.testing.assert_close(actual.to(expected.dtype), expected, rtol=1e-6, atol=0, equal_nan=True)
        self.clipped[which] = True

    def step(self, which: int, *args: Any, seed: int = 0, **kwargs: Any) -> None:
        state = self.stock.scaler._per_optimizer_states if self.stock.scaler._scale is not None else {}
        before = state[id(self.stock.optimizers[which])]["stage"] if id(self.stock.optimizers[which]) in state else None
        result = self.do(lambda side: side.scaler.step(side.optimizers[which], *args, **kwargs))
        if result is None and before is not OptState.STEPPED:
            flags = self.stock.scaler._found_inf_per_device(self.stock.optimizers[which]).values()
            skipped = any(flag.item() != 0 for flag in flags)
            for flag in (
                self.ours.scaler.last_step_skipped,
                self.ours.scaler.step_skipped(self.ours.optimizers[which]),
            ):
                assert flag.dtype == torch.bool and flag.item() == skipped
            self.clipped[which] = False
            self.fill(which, seed, None)  # torch's step unscales the gradients too

    def update(self, new_scale: Any) -> None:
        self.do(lambda side: side.scaler.update(new_scale))
        if self.stock.scaler._scale is not None and not self.stock.scaler._per_optimizer_states:
            for which in (0, 1):
                if self.clipped[which]:
                    self.clipped[which] = False
                    self.fill(which, 1, None)

    def state_dict(self) -> None:
        assert self.ours.scaler.state_dict() == self.stock.scaler.state_dict()
        for side in (self.ours, self.stock):
            side.scaler.load_state_dict({**side.scaler.state_dict(), "growth_interval": 2})

    def pickle(self) -> None:
        def replace(side: Side) -> None:
            side.scaler = pickle.loads(pickle.dumps(side.scaler))

        self.do(replace)

    def compare(self) -> None:
        ours, stock = self.ours.scaler, self.stock.scaler
        for name in ("_scale", "_growth_tracker"):
            a, b = getattr(ours, name), getattr(stock, name)
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert (ours._init_scale, ours._init_growth_tracker) == (stock._init_scale, stock._init_growth_tracker)
        for which, name in enumerate(self.names):
            sides = (self.ours, self.stock)
            (mine, theirs) = (side.scaler._per_optimizer_states.get(id(side.optimizers[which])) for side in sides)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine["stage"] == theirs["stage"]
                found = [{d: f.item() for d, f in state["found_inf_per_device"].items()} for state in (mine, theirs)]
                assert found[0] == found[1]
            exact = name.split()[0] in ("RMSprop", "Adagrad") or "float64" in name
            compare = assert_equal if exact else assert_close
            compare(*(side.params(which) for side in sides))
            if not self.clipped[which]:
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
                (assert_equal if key == "step" else compare)([mine[key]], [theirs[key]])


seeds = st.integers(0, 1000)
which = st.integers(0, 1)
closures = st.sampled_from([((), {}), ((), {}), ((), {}), ((None,), {}), ((), {"closure": None})])
actions = st.one_of(
    st.tuples(st.just("fill"), which, seeds, st.sampled_from(BAD)),
    st.tuples(st.just("scale")),
    st.tuples(st.just("unscale"), which),
    st.tuples(st.just("torchs_clip"), which),
    st.tuples(st.just("our_clip"), which),
    st.tuples(st.just("step"), which, closures),
    st.tuples(st.just("update"), st.sampled_from([None, None, None, None, 64.0, 3.0, torch.tensor(5.0), 2])),
    st.tuples(st.just("state_dict")),
    st.tuples(st.just("pickle")),
)
options = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([2.0**16, 3.0, 1.0, 8]),
        "growth_factor": st.sampled_from([2.0, 1.1]),
        "backoff_factor": st.sampled_from([0.5, 0.7]),
        "growth_interval": st.sampled_from([1, 2, 3, 2000]),
        "enabled": st.just(True),
    }
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(sorted(OPTIMIZERS)), min_size=2, max_size=2), options, st.lists(actions, max_size=30))
def test_random_programs(names: list[str], options: dict[str, Any], program: list[tuple[Any, ...]]) -> None:
    run(names, options, [("scale",), *program])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_training_loop(name: str) -> None:
    """What most programs do, with overflows, for each optimizer."""
    program: list[tuple[Any, ...]] = []
    for i in range(12):
        program += [("scale",), ("fill", 0, i, math.nan if i in (0, 5) else None)]
        program += [[("unscale", 0), ("torchs_clip", 0)], [("our_clip", 0)], []][i % 3]
        program += [("step", 0, ((), {})), ("step", 1, ((), {})), ("update", None)]
    run([name, "SGD"], {"growth_interval": 3}, program)


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
    for action in (
        ("unscale", 0),
        ("step", 0, ((), {})),
        ("update", None),
        ("update", 2.0),
        ("state_dict",),
        ("pickle",),
    ):
        run(["AdamW", "RMSprop"], {}, [action])
