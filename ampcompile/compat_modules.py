"""Guards on the identity of modules, which Dynamo leaves out: it shares graphs between modules of one class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import LocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator


def guard_modules_of_frame(gm: torch.fx.GraphModule, names: Mapping[str, str]) -> None:
    """Have the graph being compiled serve only the modules that its frame was called with, the top module excepted.

    After a graph break in a module's `forward` Dynamo compiles the rest once for all modules of that class. Where
    precision depends on a module's path, that would take one module's decisions to the others.
    """
    local = InstructionTranslator.current_tx().output.root_tx.f_locals
    sources = {getattr(node, "_dynamo_source", None) for node in gm.graph.find_nodes(op="placeholder")}
    for source in {_base(source) for source in sources}:
        if isinstance(source, LocalSource) and names.get(str(id(local.get(source.local_name)))):
            install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def _base(source: Any) -> Any:
    while hasattr(source, "base"):
        source = source.base
    return source
