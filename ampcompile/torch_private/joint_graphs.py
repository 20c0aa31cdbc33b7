"""AOTAutograd for auditing: forward and backward as two graphs of plain ops, run by functions of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from . import autocast

Run = Callable[[list[Any]], Any]
Interpret = Callable[[GraphModule], Run]


def aot_interpreted(
    gm: GraphModule, inputs: Sequence[Any], forward: Interpret, backward: Interpret, under_autocast: bool = False
) -> Any:
    """Return AOTAutograd's callable for `gm`, which runs `forward(graph)` and `backward(graph)`; lists in, lists out.

    The graphs are functional: nothing is written in place. Whatever backward reads is saved, nothing is recomputed.
    `under_autocast`: the casts of the autocast now open become part of them.
    """
    from functorch.compile import default_partition
    from torch._dynamo.backends.common import aot_autograd

    def compiler(interpret: Interpret) -> Callable[..., Any]:
        def compile_graph(graph: GraphModule, example_inputs: Any) -> Run:
            run = interpret(graph)

            def boxed(args: list[Any]) -> Any:
                arguments = list(args)
                args.clear()
                return run(arguments)

            boxed._boxed_call = True  # type: ignore[attr-defined]
            return boxed

        return compile_graph

    with contextlib.nullcontext() if under_autocast else autocast.lowering_without_autocast():
        return aot_autograd(
            fw_compiler=compiler(forward),
            bw_compiler=compiler(backward),
            inference_compiler=compiler(forward),
            partition_fn=default_partition,
        )(gm, list(inputs))


def name_backward_nodes(graph: torch.fx.Graph) -> None:
    """Give nodes of a backward graph the module stack of the forward op they differentiate, as `nn_module_stack`."""
    for node in graph.nodes:
        if "fwd_nn_module_stack" in node.meta:
            node.meta.setdefault("nn_module_stack", node.meta["fwd_nn_module_stack"])


def random_state() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The state of the generators of the CPU and of every GPU."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def start_from(state: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    """Restore this state of the generators: the numbers drawn after `random_state` are drawn again."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
