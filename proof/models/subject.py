"""A model of the sweep, how it is made and called, and the ways in which it is run: eager, in float64, compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from proof.ops.calls import grads_of

MODES = ("train", "eval", "no_grad")
Inputs = dict[str, Any]


def call_by_name(run: Callable[..., Any], inputs: Inputs) -> Any:
    """One call with the inputs by name."""
    return run(**inputs)


@dataclass(frozen=True)
class Case:
    """`build` makes a model with random weights, `inputs` draws what it is given; both from torch's generator."""

    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    call: Callable[[Callable[..., Any], Inputs], Any] = call_by_name
    """The call of the model, or with the compiled one in its place."""
    package: str = "torch"
    """The package that it needs."""


class Run(NamedTuple):
    """Results of one call: tensors that it returned, gradients of parameters, buffers that it wrote."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    buffers: list[Tensor]


class Subject:
    """A case's model in one mode. All ways share its weights, but for the copies in float64."""

    def __init__(self, case: Case, mode: str) -> None:
        self.case, self.mode = case, mode
        self.model = _without_dropout(case.build()).train(mode == "train")
        self.buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def run(self, how: Callable[..., Any], inputs: Inputs, around: AbstractContextManager) -> Run:
        """Call `how`, this model compiled or as it is, as if it were the first call."""
        return self._run(how, self.model, inputs, around)

    def exact(self, inputs: Inputs) -> Run:
        """In float64, or in float32 if something has no kernel for that."""
        try:
            model = _taking_float64(copy.deepcopy(self.model).double())
            return self._run(model, model, pytree.tree_map(_in_double, inputs), nullcontext())
        except Exception:
            return self.run(self.model, inputs, nullcontext())

    def _run(self, how: Any, model: nn.Module, inputs: Inputs, around: AbstractContextManager) -> Run:
        for name, buffer in model.named_buffers():
            buffer.copy_(self.buffers[name])
        asked: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        fresh = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, inputs)
        torch.manual_seed(0)
        with torch.set_grad_enabled(self.mode != "no_grad"), around:
            results = self.case.call(how, fresh)
        found = [y for y in pytree.tree_leaves(results) if isinstance(y, Tensor)]
        gradients = grads_of(found, asked) if self.mode != "no_grad" else []
        return Run([y.detach() for y in found], gradients, [b.clone() for b in model.buffers()])

    def step(self) -> None:
        """Change all weights in place, as an optimizer does."""
        for p in self.model.parameters():
            p.grad = torch.randn_like(p) * p.detach().abs()
        torch.optim.SGD(self.model.parameters(), lr=0.2).step()
        self.model.zero_grad()

    def write_data(self) -> None:
        """Change all weights through `.data`, which no version counter tells of."""
        for p in self.model.parameters():
            p.data.mul_(1 + 0.2 * torch.randn_like(p))


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def _taking_float64(model: Any) -> nn.Module:
    """Grouped products have no kernel for float64; transformers has another way to write them."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def _in_double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
