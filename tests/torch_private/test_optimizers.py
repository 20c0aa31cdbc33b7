"""Hooks are listed, a step is put back, gradients are recognized, and storages held weakly keep their ids."""

import gc
import pickle
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampcompile.torch_private.optimizers import Marks, pre_hooks, replace_step, restore_step, step_hooks


def test_hooks_of_this_and_of_all_optimizers_are_listed() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    before, hooks = step_hooks(optimizer), [lambda *_: None for _ in range(4)]
    handles = [
        optimizer.register_step_pre_hook(hooks[0]),
        optimizer.register_step_post_hook(hooks[1]),
        register_optimizer_step_pre_hook(hooks[2]),
        register_optimizer_step_post_hook(hooks[3]),
    ]
    try:
        assert set(step_hooks(optimizer)) == {*before, *hooks} and pre_hooks(optimizer) == hooks[:1]
    finally:
        for handle in handles:
            handle.remove()
    assert step_hooks(optimizer) == before and pre_hooks(object()) == []


def test_a_step_is_replaced_on_one_optimizer_and_restored() -> None:
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(first, 0.5)
    own = vars(first)["step"]
    before = replace_step(first, lambda: "ours", lambda protocol: (str, ("a copy",)))
    assert first.step() == "ours" and pickle.loads(pickle.dumps(first)) == "a copy"
    assert first._step_supports_amp_scaling and not hasattr(second, "_step_supports_amp_scaling")
    restore_step(first, before)
    assert first.step is own and vars(second).keys().isdisjoint(["step"]) and scheduler.optimizer is first
    assert pickle.loads(pickle.dumps(first)).param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    "change",
    [lambda x: x.add_(1), lambda x: setattr(x, "data", x.clone()), lambda x: x.set_(x[1:])],
    ids=["add_", "data", "set_"],
)
def test_tensors_are_recognized_until_they_are_written_or_replaced(change: Callable[[Tensor], Any]) -> None:
    x, y, sparse = torch.ones(3), torch.ones(2), torch.eye(2).to_sparse()
    noted = Marks([x, sparse, y])
    assert noted.match([x, sparse, y]) and noted.match([y, x.detach()]) and noted.match([])
    assert noted.match([y, x], [y.data_ptr(), x.data_ptr()]) and not noted.match([y, x], [0, x.data_ptr()])
    assert not noted.match([x, torch.ones(2)])
    change(x)
    assert not noted.match([x]) and noted.match([y, sparse])


def test_noted_tensors_may_be_freed_and_no_other_is_taken_for_one() -> None:
    x = torch.ones(3)
    noted = Marks([x])
    storage = x.untyped_storage()._cdata
    users = torch._C._storage_Use_Count(storage)
    del x
    assert users > torch._C._storage_Use_Count(storage) == 0
    others = [torch.ones(3) for _ in range(100)]
    assert storage not in [other.untyped_storage()._cdata for other in others]
    assert not any(noted.match([other]) for other in others)


def test_marks_that_an_interrupt_left_unmade_are_freed_in_silence() -> None:
    assert not Marks.__new__(Marks)._ids
    gc.collect()  # pytest makes an error of what is raised then


def test_versions_are_taken_once_more_by_a_function_of_c() -> None:
    flat = torch.ones(6)
    x, y, sparse = flat[:3], flat[3:], torch.eye(2).to_sparse()  # views that share a counter
    marks = Marks([x, sparse, y])
    read = marks.version_reader([x, sparse, y])
    torch._foreach_mul_([x, y], 2.0)
    assert not marks.match([x, y]) and not isinstance(read.func, FunctionType)  # type: ignore[attr-defined]
    read()
    assert marks.match([x, y]) and marks.match([y])
    x.add_(1)
    assert not marks.match([x, y])
