"""Graphs with bodies write each buffer once, and buffers are read under the names of their latest writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch._inductor.dependencies import MemoryDep, ReadWrites
from torch.utils._ordered_set import OrderedSet

from ampcompile.torch_private import lowering
from tests.compiling import Looking


def test_graphs_with_loops_and_nested_regions_write_each_buffer_once() -> None:
    backend = Looking(lambda gm, inputs: lowering.config_for_bodies(gm))

    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    for f in (branch, lambda x: x.sin()):
        torch.compile(f, backend=backend)(torch.randn(3))
    careful = {"inplace_buffers": False, "allow_buffer_reuse": False}
    assert backend.found == [careful, {}]
    assert careful.keys() <= torch._inductor.config.get_config_copy().keys()


class Upsampled(torch.nn.Module):
    """What the end of a UNet is: an upsampled image beside another one, read by two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        conv = torch.nn.Conv2d
        self.below, self.skip, self.out = conv(16, 16, 3, padding=1), conv(24, 8, 1), conv(24, 8, 3, padding=1)
        self.norm = torch.nn.GroupNorm(8, 24)

    def both(self, x: Tensor, beside: Tensor) -> Tensor:
        return torch.cat([torch.nn.functional.interpolate(self.below(x), scale_factor=2.0), beside], 1)

    def forward(self, x: Tensor, beside: Tensor) -> Tensor:
        return self.skip(self.both(x, beside)) + self.out(self.norm(self.both(x, beside)))


@pytest.mark.ci
def test_a_gradient_that_is_summed_in_place_is_read_after_that() -> None:
    """Stock Inductor reads zeros there, up to torch 2.13."""
    module, x, beside = Upsampled(), torch.randn(2, 16, 8, 8, requires_grad=True), torch.randn(2, 8, 16, 16)
    (expected,) = torch.autograd.grad(module(x, beside).square().sum(), x)
    run = torch.compile(module, backend="amp")
    (found,) = torch.autograd.grad(run(x, beside).float().square().sum(), x)
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_loops_that_are_computed_anew_keep_the_names_of_later_writes() -> None:
    """Before torch 2.15 they read a buffer by its first name, and the write between is forgotten."""
    read = MemoryDep("first", sympy.Integer(0), (), ())
    node: Any = SimpleNamespace(mutation_renames={"first": "later"}, read_writes=None)
    node.set_read_writes = lambda found: setattr(node, "read_writes", found)

    def recompute(node: Any, of: MemoryDep) -> None:
        node.read_writes = ReadWrites(OrderedSet([of]), OrderedSet(), OrderedSet())

    lowering._rename_after_recompute(recompute)(node, read)
    assert [dep.name for dep in node.read_writes.reads] == ["later"]
