"""After a step of ours no copy of a weight is cast; after one that may have written more, the copies are right."""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import register_optimizer_step_post_hook

import ampcompile
from ampcompile import weights
from ampcompile.kernels import native
from ampcompile.weights.step import QUANTIZED
from tests.injecting import raised_at
from tests.scaler.cases import assert_equal, assert_quantized, fill, scaled
from tests.weights.bindings import bind
from tests.weights.writers import unseen

BF16, F16 = torch.bfloat16, torch.float16
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"momentum": 0.9}),
    "AdamW": ("AdamW", {}),
    "AdamW fused": ("AdamW", {"fused": True}),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def made(kind: str, params: list[nn.Parameter], optim: Any = ampcompile.optim, **options: Any) -> Any:
    name, settings = KINDS[kind]
    return getattr(optim, name)(params, lr=0.1, **settings, **options)


class Model:
    """Parameters whose copies a graph reads. `slots`: the number of the parameter of each copy, with its type."""

    def __init__(
        self,
        params: Sequence[Tensor] | None = None,
        slots: Sequence[tuple[int, torch.dtype]] = ((0, BF16), (1, BF16)),
        wide: Sequence[bool] | None = None,
    ) -> None:
        self.params = [nn.Parameter(value) for value in params or (torch.randn(300, 70), torch.randn(40))]
        self.read = [(self.params[number], dtype) for number, dtype in slots]
        self.binding = bind([dtype for _, dtype in slots], wide=wide)
        self.casts_until()

    def copies(self) -> list[Tensor]:
        return self.binding.copies([param for param, _ in self.read])

    def places(self) -> list[int]:
        """Where the copies are; a test that kept the list itself would pass for a backward that waits for them."""
        return [copy.data_ptr() for copy in self.copies()]

    def casts_until(self) -> int:
        """Read all copies, which are right; return how many were cast for it."""
        before = weights.weight_stats().casts
        for copy, (param, dtype) in zip(self.copies(), self.read, strict=True):
            if dtype == QUANTIZED.dtype:
                assert_quantized([param.detach()], [copy])
            else:
                assert_equal([copy], [param.detach().to(dtype).to(copy.dtype)])
        return weights.weight_stats().casts - before


def stepped(kind: str) -> tuple[Model, Any]:
    """A model after a step of ours, with the optimizer."""
    model = Model()
    optimizer = made(kind, model.params)
    fill(model.params, 0)
    optimizer.step()
    model.casts_until()
    return model, optimizer


def patched(optimizer: Any) -> Any:
    """As Accelerate patches a step, without a word of what it wraps."""
    step = optimizer.step
    optimizer.step = lambda *args, **kwargs: step(*args, **kwargs)
    return optimizer


def scheduled(optimizer: Any) -> Any:
    ExponentialLR(optimizer, 0.9)
    return optimizer


def clipped(optimizer: Any) -> Any:
    """With the hook that waits for its steps."""
    fill(optimizer.param_groups[0]["params"], 9)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    return optimizer


class Scaled:
    """An optimizer whose steps a scaler takes."""

    def __init__(self, scaler: Any, optimizer: Any, **options: Any) -> None:
        self.optimizer, self.scaler = optimizer, scaled(scaler, init_scale=2.0, **options)

    def step(self) -> None:
        if isinstance(self.scaler, ampcompile.GradScaler):
            self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class subclasses:
    """In place of a module: subclasses without a step of their own."""

    SGD = type("SGD", (ampcompile.optim.SGD,), {})
    AdamW = type("AdamW", (ampcompile.optim.AdamW,), {})


OURS = partial(Scaled, ampcompile.GradScaler)
LOOPS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "plain": (ampcompile.optim, lambda optimizer: optimizer),
    "patched": (ampcompile.optim, patched),
    "scheduled": (ampcompile.optim, scheduled),
    "patched, scheduled": (ampcompile.optim, lambda optimizer: patched(scheduled(optimizer))),
    "subclass": (subclasses, lambda optimizer: optimizer),
    "clipped": (ampcompile.optim, clipped),
    "torch's scaler": (ampcompile.optim, partial(Scaled, torch.amp.GradScaler)),
    "our scaler": (torch.optim, OURS),
    "our scaler, disabled": (torch.optim, partial(OURS, enabled=False)),
}


def loop_of(loop: str, kind: str, params: list[nn.Parameter]) -> Any:
    """What has a step."""
    optim, wrap = LOOPS[loop]
    return wrap(made(kind, params, optim))


@kinds
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("another", [False, True])
def test_nothing_is_cast_after_a_step_nor_after_one_that_a_scaler_skips(kind: str, loop: str, another: bool) -> None:
    if another:
        torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    model, beside = Model(), Model()
    stepping, other, places = loop_of(loop, kind, model.params), torch.optim.SGD(beside.params, lr=0.1), model.places()
    other = OURS(other) if "our scaler" in loop else other
    for step in range(3):
        bad = math.inf if step == 1 and loop in ("torch's scaler", "our scaler") else None
        before = model.params[0].detach().clone()
        fill(model.params, step, bad=bad)
        stepping.step()
        assert torch.equal(before, model.params[0]) == (bad is not None)
        assert model.casts_until() == beside.casts_until() == 0 and model.places() == places
        fill(beside.params, step)
        other.step()
        assert model.casts_until() == 0
        assert (beside.casts_until() > 0) is not isinstance(other, Scaled), (
            "a step of torch's leaves that to the next call"
        )


BESIDE_8_BITS = [(0, BF16), (0, QUANTIZED.dtype), (1, BF16), (1, QUANTIZED.dtype)]


@kinds
@pytest.mark.parametrize("loop", ["plain", "our scaler"])
@pytest.mark.parametrize("slots", [[(0, BF16), (0, F16), (1, F16)], BESIDE_8_BITS])
def test_copies_of_several_types_are_written_with_whatever_was_written_unseen(kind: str, loop: str, slots: Any) -> None:
    """Also in steps that are skipped, and beside a weight that nobody reads."""
    model = Model([torch.randn(32, 48), torch.randn(16, 32).t(), torch.randn(5)], slots)
    stepping, places = loop_of(loop, kind, model.params), model.places()
    versions = [copy._version for copy in model.copies()]
    for step in range(4):
        fill(model.params, step, bad=math.inf if step % 2 and loop == "our scaler" else None)
        for param in model.params[:2] if step > 1 else ():
            unseen(param)[3, 3] = 10.0**step
        stepping.step()
        before, casts = versions, weights.weight_stats().casts
        versions = [copy._version for copy in model.copies()]
        assert all(map(operator.lt, before, versions)) and model.casts_until() == 0
        assert step > 1 or (weights.weight_stats().casts == casts and model.places() == places)


SPECIAL = torch.tensor(
    [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-46, 65504.0, 65520.0, 3.39e38, 6e-8, 1.0]
)


@kinds
@pytest.mark.parametrize("low", [BF16, F16])
@pytest.mark.parametrize("skips", [False, True])
def test_copies_that_are_read_as_float32_are_written_rounded_and_have_the_bits_of_a_cast(
    kind: str, low: torch.dtype, skips: bool
) -> None:
    """As on a CPU that multiplies in float32; a float16 or bfloat16 copy of the same weight is cast in the step."""
    values = torch.cat([SPECIAL, torch.randn(300 * 70 - len(SPECIAL)) * 10.0 ** torch.randint(-8, 5, (300 * 70 - 12,))])
    params = [values.view(300, 70), torch.randn(40), torch.randn(9, 33).t()]
    slots = [(0, low), (1, low), (2, low), (0, F16 if low is BF16 else BF16)]
    model = Model(params, slots, wide=[True, True, True, False])
    optimizer = made(kind, model.params)
    for step in range(3):
        fill(model.params, step)
        if skips and kind == "AdamW fused":
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
        model.params[0].grad[0, : len(SPECIAL)] = 0.0
        before = values.clone()
        optimizer.step()
        assert model.casts_until() == 0
        assert torch.equal(values.isnan(), before.isnan())


@kinds
def test_nothing_is_cast_in_a_closure_nor_after_its_step_nor_by_masters(kind: str) -> None:
    model, narrow = Model(), [nn.Parameter(torch.randn(30, 7).bfloat16())]
    optimizer, other = made(kind, model.params), made(kind, narrow, masters="remainder")
    for step in range(3):
        fill(model.params, step)
        fill(narrow, step)
        other.step()
        assert optimizer.step(model.casts_until) == 0 == model.casts_until()


def test_a_copy_that_a_backward_waits_for_is_left_alone() -> None:
    model = Model()
    stepping = loop_of("our scaler", "SGD", model.params)
    x = torch.randn(4, 300, dtype=BF16, requires_grad=True)
    copy = model.copies()[0]
    out = x @ copy
    old = copy.clone()
    del copy
    fill(model.params, 0)
    stepping.step()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert_equal([grad], [old.sum(1).expand_as(x)])
    model.casts_until()


# Steps of torch's, and what others write


@kinds
@pytest.mark.parametrize("torchs", [False, True])
def test_a_step_of_torchs_is_reported(kind: str, torchs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fused step raises no version, and one number is written; what other optimizers own stays as it is."""
    monkeypatch.setattr(native, "available", lambda *_: False)
    model, beside = Model(), Model()
    optimizer = made(kind, model.params, weight_decay=0)
    other = torch.optim.SGD(beside.params, lr=0.1) if torchs else made("SGD", beside.params)
    fill(beside.params, 7)
    other.step()
    beside.casts_until()
    for _ in range(3):
        model.params[0].grad = torch.zeros(300, 70)
        model.params[0].grad[151, 33] = 1.0
        optimizer.step()
        assert model.casts_until() > 0 == beside.casts_until()


def test_the_scalers_generic_path_leaves_casting_to_the_next_call() -> None:
    model = Model()
    fill(model.params, 0)
    OURS(torch.optim.RMSprop(model.params, lr=0.1)).step()
    assert model.casts_until() > 0


def write(param: nn.Parameter, values: Iterator[float]) -> None:
    """Write one number, unseen, where no sample looks."""
    unseen(param.detach())[151, 33] = next(values)


def around(step: Any, written: Callable[[], Any]) -> Any:
    """A step that also writes before and after another."""

    @functools.wraps(step)
    def stepping(self: Any, closure: Any = None) -> Any:
        written()
        result = step(self, closure)
        written()
        return result

    vars(stepping).pop("hooked", None)  # torch calls hooks around it, then
    return stepping


def hooked(register: Callable[[Any, Any], Any], kind: str, params: Any, written: Any, _: Any) -> tuple[Any, Any]:
    optimizer = made(kind, params)
    return optimizer, register(optimizer, lambda *_: written()).remove


def subclassed(kind: str, params: Any, written: Any, _: Any) -> tuple[Any, Any]:
    ours = getattr(ampcompile.optim, KINDS[kind][0])
    return type("Writing", (ours,), {"step": around(ours.step, written)})(params, lr=0.1), None


def patched_class(optim: Any, kind: str, params: Any, written: Any, patch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    owner = getattr(optim, KINDS[kind][0])
    patch.setattr(owner, "step", around(owner.step, written))
    return owner(params, lr=0.1), None


WRITERS = {
    "a hook before": partial(hooked, lambda optimizer, hook: optimizer.register_step_pre_hook(hook)),
    "a hook after": partial(hooked, lambda optimizer, hook: optimizer.register_step_post_hook(hook)),
    "a hook everywhere": partial(hooked, lambda _, hook: register_optimizer_step_post_hook(hook)),
    "a subclass's step": subclassed,
    "a patched class of torch's": partial(patched_class, torch.optim),
    "a patched class of ours": partial(patched_class, ampcompile.optim),
}


@kinds
@pytest.mark.parametrize("who", WRITERS)
@pytest.mark.parametrize("whose", ["own", "another's"])
def test_what_others_add_to_a_step_may_write_any_weight(
    kind: str, who: str, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (beside, _) = Model(), stepped("SGD")
    written = partial(write, (model if whose == "own" else beside).params[0], itertools.count(2.0))
    optimizer, remove = WRITERS[who](kind, model.params, written, monkeypatch)
    try:
        for step in range(3):
            fill(model.params, step)
            optimizer.step()
            assert model.casts_until() > 0 or "class" in who
            beside.casts_until()
    finally:
        if remove is not None:
            remove()
            fill(model.params, 5)
            optimizer.step()
    assert remove is None or model.casts_until() == 0


# Steps that fail


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_fused_step_that_is_broken_off_costs_one_cast(error: Any) -> None:
    at, reached = 1, True
    while reached:
        model = Model([torch.randn(30, 7), torch.randn(4)], [(0, BF16), (0, F16), (1, BF16), (1, F16)])
        stepping = loop_of("our scaler", "SGD", model.params)
        for step in range(2):
            fill(model.params, step)
            if step:
                reached = raised_at(at, error, stepping.step)
            else:
                stepping.step()
        model.casts_until()
        assert [model.casts_until() for _ in range(3)] == [0] * 3, at
        at += 3
    assert at > 30


def test_a_step_that_failed_leaves_right_copies_and_the_next_casts_nothing() -> None:
    model = Model()
    optimizer = made("AdamW", model.params)

    def failing() -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step(failing)
    model.params[0].grad = torch.ones(70, 300).t()  # that step is torch's
    optimizer.param_groups[0]["lr"] = "not a number"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    for step in range(3):
        model.params[0].grad = None
        fill(model.params, step)
        optimizer.step()
        assert model.casts_until() == 0 or step < 2
