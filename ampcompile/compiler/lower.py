"""Who runs the rewritten graph: Inductor, AOTAutograd with eager kernels, or the graph itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch.fx import GraphModule

from ampcompile import weights
from ampcompile.config import Options
from ampcompile.kernels.packed_conv import CONVOLVE, PACKED_CONV, convolve_arguments
from ampcompile.kernels.packed_linear import MULTIPLY, PACKED_LINEAR, multiply_arguments
from ampcompile.passes import pipeline
from ampcompile.passes.analysis.aliasing import inputs_written_below_autograd, reads_data
from ampcompile.passes.base import Pass, Watch, run_passes
from ampcompile.passes.fuse.matching import GRAPH_BEFORE_FUSION
from ampcompile.passes.weight_copy import Slot
from ampcompile.torch_private import autocast, compiled_functions, lowering, tracing

from . import double_backward, widen_outputs
from .cache_key import cache_key
from .decompositions import decompositions
from .left_to_autocast import LEFT, lower_as_made
from .plain_graph import exclude_autocast


def lower(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, watch: Watch | None = None
) -> Callable[..., Any]:
    """The callable that Dynamo installs. Casts are explicit in `gm`: no autocast acts while it is lowered or runs.

    That is, unless `gm` is left to autocast.

    `watch` sees the graph after differentiation, and after each pass on it (`aot_eager` only).
    """
    leaves = widen_outputs.adapt_to_caller(gm)
    if LEFT in gm.meta:
        tensors = [i for i, value in enumerate(example_inputs) if isinstance(value, torch.Tensor)]
        return leaves(_invalidate_after(lower_as_made(gm, example_inputs, options), tensors if reads_data(gm) else []))
    copies = [node for node in gm.graph.find_nodes(op="placeholder") if "amp_copy" in node.meta]
    slots = [node.meta["amp_copy"] for node in copies]
    inputs = [*example_inputs, *(node.meta["val"] for node in copies)]
    lowering.forget_output_values(gm)
    written = inputs_written_below_autograd(gm)

    def around(compiled: Callable[..., Any]) -> Callable[..., Any]:
        run = _with_copies(compiled, slots, options) if slots else compiled
        return leaves(_invalidate_after(run, written))

    if options.lower == "eager":
        return around(exclude_autocast(gm))
    emulated, small = options.emulated(), options.widens_small()
    passes = partial(_on_joint_graph, pipeline.after(emulated, small))
    rewritten = (
        (gm.meta.pop(GRAPH_BEFORE_FUSION, None) or double_backward.copy_with_bodies(gm))
        if torch.is_grad_enabled()
        else None
    )
    with autocast.lowering_without_autocast(), compiled_functions.functions_made() as functions:
        if options.lower == "aot_eager":
            compiled = lowering.aot_eager(gm, inputs, partial(passes, watch))
        else:
            lowering.lower_as_call(PACKED_LINEAR, MULTIPLY, multiply_arguments)
            lowering.lower_as_call(PACKED_CONV, CONVOLVE, _convolve_channels_last)
            config = _inductor_config(gm, options, slots)
            key = cache_key(emulated, small)
            compiled = lowering.inductor(gm, inputs, config, partial(passes, None), key, decompositions())
    if rewritten is not None and functions:
        compiled = double_backward.DoubleBackward(rewritten, functions[-1])(compiled)
    return around(compiled)


def _convolve_channels_last(x: Any, *rest: Any) -> tuple[Any, ...]:
    return convolve_arguments(lowering.channels_last(x), *rest)


def _on_joint_graph(passes: Sequence[Pass], watch: Watch | None, gm: GraphModule) -> None:
    if watch is not None:
        watch(None, gm)
    run_passes(passes, gm, watch)


def _inductor_config(gm: GraphModule, options: Options, slots: Sequence[Slot]) -> dict[str, Any]:
    config: dict[str, Any] = {"emulate_precision_casts": options.numerics == "eager", **lowering.config_for_bodies(gm)}
    if any(slot.blocks is not None for slot in slots):
        config["size_asserts"] = False  # a packed tensor has no strides to assert
    return config | dict(options.inductor)


def _with_copies(compiled: Callable[..., Any], slots: Sequence[Slot], options: Options) -> Callable[..., Any]:
    """Hand the graph its copies, up to date, after its own inputs."""
    # CUDA graphs record addresses: their copies are refreshed in place, always.
    replayed = dict(options.inductor).get("triton.cudagraphs", False)
    binding = weights.bind(
        [slot.dtype for slot in slots],
        in_place=replayed,
        wide=[slot.wide for slot in slots],
        packed=[slot.blocks for slot in slots],
        on_trial=[slot.on_trial for slot in slots],
    )
    indices = [slot.weight for slot in slots]
    pick = itemgetter(*indices) if len(indices) > 1 else lambda args: (args[indices[0]],)

    def run(*args: Any) -> Any:
        if tracing.fakes_only():  # Dynamo's DDP splitter asks what the next part will get
            return compiled(*args, *(_fake_copy(args[slot.weight], slot) for slot in slots))
        return compiled(*args, *binding.copies(pick(args)))

    return run


def _invalidate_after(run: Callable[..., Any], written: Sequence[int]) -> Callable[..., Any]:
    """After each run, mark the copies of inputs that the graph writes to without a trace as out of date."""
    if not written:
        return run

    def run_and_tell(*args: Any) -> Any:
        try:
            return run(*args)
        finally:
            weights.invalidate([args[i] for i in written])

    return run_and_tell


def _fake_copy(weight: torch.Tensor, slot: Slot) -> torch.Tensor:
    held = torch.float32 if slot.wide else slot.dtype
    copy = torch.empty_like(weight, dtype=held, requires_grad=False)
    return copy if slot.blocks is None else copy.contiguous()
