"""Cast the parts, not the whole: replace a narrowing cast of the result of `cat` or `stack` by casts of its operands.

As many numbers are cast, but half the bytes are joined; a part that was widened from the low type is then read in the
low type, and a part that is a weight has a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ampcompile.dtypes import is_lossless
from ampcompile.passes.analysis.aliasing import Aliases
from ampcompile.passes.analysis.commuting import CAST, move_cast, same_layout
from ampcompile.passes.analysis.op_traits import JOINS, has
from ampcompile.passes.analysis.sizes import is_float_tensor
from ampcompile.passes.graph import cast_of, graphs
from ampcompile.torch_private import tracing


@dataclass(frozen=True)
class SplitCastsOverCat:
    """Returns the number of casts split. Gradients are split and cast as before, so they keep their bits."""

    name = "split_casts_over_cat"
    exact = True
    fate = "moved"

    def apply(self, gm: GraphModule) -> int:
        with tracing.on_fakes_of(gm), torch.no_grad():
            return sum(map(_split_in, graphs(gm)))


def _split_in(gm: GraphModule) -> int:
    casts = [cast for cast in gm.graph.find_nodes(op="call_function", target=CAST) if _narrows_a_whole(cast)]
    memory = Aliases(gm.graph) if casts else None
    return sum(_split(gm.graph, cast, memory) for cast in casts if memory is not None)


def _narrows_a_whole(cast: Node) -> bool:
    whole = cast.args[0]
    if not cast_of(cast) or not isinstance(whole, Node) or len(whole.users) > 1:
        return False
    if not has(whole.target, JOINS) or not whole.args:
        return False
    low, high = cast.meta["val"].dtype, whole.meta["val"].dtype
    parts = [part.meta["val"] for part in whole.all_input_nodes]
    return is_lossless(low, high) and all(is_float_tensor(part) and is_lossless(part.dtype, high) for part in parts)


def _split(graph: Graph, cast: Node, memory: Aliases) -> bool:
    whole, dtype = cast.args
    assert isinstance(whole, Node)
    parts: Any = whole.args[0]
    if any(map(memory.is_written, (*parts, whole, cast))) or memory.is_visible_outside(cast):
        return False
    join: Any = whole.target
    value = join([part.meta["val"].to(dtype) for part in parts], *whole.args[1:], **whole.kwargs)
    if not same_layout(value, cast.meta["val"]):
        return False
    with graph.inserting_before(whole):
        whole.update_arg(0, [part if part.meta["val"].dtype == dtype else move_cast(cast, part) for part in parts])
    whole.meta["val"] = value
    cast.replace_all_uses_with(whole)
    graph.erase_node(cast)
    return True
