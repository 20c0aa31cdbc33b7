"""The graphs of a function after the pipeline, for tests that look at what a pass did."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ampcompile.compiler.backend import Rewritten, rewrite
from ampcompile.compiler.lower import lower
from ampcompile.config import Options


def rewritten(f: Callable[..., Any], *args: Any, **options: Any) -> list[Rewritten]:
    """Every graph that Dynamo finds in `f(*args)`, rewritten under `options`; AOTAutograd runs them."""
    found: list[Rewritten] = []
    parsed = Options.parse({"lower": "aot_eager", **options})
    run = replace(parsed, lower="aot_eager") if parsed.lower == "inductor" else parsed

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(rewrite(gm, example_inputs, parsed))
        return lower(found[-1].graph, example_inputs, run)

    backend.amp_options = lambda **_: parsed
    torch.compile(f, backend=backend)(*args)
    return found


def count(rewritten_graph: Rewritten, target: Any) -> int:
    """How many calls of `target` a rewritten graph holds, bodies of higher-order ops included."""
    modules = [m for m in rewritten_graph.graph.modules() if isinstance(m, torch.fx.GraphModule)]
    return sum(len(m.graph.find_nodes(op="call_function", target=target)) for m in modules)


@dataclass(frozen=True)
class Acts:
    """A pass that does `act` to a graph."""

    name: str
    act: Callable[[torch.fx.GraphModule], None]
    exact: bool = True
    fate: str = ""

    def apply(self, gm: torch.fx.GraphModule) -> int:
        self.act(gm)
        return 1


def fail(gm: torch.fx.GraphModule) -> None:
    raise KeyError("x")


def lie(gm: torch.fx.GraphModule) -> None:
    """Says of a sine that it is wider than it is."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
        node.meta["val"] = node.meta["val"].double()
