"""Leave graphs that capture can't trace to autocast: they run as Dynamo made them, under the call's autocast state.

Capture traces plain tensors. Some tensor subclasses hold others and have rules of their own for every op: DTensor,
quantized weights. Stock torch.compile traces such a graph under autocast, whose casts are then part of it, forward and
backward. So does this module; it adds our lowering, float32 results, and copies of weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ampcompile.config import Options
from ampcompile.dtypes import LOW
from ampcompile.errors import warn_user
from ampcompile.passes.after.bind_weights import BindWeights
from ampcompile.passes.after.write_roundings import WriteRoundings
from ampcompile.passes.analysis.commuting import CONVERT
from ampcompile.passes.analysis.op_traits import arguments_by_name, written_arguments
from ampcompile.passes.analysis.products import NO_PRODUCTS
from ampcompile.passes.before.hoist_weights import add_copy
from ampcompile.passes.graph import graphs, placeholders, replace_node
from ampcompile.passes.weight_copy import WEIGHT_COPY
from ampcompile.policy import Policy
from ampcompile.torch_private import autocast, compiled_functions, cuts, lowering, pytree, storages, tracing
from ampcompile.torch_private.dispatcher import TorchDispatchMode, is_traceable_wrapper_subclass
from ampcompile.weights.spec import CopySpec, Form, hoistable_parameters

from . import inductor
from .double_backward import SUBCLASSES, DoubleBackward, copy_with_bodies

TO_COPY = torch.ops.aten._to_copy.default
LEFT_TO_AUTOCAST = "amp_left"  # in `gm.meta`, why a graph is left to autocast


def find_reason(gm: GraphModule) -> str:
    """The reason why a graph of Dynamo's is left to autocast; empty if it isn't."""
    names = sorted({type(value).__name__ for graph in graphs(gm) for value in _not_carried(graph)})
    return f"it computes with {', '.join(names)}, which ampcompile doesn't rewrite" if names else ""


def _not_carried(gm: GraphModule) -> Iterator[Any]:
    for node in gm.graph.nodes:
        # Capture traces nested tensors, but not the ops that make one from other tensors.
        carried = node.op == "placeholder" or any(v.is_nested for n in node.all_input_nodes for v in _subclasses(n))
        yield from (value for value in _subclasses(node) if not (value.is_nested and carried))


def _subclasses(node: Node) -> list[Any]:
    return [
        value for value in pytree.tree_leaves(node.meta.get("example_value")) if is_traceable_wrapper_subclass(value)
    ]


def warn_of_policy(reason: str, policy: Policy) -> None:
    """Warn that a graph doesn't follow the user's policy."""
    if policy != Policy():
        warn_user(
            f"found the policy {str(policy)!r} for a graph that is left to autocast, whose rules it follows instead: "
            f"{reason}. Put ampcompile.precision on the modules that are to run in another dtype."
        )


def lower_under_autocast(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, on_cut: cuts.OnCut | None = None
) -> tuple[Callable[..., Any], list[CopySpec]]:
    """Lower a graph of Dynamo's as stock torch.compile does, under the current autocast state. `on_cut`: see `lower`.

    Returns the callable, and the copies of weights that are its last inputs.
    """
    if options.lower == "eager":
        return gm, []
    fakes, casts = find_casts(gm, example_inputs) if options.weights == "cached" else ([], [])
    if casts:  # Dynamo reads the inputs of its own graph once more
        gm = copy_with_bodies(gm)
        for node in placeholders(gm):
            node.meta.pop("grapharg", None)  # weak references to all inputs, which would forbid `swap_tensors`
    copies = [add_copy(gm, f"weight_{i}", storages.local_part(fakes[i]), Form(dtype)) for i, dtype in casts]
    gm.recompile()
    inputs = [*example_inputs, *(copy.meta["val"] for copy in copies)]
    read = partial(_read_copies, {cast: len(example_inputs) + n for n, cast in enumerate(casts)})
    with compiled_functions.functions_made() as functions, cuts.within_budget(options.activation_memory_budget):
        if options.lower == "aot_eager":
            compiled = lowering.aot_eager(gm, inputs, read, cuts.Cutter(None, on_cut))
        else:
            # Autocast's dtypes are part of torch's own key only from 2.13 on.
            key = f"{inductor.cache_key(NO_PRODUCTS)} {autocast.autocast_states()} {casts}"
            config, ours = inductor.settings_for(gm, inputs, options), inductor.decompositions()
            compiled = lowering.inductor(gm, inputs, config, read, key, ours, on_cut=on_cut)
    if functions:
        DoubleBackward(gm, functions[-1], SUBCLASSES)  # so that a second derivative raises an error of ours
    return compiled, [CopySpec(i, Form(dtype)) for i, dtype in casts]


def _read_copies(copied: Mapping[tuple[int, torch.dtype], int], gm: GraphModule) -> None:
    """Replace the casts of weights after differentiation: `copied` has the index of each copy, by weight and dtype."""
    inputs = lowering.inputs_of_dynamo(gm)
    for (weight, dtype), copy in copied.items():
        if weight not in inputs or copy not in inputs:
            continue
        casts = {TO_COPY: ((), {"dtype": dtype}), CONVERT: ((dtype,), {})}
        for cast in list(inputs[weight].users):
            if casts.get(cast.target) == (cast.args[1:], cast.kwargs):
                with gm.graph.inserting_before(cast):
                    read = gm.graph.call_function(WEIGHT_COPY, (inputs[weight], inputs[copy], dtype))
                read.meta = dict(cast.meta)
                replace_node(cast, read)
    BindWeights().apply(gm)
    WriteRoundings().apply(gm)


def find_casts(gm: GraphModule, example_inputs: Sequence[Any]) -> tuple[list[Any], list[tuple[int, torch.dtype]]]:
    """Run a graph on fakes under the current autocast state, to find which weights autocast casts to 16 bits.

    Returns the fakes, and index and dtype of each cast; none if the graph writes to a weight or fails on fakes.
    """
    if not (weights := hoistable_parameters(example_inputs)):
        return [], []
    fakes, mode = tracing.fake_inputs(example_inputs)
    try:
        with tracing.computing_on(mode), torch.no_grad(), autocast.state_restored():
            # Without gradients autocast's cache keeps no casts.
            inputs = [value.detach() if isinstance(value, torch.Tensor) else value for value in fakes]
            laid_out = {i: inputs[i] for i in weights if tracing.is_of_fixed_layout(storages.local_part(inputs[i]))}
            with _Casts(laid_out) as casts:
                gm(*inputs)
    except Exception:  # AOTAutograd runs it on fakes too, and raises what is to be raised
        return [], []
    return fakes, [] if casts.written else list(casts.found)


class _Casts(TorchDispatchMode):
    """Finds the casts of `weights`, fakes by index, to 16 bits, and if one of them is written."""

    def __init__(self, weights: Mapping[int, Any]) -> None:
        super().__init__()
        self._index = {id(weight): i for i, weight in weights.items()}
        self._storages = {storages.storage_key(storages.local_part(weight)) for weight in weights.values()}
        self._weights = weights  # alive, so that the ids stay theirs
        self.found: dict[tuple[int, torch.dtype], None] = {}
        self.written = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if op is TO_COPY and id(args[0]) in self._index and result.dtype in LOW and args[0].dtype == torch.float32:
            self.found[self._index[id(args[0])], result.dtype] = None
        names = written_arguments(op)
        written = [value for name, value in arguments_by_name(op, args, kwargs or {}).items() if name in names]
        for value in pytree.tree_leaves(written):
            self.written |= storages.storage_key(storages.local_part(value)) in self._storages
        return result
