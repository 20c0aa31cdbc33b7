"""Lower the rewritten graph: through Inductor, through AOTAutograd with eager kernels, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from torch.fx import GraphModule, Node

from ampcompile.config import Options
from ampcompile.errors import warn_user
from ampcompile.kernels.packed_conv import CONVOLVE, PACKED_CONV, convolve_arguments
from ampcompile.kernels.packed_linear import MULTIPLY, PACKED_LINEAR, multiply_arguments
from ampcompile.passes import pipeline
from ampcompile.passes.after.save_old_values import CLONE, OLD_VALUE, SaveOldValues
from ampcompile.passes.analysis.aliasing import inputs_written_below_autograd, reads_data
from ampcompile.passes.analysis.products import WideProducts
from ampcompile.passes.base import Pass, Watch, run_passes
from ampcompile.passes.before.hoist_weights import other_reads
from ampcompile.passes.graph import graphs, module_path, name_modules, notes_of, op_name, placeholders
from ampcompile.sharding.weight import ShardedWeight
from ampcompile.torch_private import autocast, compiled_functions, cuts, lowering, storages
from ampcompile.weights import CopySpec, ShardBinding, hoistable_parameters

from . import current_call, inductor
from .compiled_graph import CompiledGraph
from .double_backward import DoubleBackward, copy_with_bodies
from .left_to_autocast import LEFT_TO_AUTOCAST, lower_under_autocast
from .module_names import module_names
from .plain_graph import exclude_autocast

if TYPE_CHECKING:
    from .watched_graph import WatchedGraph

COLLECTIVE_UNDER_WAY = (
    "found an input that is the result of a collective under way, as a sharded embedding's is, whose gradient torch's "
    "compilers get wrong: this graph runs eagerly. Put x = x.clone() between that layer and what is compiled."
)

Made = Callable[..., CompiledGraph]


def lower(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    watch: Watch | None = None,
    wide: WideProducts | None = None,
    on_cut: cuts.OnCut | None = None,
) -> Callable[..., Any]:
    """Return the callable that Dynamo installs. `gm` has explicit casts: it is lowered and runs without autocast.

    A graph that is left to autocast is lowered under autocast. `watch` is called with the graph after differentiation,
    and after each later pass (`aot_eager` only). `wide`: the products that run in float32, if not those of `options`.
    `on_cut` is called with forward and backward, if there is a backward; what Inductor compiled then has no kernels.
    """
    kind = _leave if LEFT_TO_AUTOCAST in gm.meta else _run_eagerly if options.lower == "eager" else _compile
    sharded, whole = _find_reads(gm, example_inputs)
    made = partial(CompiledGraph, options=options, sharded=sharded, whole=whole)
    return kind(gm, example_inputs, options, made, watch, wide, on_cut).installed(example_inputs)


def _leave(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, made: Made, _: Any, __: Any, on_cut: Any
) -> CompiledGraph:
    """A graph that is left to autocast: Dynamo's own, lowered as stock torch.compile does."""
    if options.lower != "eager" and storages.are_under_way(example_inputs):
        warn_user(COLLECTIVE_UNDER_WAY)
        options = replace(options, lower="eager")
    compiled, specs = lower_under_autocast(gm, example_inputs, options, on_cut)
    tensors = (i for i, value in enumerate(example_inputs) if isinstance(value, torch.Tensor))
    written = [*tensors] if reads_data(gm) else []
    return made(compiled, specs=specs, written=written, keeper=ShardBinding)


def _run_eagerly(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, made: Made, *_: Any
) -> CompiledGraph:
    """A rewritten graph that runs op by op, and that autograd differentiates."""
    lowering.forget_output_values(gm)
    written, specs = inputs_written_below_autograd(gm), [spec for _, spec in _copies(gm)]
    return made(exclude_autocast(gm), specs=specs, written=written)


def _compile(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    made: Made,
    watch: Watch | None,
    wide: WideProducts | None,
    on_cut: cuts.OnCut | None,
) -> CompiledGraph:
    """A rewritten graph that AOTAutograd differentiates, for Inductor or for eager kernels."""
    copies = _copies(gm)
    specs, inputs = [spec for _, spec in copies], [*example_inputs, *(node.meta["val"] for node, _ in copies)]
    lowering.forget_output_values(gm)
    written = inputs_written_below_autograd(gm)
    wide, watched = WideProducts.on_this_cpu(options) if wide is None else wide, None
    if options.watch and placeholders(gm):
        watched = _watched(gm, inputs)
        inputs.append(watched.slots)
    passes = partial(_on_joint_graph, pipeline.after(wide, None if watched is None else watched.values))
    cutter = None
    if options.saved.modules:
        cutter = cutter_to_8_bits(gm, example_inputs, options, module_names(current_call.callable), on_cut)
    rewritten = copy_with_bodies(gm) if torch.is_grad_enabled() else None
    budget = cuts.within_budget(options.activation_memory_budget)
    with autocast.lowering_without_autocast(), compiled_functions.functions_made() as functions, budget:
        under_budget = torch.is_grad_enabled() and cuts.budget_of(gm) < 1
        again = [i for i, value in enumerate(example_inputs) if under_budget and isinstance(value, torch.nn.Parameter)]
        if options.lower == "aot_eager":
            compiled = lowering.aot_eager(gm, inputs, partial(passes, watch), cutter or cuts.Cutter(None, on_cut))
        else:
            lowering.lower_as_call(PACKED_LINEAR, MULTIPLY, multiply_arguments, on_rows=True)
            lowering.lower_as_call(
                PACKED_CONV, CONVOLVE, lambda x, *rest: convolve_arguments(lowering.channels_last(x), *rest)
            )
            lowering.lower_like(OLD_VALUE, CLONE)
            settings = {}
            if any(spec.blocks is not None for spec in specs):
                settings["size_asserts"] = False  # a packed tensor has no strides to assert
            if watched is not None:
                settings["reorder_for_locality"] = False  # it moves magnitudes away from what reads the values
            # A watched graph's key is unique: no cache keeps the values that are watched.
            key = inductor.cache_key(wide) if watched is None else str(uuid4())
            config, ours = inductor.settings_for(gm, inputs, options, **settings), inductor.decompositions()
            given = partial(passes, None), key, ours, SaveOldValues().apply, on_cut, cutter
            compiled = lowering.inductor(gm, inputs, config, *given)
    second = DoubleBackward(rewritten, functions[-1]) if rewritten is not None and functions else None
    usable = None if second is None or second.refusal else second
    return made(compiled, specs=specs, second=usable, written=written, watched=watched, again=again)


def _copies(gm: GraphModule) -> list[tuple[Node, CopySpec]]:
    """The inputs that are copies of weights, and what they are."""
    return [(node, spec) for node in placeholders(gm) if (spec := notes_of(node).copy) is not None]


def cutter_to_8_bits(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    paths: Mapping[str, str],
    on_cut: cuts.OnCut | None,
    cut: Callable[..., Any] | None = None,
) -> cuts.Cutter:
    """What cuts a graph and keeps the values that the user chose in 8 bits. Its key has the choice, and the
    modules of all ops: AOTAutograd's caches would else give a graph what was chosen in an equal graph of other modules.

    `paths`: of modules, for `name_modules`. `cut`: how it is cut, if not by torch's partitioner.
    """
    from ampcompile.passes.after.keep_in_8_bits import keep_in_8_bits  # few graphs ask for it

    weights = {i for i, value in enumerate(example_inputs) if isinstance(value, torch.nn.Parameter)}

    def change(cut: cuts.Cut) -> None:
        with name_modules(paths):
            keep_in_8_bits(cut, lambda path: options.saved.of_module(path) == "fp8", weights)

    with name_modules(paths):
        modules = " ".join(module_path(node) for each in graphs(gm) for node in each.graph.nodes)
    return cuts.Cutter(cut, on_cut, change, f"{inductor.source_key()} {options.saved} {modules}")


def _find_reads(gm: GraphModule, example_inputs: Sequence[Any]) -> tuple[dict[int, str], list[int]]:
    """What reads each weight that FSDP gathers under a shard policy in float32, by index; empty: nothing does. And the
    indices of the parameters that the graph reads themselves, not only copies of them.
    """
    nodes = placeholders(gm)

    def reader_of(i: int) -> str:
        if LEFT_TO_AUTOCAST in gm.meta:
            return "a graph that is left to autocast"
        reader = next(other_reads(nodes[i]), None)
        return "" if reader is None else f"{op_name(reader.target)} in a compiled graph"

    sharded = {i: reader_of(i) for i, value in enumerate(example_inputs) if type(value) is ShardedWeight}
    return sharded, [i for i in hoistable_parameters(example_inputs) if reader_of(i)]


def _watched(gm: GraphModule, inputs: Sequence[Any]) -> WatchedGraph:
    """Let a graph compute the magnitudes of its values."""
    from .watched_graph import WatchedGraph  # here: few graphs are watched, and it defines an op

    device = next((value.device for value in inputs if isinstance(value, torch.Tensor)), torch.device("cpu"))
    watched = WatchedGraph(device, current_call.callable)
    watched.attach(gm)
    return watched


def _on_joint_graph(passes: Sequence[Pass], watch: Watch | None, gm: GraphModule) -> None:
    if watch is not None:
        watch(None, gm)
    run_passes(passes, gm, watch)
