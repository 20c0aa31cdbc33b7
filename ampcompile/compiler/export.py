"""`ampcompile.export`: export a model as an ExportedProgram with explicit casts.

`torch.export.export` traces the model under autocast, as for a compiled call. Then the passes of the compiler rewrite
the program's graph, and the rewritten graph replaces it in the program.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.fx import GraphModule, Node, map_arg

from ampcompile.config import Options
from ampcompile.errors import OptionError, UnsupportedError
from ampcompile.passes.analysis.commuting import CAST
from ampcompile.passes.base import run_passes
from ampcompile.passes.capture.capture import capture, overflows
from ampcompile.passes.capture.outline import OutlinedPart
from ampcompile.passes.graph import Regions, graphs, insert_call, note, op_name, placeholders, source_line
from ampcompile.passes.pipeline import pipeline
from ampcompile.records import logs
from ampcompile.torch_private import autocast, marks, pytree, tracing
from ampcompile.torch_private.storages import memory_of

from . import ambient, module_names

OPTIONS = ("dtype", "numerics", "outputs", "policy", "range_guards")
_CASTS = {getattr(torch.Tensor, name) for name in ("to", "float", "double", "half", "bfloat16", "type", "type_as")}
_ALIAS = torch.ops.aten.alias.default
_CHECK = torch.ops.aten._assert_tensor_metadata.default
_LIFT = torch.ops.aten.lift_fresh_copy.default


@marks.run_untraced
def export(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    **options: Any,
) -> ExportedProgram:
    """`torch.export.export(model, args, kwargs, dynamic_shapes=...)` in mixed precision, every cast an op of the graph.

    `options` are `dtype`, `policy`, `numerics`, `range_guards` and `outputs` of
    `torch.compile(model, backend="amp", options=...)`; the program gives the same bits as that with `lower="eager"`.
    Its state dict is the model's: parameters and buffers keep their names and dtypes, and are cast in the graph.
    Running or compiling the program doesn't need ampcompile; no autocast may be open around it. The graph can be
    trained, unless it was exported under `torch.no_grad()`, which leaves fewer casts.
    Raises OptionError, UnsupportedError, and whatever `torch.export.export` raises.

    >>> program = ampcompile.export(model, (x,))
    >>> program.module()(x).dtype
    torch.float32
    """
    for name in options.keys() - {*OPTIONS}:
        raise OptionError(
            f"option {name!r} of export: expected one of {', '.join(OPTIONS)}. Others are for running a graph: give "
            "them to what compiles the exported program."
        )
    parsed = replace(Options.parse(options), lower="eager")
    if parsed.policy.asks_fp8():
        raise OptionError(
            f"found the policy {str(parsed.policy)!r} for export; expected none with fp8, whose products are ops of "
            "ampcompile, which a program that needs torch alone can't call. Leave fp8 out of it, or compile the model."
        )
    first_parameter = ambient.FirstParameter(module_names.module_of(model)).find()
    device_type = ambient.device_type_of(first_parameter, args, kwargs or {})
    within = autocast.is_on(device_type)
    with ambient.autocast_for(device_type, parsed):
        with _AsCaptured():
            program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
        graph = _rewrite(program, parsed, model)
        if parsed.outputs == "float32" and not within and autocast.is_on(device_type):
            _widen_outputs(graph, torch.get_autocast_dtype(device_type))
        return _with_graph(program, graph)


class _AsCaptured(torch.overrides.TorchFunctionMode):
    """Makes `torch.export` trace as `capture` traces Dynamo's graphs.

    A cast to the dtype that its operand has already stays a node, because rewriting may change that dtype; a number too
    large for the low type of its destination stays a float32 number.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            args = (_ALIAS(args[0]), *args[1:])
        elif func is torch.Tensor.__setitem__ and overflows(args[2], args[0]):
            args = (*args[:2], torch.tensor(float(args[2]), dtype=torch.float32, device=args[0].device))
        return func(*args, **(kwargs or {}))


def _rewrite(program: ExportedProgram, options: Options, model: torch.nn.Module) -> GraphModule:
    gm = program.graph_module
    mode = tracing.fake_mode_of(gm)
    if mode is None:
        return gm
    _prepare(program)
    fakes = _fakes_as_given(program)
    captured = capture(gm, fakes, mode, options.policy, keeps_symbols=True)
    _check_all_is_rewritten(captured)
    module_names.warn(options.policy, module_names.CompiledNames.of(captured), model)
    regions = Regions(autocast.autocast_states())
    passes = pipeline(replace(options, weights="every_call"), regions)
    logged = logs.recorder(fakes)
    history = run_passes(passes, captured, None if logged is None else logged.watch)
    if logged is not None:
        logs.log_graph(logged.finish(gm, captured, history))
    return captured


def _prepare(program: ExportedProgram) -> None:
    """Remove nodes that tracing added for its own use, and mark the constants that the model's code creates."""
    gm = program.graph_module
    for graph in graphs(gm):
        graph.graph = copy.deepcopy(graph.graph)  # splitting at regions forgets users of nodes
        for node in list(graph.graph.nodes):
            if node.target is _ALIAS:
                node.replace_all_uses_with(node.args[0])
            if node.target in (_ALIAS, _CHECK):  # a check expects the dtype that autocast gave
                graph.graph.erase_node(node)
    for spec, node in zip(program.graph_signature.input_specs, placeholders(gm), strict=True):
        if spec.kind is InputKind.CONSTANT_TENSOR and all(user.target is _LIFT for user in node.users):
            note(node, constant=tracing.largest_magnitude(program.constants[spec.target]))


def _fakes_as_given(program: ExportedProgram) -> list[Any]:
    """The inputs' fakes; one that requires a gradient only because tracing wrote into it is detached again."""
    user_inputs = iter(pytree.tree_leaves(program.example_inputs))
    fakes = []
    for spec, node in zip(program.graph_signature.input_specs, placeholders(program.graph_module), strict=True):
        held = program.constants.get(spec.target, program.state_dict.get(spec.target))
        actual = next(user_inputs) if spec.kind is InputKind.USER_INPUT else held
        fake = node.meta["val"]
        written = isinstance(actual, torch.Tensor) and not actual.requires_grad and fake.requires_grad
        fakes.append(fake.detach() if written else fake)
    return fakes


def _check_all_is_rewritten(captured: GraphModule) -> None:
    for part in (module for graph in graphs(captured) for module in graph.children()):
        if isinstance(part, OutlinedPart):
            calls = [node for node in part.graph_module.graph.nodes if node.op.startswith("call")]
            place = next(filter(None, map(source_line, calls)), "an unknown line")
            names = ", ".join(name for name in dict.fromkeys(op_name(n.target) for n in calls) if name[0] != "_")
            raise UnsupportedError(
                f"found a transform of torch.func, or a higher-order op unknown to ampcompile, at {place}: its casts "
                f"can't be written out (it calls {names or 'no op'}). Compute it outside of the exported model, or "
                "compile the model instead."
            )


def _widen_outputs(gm: GraphModule, low: torch.dtype) -> None:
    """Cast a graph's low-precision results to float32, except those that share memory with inputs."""
    input_memory = {memory_of(node.meta["val"]) for node in placeholders(gm)} - {None}
    output, casts = gm.graph.output_node(), dict[Node, Node]()

    def widened(node: Node) -> Node:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype != low or memory_of(value) in input_memory:
            return node
        if node not in casts:
            with gm.graph.inserting_before(output):
                casts[node] = insert_call(gm.graph, CAST, node, torch.float32, name="amp_cast_f32")
        return casts[node]

    with tracing.on_fakes_of(gm):
        output.args = map_arg(output.args, widened)


def _named(specs: Sequence[Any], nodes: Sequence[Any]) -> list[Any]:
    """A signature's specs of inputs or results with their current names; results that are numbers have none."""
    return [
        replace(spec, arg=replace(spec.arg, name=node.name)) if isinstance(node, Node) else spec
        for spec, node in zip(specs, nodes, strict=True)
    ]


def _with_graph(program: ExportedProgram, graph: GraphModule) -> ExportedProgram:
    """The program with another graph, which has the same inputs and as many results."""
    for inner in graphs(graph):
        for node in inner.graph.nodes:
            node.meta.pop("amp", None)
            node.meta.pop("amp_notes", None)
    signature = program.graph_signature
    inputs = _named(signature.input_specs, placeholders(graph))
    outputs = _named(signature.output_specs, graph.graph.output_node().args[0])
    return ExportedProgram(
        root=graph,
        graph=graph.graph,
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )
