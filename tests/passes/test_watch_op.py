"""Where autograd itself differentiates a graph, the op returns its input, and gradients reach it, twice."""

import torch

from ampcompile.passes.watch_op import SLOTS, watched


def test_it_returns_its_input_and_its_gradient() -> None:
    slots = torch.rand(SLOTS, requires_grad=True)
    out = watched(slots, False)
    assert torch.equal(out, slots) and out.data_ptr() != slots.data_ptr()
    (grad,) = torch.autograd.grad(out.square().sum(), slots, create_graph=True)
    assert torch.equal(grad, 2 * slots)
    assert torch.autograd.grad(grad.sum(), slots)[0].eq(2).all()
