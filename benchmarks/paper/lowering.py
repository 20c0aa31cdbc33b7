"""Lower one model for the GPU on paper as each peer would, and count Inductor's output for every graph."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._inductor import compile_fx, metrics
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from ampcompile.compiler import backend
from ampcompile.compiler import lower as lowered_by_amp
from ampcompile.config import Options
from ampcompile.passes.graph import notes_of
from benchmarks.paper.cases import CONVERTED, OPTIONS, QUANTIZED, STOCK, TORCHAO
from benchmarks.paper.counts import Counts, count, inputs_held
from benchmarks.peers import quantize_by_torchao

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
DEVICE = torch.device("cuda", 0)


def count_graphs(model: nn.Module, args: Sequence[Tensor], training: bool, peer: str, dtype: str) -> list[Counts]:
    """The counts of each graph of a call, or of a training step. `peer`: one of `PEERS`, `OPTIONS` or `FP8_PEERS`."""
    low = DTYPES[dtype]
    if peer == TORCHAO:
        quantize_by_torchao(model)
    if peer == CONVERTED:
        model, args = model.to(low), [_converted(arg, low) for arg in args]
    with torch.set_grad_enabled(training):
        with torch.autocast("cpu", low, enabled=peer != CONVERTED):
            gm, inputs = _captured(model, args)
        gm, mode, fakes = _on_device(gm, inputs)
        counts_of_graphs: list[Counts] = []
        with (
            torch._guards.tracing(torch._guards.TracingContext(mode)),
            mock.patch.object(compile_fx, "compile_fx", _counting(counts_of_graphs)),
            torch.autocast("cuda", low) if peer in (STOCK, TORCHAO) else nullcontext(),
        ):
            if (given := {**OPTIONS, **QUANTIZED}.get(peer)) is not None:
                options = Options.parse(options={"dtype": low, **given})
                copies = _lower_as_amp(gm, fakes, options)
                counts_of_graphs += [copies] if training else []  # in inference no weight changes
            else:
                compile_fx.compile_fx(gm, fakes)
    return counts_of_graphs


def _converted(arg: Tensor, low: torch.dtype) -> Tensor:
    return arg.detach().to(low).requires_grad_(arg.requires_grad) if arg.is_floating_point() else arg


def _lower_as_amp(gm: GraphModule, fakes: Sequence[Any], options: Options) -> Counts:
    """Lower a graph; return what its copies cost a step: those that the fused step writes, in its own launch but for
    one that transposes what is quantized, and those by rows, which the next call quantizes, in two launches.
    """
    with mock.patch.object(backend.dynamo, "guard_modules_of_frame"):  # Dynamo isn't tracing
        rewritten = backend.rewrite(gm, fakes, options)
        specs = [
            spec
            for node in rewritten.graph.graph.find_nodes(op="placeholder")
            if (spec := notes_of(node).copy) is not None
        ]
        lowered_by_amp.lower(rewritten.graph, fakes, options)
    sizes: Counter[str] = Counter()
    for spec in specs:
        weight, form = fakes[spec.weight], spec.form
        kind = "copies by rows" if form.by_rows else "copies in 8 bits" if form.quantized else "copies in 16 bits"
        # The step has the weight at hand, and writes it; reads what it wrote in 8 bits, and writes it transposed.
        moved = 2 * (weight.itemsize + 1) if form.by_rows else 3 if form.quantized else form.dtype.itemsize
        sizes[kind] += weight.numel() * moved
    launches = sum({"copies by rows": 2, "copies in 8 bits": 1}.get(kind, 0) for kind in sizes)
    return Counts("copies", launches, {}, sum(sizes.values()), list(sizes.items()), 0, 0, 0, {})


def _captured(model: nn.Module, args: Sequence[Tensor]) -> tuple[GraphModule, list[Any]]:
    """The only graph that Dynamo makes of a call, and its inputs."""

    class CapturedError(Exception):
        pass

    graphs: list[tuple[GraphModule, list[Any]]] = []

    def keep(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append((gm, inputs))
        raise CapturedError

    torch._dynamo.reset()
    with suppress(torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(model, backend=keep, fullgraph=True, dynamic=False)(*args)
    return graphs[0]


def _on_device(gm: GraphModule, inputs: Sequence[Any]) -> tuple[GraphModule, FakeTensorMode, list[Any]]:
    """The graph and its inputs as Dynamo would give them for a model on the GPU."""
    gm = copy.deepcopy(gm)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes: list[Any] = []
    for node in gm.graph.nodes:
        node.args = pytree.tree_map(_moved, node.args)
        node.kwargs = {name: DEVICE if name == "device" else value for name, value in node.kwargs.items()}
    gm.recompile()
    with mode:
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)
            if isinstance(value, nn.Parameter):
                fake = nn.Parameter(fake, value.requires_grad)
                node.meta["tensor_dict"] = {"_dynamo_static_input_type": "guarded"}
            fakes.append(fake.requires_grad_(value.requires_grad))
    return gm, mode, fakes


def _moved(argument: Any) -> Any:
    return DEVICE if isinstance(argument, torch.device) or argument == "cpu" else argument


def _counting(counts_of_graphs: list[Counts]) -> Callable[..., Any]:
    """Return a version of Inductor's `compile_fx` that counts each lowered graph instead of compiling it further."""
    compile_all: Any = compile_fx.compile_fx
    held: set[str] = set()

    def lower_and_count(gm: GraphModule, inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
        inference, backward = given.get("is_inference", False), given.get("is_backward", False)
        mode: Any = torch._guards.detect_fake_mode(inputs)
        if not backward:
            held.update(inputs_held(gm))
        with V.set_fake_mode(mode):
            compile_fx._recursive_record_original_output_strides(gm)
            compile_fx._recursive_post_grad_passes(gm, is_inference=inference)
        graph = GraphLowering(
            gm, example_inputs=inputs, shape_env=mode.shape_env, is_inference=inference, is_backward=backward
        )
        metrics.reset()
        with V.set_graph_handler(graph), V.set_fake_mode(mode), V.set_extern_kernel_nodes([]), DebugContext():
            graph.run(*inputs)
            code: Any = graph.codegen()[0]
            kind = "backward" if backward else "inference" if inference else "forward"
            counts_of_graphs.append(count(kind, gm, graph, getattr(code, "value", code), held))

        def never(*_: Any) -> Any:
            raise RuntimeError("lowered to be counted, not to be run")

        never._boxed_call = True  # type: ignore[attr-defined]
        return never

    def compile_and_count(gm: GraphModule, inputs: Sequence[Any], inner_compile: Any = None, **given: Any) -> Any:
        return compile_all(gm, inputs, inner_compile=lower_and_count, **given)

    return compile_and_count
