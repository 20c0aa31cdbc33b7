"""The rule's six lines, each by what it sees and what it costs: nothing, one comparison, or one cast."""

import contextlib
import copy
import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompile.weights import free_copies, reports, table, weight_stats, writable_copies
from tests.weights.bindings import Case, bind, comparisons, lent_buffers, take_step
from tests.weights.writers import unsampled, unseen

BF16 = torch.bfloat16
SGD = torch.optim.SGD


class OfAnyKind(SGD):
    """Nobody knows what its step writes."""


def hooked(*arguments: Any, **options: Any) -> torch.optim.Optimizer:
    optimizer = SGD(*arguments, **options)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def step(case: Case, *params: Tensor, kind: Any = SGD) -> torch.optim.Optimizer:
    """Take a step of an optimizer that lives on, which writes one place of these; and look."""
    for param in params:
        param.grad = torch.zeros_like(param)
        param.grad[unsampled(param)] = 1.0
    case.kept.append(kind(params, lr=1.0, fused=kind is SGD))
    case.kept[-1].step()
    return case.kept[-1]


def step_another(case: Case, owner: Any = SGD, kind: Any = SGD, writes: bool = False) -> torch.optim.Optimizer:
    """After a step of the weight by its owner, if it has one, one of another weight; which may write the first, too."""
    if owner is not None:
        step(case, case.weight, kind=owner)
        assert case.right()
    optimizer = step(case, nn.Parameter(torch.ones(40, 30)), kind=kind)
    if writes:
        unseen(case.weight)[unsampled(case.weight)] += 1
    return optimizer


def share(case: Case) -> None:
    """Two optimizers step a parameter, which the one that steps first was given last."""
    optimizer = step_another(case)
    assert case.right()
    optimizer.add_param_group({"params": [case.weight]})
    optimizer.step()


def step_both(case: Case) -> None:
    """Steps in turn of two optimizers, as in a GAN; the last is of another weight."""
    step_another(case)
    for optimizer in case.kept:
        assert case.right()
        optimizer.step()


FREE, COMPARED, CAST = (0, 0), (1, 0), (1, 1)
# What is done before a call, and what that call does: looks alone, compares once, or casts once.
LINES: dict[str, tuple[Callable[[Case], object], tuple[int, int]]] = {
    "nothing": (lambda case: None, FREE),
    "a deep copy is written": (lambda case: case.one(copy.deepcopy(case.weight)), COMPARED),
    "other memory": (lambda case: setattr(case.weight, "data", torch.randn(40, 30)), CAST),
    "1: another tensor of the same memory and counter": (
        lambda case: setattr(case, "weight", case.weight.detach()),
        FREE,
    ),
    "1: another counter of the same memory": (
        lambda case: setattr(case, "weight", nn.Parameter(case.weight.data)),
        COMPARED,
    ),
    "2: a write": (lambda case: case.one(case.weight), CAST),
    "2: a write through a view": (lambda case: case.one(case.weight.detach().view(30, 40)), CAST),
    "3: a step": (lambda case: step(case, case.weight), CAST),
    "3: a step of another weight": (step_another, FREE),
    "3: steps in turn of both": (step_both, FREE),
    "3: a step of another weight and of this one": (share, CAST),
    "3: of another, where nobody steps this one": (lambda case: step_another(case, None, writes=True), CAST),
    "3: of another, by another class": (lambda case: step_another(case, None, OfAnyKind), CAST),
    "3: of another, by another class, beside an owner": (
        lambda case: step_another(case, SGD, OfAnyKind, writes=True),
        CAST,
    ),
    "3: of another, with a hook": (lambda case: step_another(case, SGD, hooked, writes=True), CAST),
    "3: of another, where another class steps this one": (
        lambda case: step_another(case, OfAnyKind, writes=True),
        CAST,
    ),
    "3: of another, where a hook is told of this one": (lambda case: step_another(case, hooked, writes=True), CAST),
    "3: an optimizer that owns a frozen weight": (lambda case: step(case, nn.Parameter(case.frozen)), CAST),
    "4: .data was read": (lambda case: case.weight.data.norm(), COMPARED),
    "4: an array was made": (lambda case: case.frozen.numpy().mean(), COMPARED),
    "4: a storage was given out": (lambda case: case.weight.untyped_storage(), COMPARED),
    "5: a view is kept": (lambda case: case.kept.append(case.weight.detach()[3]), FREE),
    "6: many numbers differ": (lambda case: unseen(case.weight).__imul__(2), CAST),
}


@pytest.mark.parametrize("line", LINES)
def test_what_a_line_of_the_rule_sees_and_costs(line: str) -> None:
    case, (act, (asked, cast)) = Case(), LINES[line]
    case.right()
    act(case)
    casts = weight_stats().casts
    assert comparisons(case.read) == asked and weight_stats().casts == casts + cast
    assert case.right()
    assert comparisons(case.read) == 0 and weight_stats().casts == casts + cast, "from now on nothing"


def test_the_counters_of_all_inputs_on_a_storage_explain_its_holders() -> None:
    """Also of one that the graph reads as it is."""
    flat = torch.randn(3, 20, 20)
    weights = [nn.Parameter(part.data) for part in flat.clone().unbind()]
    del flat
    binding = bind([BF16] * 2)
    for _ in range(3):
        binding.copies(weights)
    assert comparisons(lambda: binding.copies(weights)) == 0
    with torch.no_grad():
        weights[1].mul_(2)
    assert comparisons(lambda: binding.copies(weights)) == 1
    assert torch.equal(binding.copies(weights)[1], weights[1].detach().bfloat16())


def test_without_a_table_each_call_casts(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(table.native, "objects_library", lambda name: None)
    table.load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "ampcompile"):
            binding = bind([BF16])
        assert "each call casts its weights" in caplog.text
        weight = nn.Parameter(torch.randn(40, 30))
        for _ in range(3):
            assert torch.equal(binding.copies([weight])[0], weight.detach().bfloat16())
            unseen(weight)[unsampled(weight)] += 1
    finally:
        table.load.cache_clear()


def test_a_weight_that_left_vouches_for_nobody_on_its_old_memory() -> None:
    case, other = Case(), nn.Parameter(torch.randn(40, 30))
    tied, binding = nn.Parameter(case.weight.data), bind([BF16] * 2)
    binding.copies([case.weight, tied])
    alias = tied.data
    case.weight.data = other.data
    for _ in range(3):
        assert torch.equal(binding.copies([other, tied])[1], tied.detach().bfloat16())
        case.one(alias)


def test_a_view_of_its_old_memory_vouches_for_nobody_on_a_weights_new_memory() -> None:
    case = Case()
    state, given = case.weight.detach(), torch.randn(40, 30)
    case.weight.data = given
    for _ in range(3):
        assert case.right()
        case.one(given)
    assert state.shape == given.shape


# Steps of ours write copies with the weights; one that fails, or isn't alone, leaves none that counts as fresh


def test_a_step_of_ours_writes_the_copies_and_nothing_is_cast() -> None:
    case = Case()
    for _ in range(3):
        take_step([case.weight], lambda: unseen(case.weight).__imul__(0.5))
        assert comparisons(case.read) == 0 and case.right()


@pytest.mark.parametrize("held", [False, True])
def test_a_step_that_failed_leaves_nothing_fresh(held: bool) -> None:
    """Neither the copy that it was lent, nor one that a backward holds, which isn't lent."""
    case = Case()
    kept = case.read() if held else []
    lent = writable_copies([case.weight])
    assert len(kept) == 2 or lent_buffers(lent, 0)
    case.right()  # within the step
    unseen(case.weight)[unsampled(case.weight)] += 1
    assert case.right()
    unseen(case.weight)[unsampled(case.weight)] += 1
    assert case.right(), "cast in each call"
    del lent
    assert comparisons(case.read) == 1 and comparisons(case.read) == 0 and case.right(), "once more"


class Calling(torch.optim.SGD):
    """Writes unseen in its step, calls what it was given, and writes again."""

    def step(self, closure: Callable[[], object]) -> None:
        for _ in range(2):
            for param in self.param_groups[0]["params"]:
                unseen(param)[unsampled(param)] += 1
            closure()


def fail() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["here", "another thread", "another optimizer's step", "dead"])
def test_an_optimizer_that_failed_costs_one_cast(where: str) -> None:
    case, other = Case(), Case()
    optimizer = Calling([case.weight], lr=1.0)

    def step() -> None:
        for _ in range(2):  # twice
            with contextlib.suppress(KeyboardInterrupt):
                optimizer.step(fail)

    if where == "another thread":
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    elif where == "another optimizer's step":
        case.kept.append(Calling([other.weight], lr=1.0))
        case.kept[-1].step(lambda: (step(), case.right(), other.right()))
    else:
        step()
    if where == "dead":
        del optimizer, step
    assert case.right() and other.right()
    before = weight_stats().casts
    for _ in range(3):
        assert case.right() and other.right()
    assert weight_stats().casts == before


def test_what_is_compared_within_a_step_is_not_fresh_after_it() -> None:
    """Also a frozen weight, of which no step tells."""
    case = Case()

    def write() -> None:
        unseen(case.frozen)[unsampled(case.frozen)] += 1

    acts = iter([lambda: case.frozen.data.norm() > 0 and case.right(), write])
    Calling([case.weight], lr=1.0).step(lambda: next(acts)())
    assert case.right()


def test_a_step_that_began_before_anybody_listened_is_reported_at_its_end() -> None:
    """As one does in which a weight gets its first copy."""
    case, hooks = Case(), importlib.import_module("torch.optim.optimizer")._global_optimizer_pre_hooks
    kept = dict(hooks)
    hooks.clear()

    def read() -> None:
        hooks.update(kept)
        free_copies(case.weight)
        assert case.right()

    acts = iter([read, lambda: None])
    Calling([case.weight], lr=1.0).step(lambda: next(acts)())
    assert case.right()


def test_what_is_cast_within_a_step_is_not_fresh_after_it() -> None:
    case = Case()
    optimizer = Calling([case.weight], lr=1.0)
    optimizer.step(lambda: torch.testing.assert_close(case.right(), True))
    assert case.right()
    begun, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=optimizer.step, args=[lambda: (begun.set(), go_on.wait())])
    thread.start()
    begun.wait()
    with contextlib.suppress(KeyboardInterrupt):  # another one fails meanwhile
        Calling([case.frozen], lr=1.0).step(fail)
    assert case.right() and case.right()
    go_on.set()
    thread.join()
    assert case.right()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("looks", ["nowhere", "at the copy", "at another copy"])
def test_a_write_during_a_step_leaves_the_weight_to_the_next_call(looks: str, tied: bool) -> None:
    """As another thread may write it while kernels run, and read what it wrote."""
    case, binding, other = Case(), bind([BF16]), bind([torch.float16])
    written = nn.Parameter(case.weight.data) if tied else case.weight
    binding.copies([written])
    other.copies([case.weight])
    lent = writable_copies([case.weight])
    case.one(written)
    if looks == "at the copy":
        assert case.right()
    elif looks == "at another copy":
        assert torch.equal(other.copies([case.weight])[0], case.weight.half())
    torch.autograd.graph.increment_version([case.weight])
    lent.mark_written()
    assert case.right()


MOVES: dict[str, Callable[[Tensor, Tensor], object]] = {
    ".data": lambda tensor, other: setattr(tensor, "data", other),
    "set_": torch.no_grad()(lambda tensor, other: tensor.set_(other)),
    "the op itself, which none of our patches sees": torch.no_grad()(torch.ops.aten.set_.source_Tensor),
}


@pytest.mark.parametrize("how", MOVES)
def test_a_write_right_before_its_tensor_moves_is_not_forgotten(how: str) -> None:
    case, binding = Case(), bind([BF16])
    moved = nn.Parameter(case.weight.data)
    binding.copies([moved])
    assert case.right() and case.right()
    case.one(moved)
    MOVES[how](moved, torch.randn(40, 30))
    assert torch.equal(binding.copies([moved])[0], moved.bfloat16()) and case.right()


def test_a_write_of_a_weight_that_is_gone_is_not_forgotten_where_another_has_its_memory() -> None:
    """Which it got by an op that none of our patches sees."""
    weight, alias, binding = nn.Parameter(torch.randn(40, 30)), torch.empty(0), bind([BF16])
    for _ in range(2):
        binding.copies([weight])
    with torch.no_grad():
        torch.ops.aten.set_.source_Tensor(alias, weight)
        weight[unsampled(weight)].add_(1)
    del weight
    other = nn.Parameter(alias)
    assert torch.equal(binding.copies([other])[0], other.bfloat16())


def test_of_two_steps_at_once_neither_leaves_a_copy_fresh() -> None:
    """Of one weight, in two threads: what the second writes, the copies that the first was lent don't hold."""
    case, steps = Case(), []
    for _ in range(2):
        steps.append(writable_copies([case.weight]))
        torch.autograd.graph.increment_version([case.weight])
    unseen(case.weight)[unsampled(case.weight)] += 1
    for step in reversed(steps):
        step.mark_written()
    assert case.right()


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_without_hooks_is_under_way_until_it_ends_or_somebody_asks(fails: bool) -> None:
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    reports.watch_writers()

    def step() -> None:
        with reports.untold_step(optimizer):
            reports.drop_failed_steps()
            assert reports.in_step(optimizer)
            if fails:
                raise KeyError

    with contextlib.suppress(KeyError):
        step()
    assert reports.in_step(optimizer) == fails
    reports.drop_failed_steps()
    assert not reports.in_step(optimizer)
