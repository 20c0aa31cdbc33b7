"""Records of what a graph's backward keeps, read off the cut into forward and backward."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ampcompile.passes.analysis.aliasing import memory_of
from ampcompile.passes.analysis.op_traits import CONVERSIONS_AFTER, has, is_elementwise, is_view
from ampcompile.passes.analysis.readers import original_op
from ampcompile.passes.graph import KeptForm, kept_form, module_path, placeholders, source_line
from ampcompile.torch_private import compiled_functions, lowering, storages, tracing
from ampcompile.torch_private.cuts import Cut

from .graphs import SavedRecord, Shape

READERS = 3  # most readers named in a reason
REDUCTIONS = frozenset({"aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.var_mean"})


def record_saved(cut: Cut, kinds: Sequence[tuple[str, str]]) -> tuple[SavedRecord, ...]:
    """The records of what backward keeps, in order: of values that share memory one, that of their base.

    `kinds`: of each of the graph's inputs, as Dynamo counts them, the kind and the name.
    """
    outputs = cut.forward.graph.output_node().args[0]
    results = {memory_of(value) for value in outputs[: cut.results] if isinstance(value, Node)}
    inputs = {
        node: kinds[i] if i < len(kinds) else ("copy", node.name)
        for i, node in lowering.inputs_of_dynamo(cut.forward).items()
    }
    compiled_functions.name_backward_nodes(cut.backward.graph)
    kept_by_name = {node.name: node for node in placeholders(cut.backward)}
    readers: dict[tuple[Node, ...], dict[str, None]] = {}
    forms: dict[tuple[Node, ...], KeptForm] = {}
    for value in outputs[cut.results :]:
        form = kept_form(value) if isinstance(value, Node) else None
        if form is not None and form.value is not None and isinstance(value.meta.get("val"), torch.Tensor):
            memory = memory_of(form.value)
            forms[memory] = form
            of_value = readers.setdefault(memory, {})
            of_value.update(_readers(kept_by_name[value.name]) if value.name in kept_by_name else {})
    seen = set[int]()  # inputs that are views of one tensor
    records = []
    for memory, read_by in readers.items():
        value = memory[-1]
        of, name = inputs.get(value, ("constant" if value.op == "get_attr" else "input", value.name))
        if value.op not in ("placeholder", "get_attr"):
            of, name = "result" if memory in results else "activation", value.name
        elif (key := storages.storage_key(storages.local_part(value.meta["val"]))) in seen:
            continue
        else:
            seen.add(key)
        records.append(_record(value, of, name, list(read_by), forms[memory]))
    return tuple(records)


def count_peak(cut: Cut, fused: bool) -> int:
    """Most bytes of what forward and backward make, and of what is kept between, that are alive at once.

    Counted op by op; if `fused`, a chain of elementwise ops holds nothing between them.
    """
    kept = {value.name: memory_of(value)[-1] for value in cut.forward.graph.output_node().all_input_nodes}
    alive_anyway = {name for name, value in kept.items() if value.op in ("placeholder", "get_attr")}
    given = {node.name for node in placeholders(cut.forward)}
    return max(_most_alive(cut.forward.graph, given, fused), _most_alive(cut.backward.graph, alive_anyway, fused))


def _most_alive(graph: Graph, given: set[str], fused: bool) -> int:
    last, inside = dict[tuple[Node, ...], int](), set[Node]()
    for place, node in reversed([*enumerate(graph.nodes)]):
        moves = is_view(node.target) or is_elementwise(node.target) or has(node.target, CONVERSIONS_AFTER)
        if fused and moves and all(reader in inside or _reads_in_place(reader) for reader in node.users):
            inside.add(node)
            place = last.get(memory_of(node), place)
        for operand in node.all_input_nodes:
            last[memory_of(operand)] = max(last.get(memory_of(operand), place), place)
    ends: dict[int, int] = {}
    alive = most = 0
    for place, node in enumerate(graph.nodes):
        fake, memory = node.meta.get("val"), memory_of(node)
        if isinstance(fake, torch.Tensor) and memory == (node,) and node.op != "get_attr":
            size = 0 if node.name in given or node in inside else _bytes_held(fake)
            alive += size
            end = last.get(memory, place)
            ends[end] = ends.get(end, 0) + size
        most = max(most, alive)
        alive -= ends.pop(place, 0)
    return most


def _reads_in_place(reader: Node) -> bool:
    """True for what a kernel of Inductor's computes together with the elementwise op that it reads."""
    reduces = original_op(reader, taken_apart=True) in REDUCTIONS
    return reduces or is_elementwise(reader.target) or has(reader.target, CONVERSIONS_AFTER)


def shape_of(value: Any) -> Shape:
    """A tensor's shape as plain values; empty for other values."""
    return tuple(n if isinstance(n, int) else str(n) for n in value.shape) if isinstance(value, torch.Tensor) else ()


def _record(value: Node, of: str, name: str, readers: Sequence[str], form: KeptForm) -> SavedRecord:
    fake, made = value.meta["val"], value.args[0] if value.target is operator.getitem else value
    more = f" and {len(readers) - READERS} more" if len(readers) > READERS else ""
    reason = f"read by {', '.join(readers[:READERS])}{more}" if readers else ""
    return SavedRecord(
        op=original_op(made) if value.op == "call_function" else of,
        module=module_path(value),
        source=source_line(value),
        shape=shape_of(fake),
        because="; ".join(filter(None, (reason, form.because and f"kept as it is: {form.because}"))),
        name=name,
        reads=tuple(operand.name for operand in made.all_input_nodes),
        dtype=fake.dtype,
        kept_as=form.parts[0].meta["val"].dtype if form.parts else fake.dtype,
        bytes=sum(_bytes_held(part.meta["val"]) for part in form.parts or (value,)),
        of=of,
    )


def _readers(kept: Node) -> dict[str, None]:
    """What reads a value in backward, behind views and casts: ops, with their modules, in order."""
    readers, pending = dict[str, None](), [kept]
    while pending:
        for user in pending.pop().users:
            moved = is_view(user.target) or has(user.target, CONVERSIONS_AFTER) or user.target is operator.getitem
            if moved or kept_form(user).widens:
                pending.append(user)
            elif user.op == "output":
                readers["the caller, as a gradient"] = None
            else:
                module = module_path(user)
                readers[f"{original_op(user)} of {module}" if module else original_op(user)] = None
    return readers


def _bytes_held(fake: torch.Tensor) -> int:
    local = storages.local_part(fake)
    held = None if local.is_nested else local.untyped_storage().nbytes()
    return held if isinstance(held, int) else (tracing.elements_hint(local) or 0) * local.itemsize
