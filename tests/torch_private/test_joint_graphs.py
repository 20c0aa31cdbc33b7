"""AOTAutograd's forward and backward run as they are told to, and random numbers can be drawn again."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

from ampcompile.torch_private import joint_graphs


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x.mul_(2)
        return (self.inner(x).sin(),)


def test_forward_and_backward_are_run_by_functions_of_ours() -> None:
    seen: dict[str, torch.fx.Graph] = {}

    def interpret(name: str) -> joint_graphs.Interpret:
        def made(graph: torch.fx.GraphModule) -> joint_graphs.Run:
            seen[name] = graph.graph
            return lambda args: torch.fx.Interpreter(graph).run(*args)

        return made

    model = Doubled()
    weights = [*model.parameters()]

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return joint_graphs.aot_interpreted(gm, inputs, interpret("forward"), interpret("backward"))

    x = torch.randn(2, 3)
    (expected,) = model(x.clone())
    wanted = torch.autograd.grad(expected.sum(), weights)
    with torch.autocast("cpu"):  # which those graphs don't see
        (result,) = torch.compile(model, backend=backend)(y := x.clone())
    assert torch.equal(result, expected) and torch.equal(y, 2 * x)
    for gradient, of in zip(torch.autograd.grad(result.sum(), weights), wanted, strict=True):
        assert torch.equal(gradient, of)
    written = [node for node in seen["forward"].nodes if getattr(node.target, "_schema", None) is not None]
    assert all(not node.target._schema.is_mutable for node in written), "the graphs are functional"

    before = [node for node in seen["backward"].nodes if "fwd_nn_module_stack" in node.meta]
    assert before, "torch names the modules of the forward"
    joint_graphs.name_backward_nodes(seen["backward"])
    assert any("inner" in str(node.meta["nn_module_stack"]) for node in before)


def test_a_dictionary_of_tensors_goes_by_identity_and_keeps_none() -> None:
    names = joint_graphs.by_tensor()
    x, same = torch.ones(2), torch.ones(2)
    names[x] = "x"
    assert x in names and same not in names
    del x
    gc.collect()
    assert len(names) == 0


def test_the_same_numbers_are_drawn_again() -> None:
    state = joint_graphs.random_state()
    drawn = torch.randn(4)
    joint_graphs.start_from(state)
    assert torch.equal(torch.randn(4), drawn)
