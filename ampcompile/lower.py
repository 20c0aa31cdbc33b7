"""Who runs the rewritten graph: Inductor, AOTAutograd with eager kernels, or the graph itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch.fx import GraphModule

from . import compat, weights
from .config import Options
from .passes import bind_weights
from .passes.base import run_passes
from .passes.hoist_weights import Slot


def lower(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """The callable that Dynamo installs. Casts are explicit in `gm`: no autocast acts while it is lowered or runs."""
    copies = [node for node in gm.graph.find_nodes(op="placeholder") if "amp_copy" in node.meta]
    slots = [node.meta["amp_copy"] for node in copies]
    inputs = [*example_inputs, *(node.meta["val"] for node in copies)]
    compat.forget_output_values(gm)
    if options.lower == "eager":
        run_passes([bind_weights.BindWeightsEagerly()], gm)
        compiled = _without_autocast(gm)
    elif options.lower == "aot_eager":
        with compat.lowering_without_autocast():
            compiled = compat.aot_eager(gm, inputs, on_joint_graph=bind_weights.bind)
    else:
        with compat.lowering_without_autocast():
            compiled = compat.inductor(gm, inputs, _inductor_config(options), on_joint_graph=bind_weights.bind)
    return _with_copies(compiled, slots, options) if slots else compiled


def _inductor_config(options: Options) -> dict[str, Any]:
    return {"emulate_precision_casts": options.numerics == "eager", **dict(options.inductor)}


def _with_copies(compiled: Callable[..., Any], slots: Sequence[Slot], options: Options) -> Callable[..., Any]:
    indices = [slot.weight for slot in slots]
    # CUDA graphs record addresses: their copies are refreshed in place, always.
    replayed = dict(options.inductor).get("triton.cudagraphs", False)
    binding = weights.bind([None] * len(slots), [slot.dtype for slot in slots], in_place=replayed)
    copies = binding.copies
    pick = itemgetter(*indices) if len(indices) > 1 else lambda args: (args[indices[0]],)

    def run(*args: Any) -> Any:
        return compiled(*args, *copies(pick(args)))

    return run


def _without_autocast(gm: GraphModule) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with compat.autocast_off():
            return gm(*args)

    return run
