"""Every change of a tensor's kind is told, and no other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompile.torch_private.tensor_guards import TensorGuards

SAME: dict[str, Callable[[list[Any]], Any]] = {
    "written": lambda x: x[0].data.add_(1),
    "another of its kind": lambda x: x.__setitem__(1, torch.empty(3, 3)),
    "other memory": lambda x: setattr(x[0], "data", x[0].data.clone()),
}
OTHER: dict[str, Callable[[list[Any]], Any]] = {
    "one less": lambda x: x.pop(),
    "one more": lambda x: x.append(torch.ones(1)),
    "the same twice": lambda x: x.__setitem__(1, x[2]),
    "not a tensor": lambda x: x.__setitem__(1, None),
    "a class": lambda x: x.__setitem__(1, nn.Parameter(x[1], requires_grad=False)),
    "needs no gradient": lambda x: x[0].requires_grad_(False),
    "transposed": lambda x: setattr(x[0], "data", x[0].data.t()),
    "a part": lambda x: setattr(x[0], "data", x[0].data[:2]),
    "a dtype": lambda x: setattr(x[0], "data", x[0].data.half()),
    "another dtype of the size": lambda x: x.__setitem__(1, x[1].view(torch.int32)),
    "negated": lambda x: setattr(x[0], "data", torch._neg_view(x[0].data)),
    "sparse": lambda x: x.__setitem__(1, x[1].to_sparse()),
    "a device": lambda x: x.__setitem__(1, x[1].to("meta")),
    "of inference mode": lambda x: x.__setitem__(1, inference()),
}


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3, 3)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("change", [*SAME, *OTHER])
@pytest.mark.parametrize("grad_mode", [True, False])
def test_tensors_of_the_same_kind(change: str, grad_mode: bool) -> None:
    tensors: list[Any] = [nn.Parameter(torch.ones(3, 3)), torch.ones(3, 3), torch.ones(3, 3)]
    with torch.set_grad_enabled(grad_mode):
        guards = TensorGuards(tensors)
        assert guards.hold(tensors)
        (SAME | OTHER)[change](tensors)
        assert guards.hold(tensors) == (change in SAME)
    if change in SAME:
        assert guards.hold(tensors), "in either grad mode"


def test_they_hold_no_tensor() -> None:
    x = torch.ones(3)
    storage = x.untyped_storage()._weak_ref()
    guards = TensorGuards([x])
    del x
    assert torch.UntypedStorage._expired(storage)
    assert guards.hold([torch.zeros(3)])
    torch.UntypedStorage._free_weak_ref(storage)
