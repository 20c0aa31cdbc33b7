"""Run a graph's ops side by side: in mixed precision, each alone in high precision, and in the exact run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.weak import WeakTensorKeyDictionary

from ampcompile.passes.analysis.aliasing import memory_of
from ampcompile.passes.analysis.op_traits import draws_random_numbers
from ampcompile.passes.graph import kept_form, name_modules, placeholders
from ampcompile.records.graphs import Numbers, OpRecord, SavedRecord
from ampcompile.records.recorder import record_op
from ampcompile.torch_private import compiled_functions, pytree
from ampcompile.torch_private.storages import is_dense

from .exact import (
    compared,
    compute_in_high_precision,
    computes_floats,
    is_floating,
    measure,
    relative_error,
    to_high_precision,
)


@dataclass(eq=False)
class Session:
    """One call that is measured, through which its graphs pass each other the exact run's values."""

    against: torch.dtype = torch.float64
    cumulative: bool = True  # True if there is an exact run
    local: bool = True  # True if each op also runs alone, and is measured
    fingerprints: bool = False  # True if inputs are recorded too, and the exact run's values by their fingerprints
    ran: bool = False  # True once a graph has run
    ops: list[OpRecord] = field(default_factory=list)
    saved: list[dict[str, SavedRecord]] = field(default_factory=list)  # what each graph keeps for backward, by name
    unmeasured: set[str] = field(default_factory=set)
    not_finite: dict[str, float] = field(default_factory=dict)  # the share of the elements, by input
    # The exact run's values, by those of the mixed run that left a graph; and what left the graph that ran last.
    exact: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    returned: list[Tensor] = field(default_factory=list)
    pending: list[_Saved] = field(default_factory=list)  # forward runs whose backward hasn't run
    gradients: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # both runs', summed over all uses
    progress: Callable[[str], None] = field(default=lambda _: None)
    backwards: list[list[Any]] = field(default_factory=list)  # held, else autograd adds in place

    def exact_of(self, value: Any) -> Any:
        """Return the exact run's value of a graph input; one that no graph made is taken as exact."""
        exact = self.find_exact(value) if isinstance(value, Tensor) else None
        return to_high_precision(value, self.against) if exact is None else exact

    @torch.enable_grad()
    def find_exact(self, value: Tensor) -> Tensor | None:
        """Return the exact run's value of what a graph made, or of a view of that; None of what no graph made.

        AOTAutograd returns views as other tensors with the same memory.
        """
        if value not in self.exact:
            value = next((made for made in self.returned if _layout(made) == _layout(value)), value)
        base = value._base
        if base is None or value in self.exact or base not in self.exact or not is_dense(base):
            return self.exact.get(value)
        exact = torch.empty_strided(base.shape, base.stride(), dtype=self.against, device=base.device)
        return exact.copy_(self.exact[base]).as_strided(
            value.shape, value.stride(), value.storage_offset() - base.storage_offset()
        )

    @torch.enable_grad()
    def add_gradient(self, name: str, mixed: Tensor, exact: Tensor) -> None:
        """Add a gradient of an input; an input that several graphs use has several."""
        mixed = to_high_precision(mixed, self.against)
        earlier = self.gradients.get(name)
        self.gradients[name] = (mixed, exact) if earlier is None else (earlier[0] + mixed, earlier[1] + exact)


class _Saved:
    """The exact run's values that a forward run keeps for its backward, by the names they have in both graphs."""

    def __init__(self, pairs: dict[str, tuple[Any, Any]]) -> None:
        self.memory = {name: _memory(value) for name, (value, _) in pairs.items()}
        self.exact = {name: exact for name, (_, exact) in pairs.items()}

    def belongs_to(self, values: dict[str, Any]) -> bool:
        return all(self.memory.get(name) == _memory(value) for name, value in values.items() if name in self.memory)


def _layout(value: Tensor) -> tuple[Any, ...]:
    return value.data_ptr(), value.dtype, value.shape, value.stride()


def _memory(value: Any) -> int | None:
    return value.data_ptr() if isinstance(value, Tensor) and value.numel() else None


class _PairedRun:
    """Runs one functional graph in mixed precision and in the exact run, and measures every op.

    `names`: paths of modules. `inputs`: names of the graph's inputs, None for those that another graph made.
    """

    backward = False

    def __init__(self, session: Session, names: dict[str, str], inputs: list[str | None], gm: GraphModule) -> None:
        self.session, self.inputs, self.gm = session, inputs, gm
        self.placeholders = placeholders(gm)
        self.outputs: list[Any] = pytree.tree_leaves(gm.graph.output_node().args[0])
        self.recorded: dict[Node, tuple[str, ...]] = {}  # the names of the records that a value comes from
        with name_modules(names):
            self.records = {n: record_op(n, backward=self.backward) for n in gm.graph.nodes if n.op == "call_function"}
        self.last_uses: dict[Node, list[Node]] = {}
        seen: set[Node] = set()
        for node in reversed(gm.graph.nodes):
            self.last_uses[node] = [n for n in node.all_input_nodes if n not in seen]
            seen.update(node.all_input_nodes)

    @torch.no_grad()
    def run(self, args: Sequence[Any], exact: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Return both runs' results. `exact` are the exact run's inputs, None where there is no such run."""
        values: dict[Node, tuple[Any, Any]] = dict(zip(self.placeholders, zip(args, exact, strict=True), strict=True))
        if self.session.fingerprints and not self.backward:
            for node, name in zip(self.placeholders, self.inputs, strict=False):
                if name and isinstance(values[node][0], Tensor):
                    self._add(node, OpRecord(op=f"input {name}", numbers=Numbers(0.0, 0.0)), *values[node])
        for node in self.gm.graph.nodes:
            if node.op == "get_attr":
                held = attrgetter(str(node.target))(self.gm)
                values[node] = held, to_high_precision(held, self.session.against)
            elif node.op == "call_function":
                values[node] = self._step(node, values)
            for unused in self.last_uses[node]:
                if unused not in self.outputs:
                    del values[unused]
        return [values[o] if isinstance(o, Node) else (o, o) for o in self.outputs]

    def _step(self, node: Node, values: dict[Node, tuple[Any, Any]]) -> tuple[Any, Any]:
        session = self.session
        args, kwargs = map_arg((node.args, node.kwargs), lambda operand: values[operand][0])
        result = node.target(*args, **kwargs)
        exact = None
        if session.cumulative:
            exact_args, exact_kwargs = map_arg((node.args, node.kwargs), lambda operand: values[operand][1])
            exact = self._compute_high(node, exact_args, exact_kwargs, result)
        own = kept_form(node).value is not node  # what keeps values in 8 bits has records of its own
        if session.local and not own and computes_floats(node, result):
            self._measure(node, result, self._compute_high(node, args, kwargs, result), exact)
        else:
            self.recorded[node] = self._reads(node)
        if session.cumulative and exact is None:
            exact = to_high_precision(result, session.against)
        return result, exact

    def _compute_high(self, node: Node, args: Any, kwargs: Any, result: Any) -> Any:
        if not any(isinstance(value, Tensor) for value in pytree.tree_leaves(result)):
            return result  # sizes and numbers: those of the mixed run
        return compute_in_high_precision(node, args, kwargs, result, self.session.against)

    def _measure(self, node: Node, result: Any, alone: Any, exact: Any) -> None:
        mixed, local, cumulative = (
            None if value is None else compared(node, value) for value in (result, alone, exact)
        )
        assert mixed is not None
        numbers, computes = measure(mixed, local, cumulative), any(map(_is_floating_node, node.all_input_nodes))
        if alone is None and computes:
            self.session.unmeasured.add(self.records[node].op)
        if alone is None and (not computes or draws_random_numbers(node.target)):
            numbers = replace(numbers, local=0.0)  # rounds nothing that it reads
        record = replace(self.records[node], numbers=numbers)
        self._add(node, record, mixed[0], mixed[0] if cumulative is None else cumulative[0])

    def _add(self, node: Node, record: OpRecord, mixed: Tensor, exact: Tensor) -> None:
        """Add an input, or an op with its first floating result, to the session's records."""
        name = str(len(self.session.ops))
        first = next((leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if is_floating(leaf)), mixed)
        record = replace(record, name=name, reads=self._reads(node), dtype=first.dtype, shape=tuple(mixed.shape))
        if self.session.fingerprints:
            sizes = sorted(n.meta["val"].numel() for n in node.all_input_nodes if _is_floating_node(n))[-2:]
            length = (prod(sizes) / max(mixed.numel(), 1)) ** (1 / max(len(sizes), 1))
            record = replace(record, fingerprint=fingerprint(exact), length=max(length, 1.0))
        self.recorded[node] = (name,)
        self.session.ops.append(record)
        self.session.progress(f"{len(self.session.ops)} ops measured, {record.op} the latest")

    def _reads(self, node: Node) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for n in node.all_input_nodes for name in self.recorded.get(n, ())))


class Forward(_PairedRun):
    """Interprets a forward graph. `saved`: what it keeps for backward, by name; gets the errors of what is in 8."""

    def __init__(self, saved: dict[str, SavedRecord], *args: Any) -> None:
        super().__init__(*args)
        self.saved = saved

    def _step(self, node: Node, values: dict[Node, tuple[Any, Any]]) -> tuple[Any, Any]:
        result = super()._step(node, values)
        form = kept_form(node)
        if node in form.parts[:1] and form.value is not None and len(form.parts) > 1:
            (scaled, _), (scales, _) = (values[operand] for operand in (node.args[0], form.parts[1]))
            error = relative_error(result[0].to(scales.dtype) * scales, scaled.double() * scales)
            name = memory_of(form.value)[-1].name
            record = self.saved[name]
            self.saved[name] = replace(record, error=max(error, record.error or 0.0))
        return result

    def __call__(self, *args: Any) -> Any:
        session = self.session
        session.ran = True
        for name, value in zip(self.inputs, args, strict=False):
            if name is not None and is_floating(value) and not value.isfinite().all():
                session.not_finite[f"input {name}"] = 1 - float(value.isfinite().double().mean())
        pairs = self.run(args, [session.exact_of(arg) if session.cumulative else None for arg in args])
        session.returned = [value for value, _ in pairs if is_floating(value)]
        if session.cumulative:
            session.exact.update({value: exact for value, exact in pairs if is_floating(value)})
            names = [n.name if isinstance(n, Node) else "" for n in self.outputs]
            session.pending.append(_Saved(dict(zip(names, pairs, strict=True))))
        return [value for value, _ in pairs]


class Backward(_PairedRun):
    """Interprets a backward graph."""

    backward = True

    def __init__(self, session: Session, names: dict[str, str], inputs: list[str | None], gm: GraphModule) -> None:
        compiled_functions.name_backward_nodes(gm.graph)
        super().__init__(session, names, inputs, gm)

    def __call__(self, *args: Any) -> Any:
        session, names = self.session, [node.name for node in self.placeholders]
        by_name = dict(zip(names, args, strict=True))
        # Later calls are asked first: none has its memory there, as autograd holds what this forward saved.
        saved = next((s for s in reversed(session.pending) if s.belongs_to(by_name)), None)
        if saved is not None:
            session.pending.remove(saved)
        kept = saved.exact if saved is not None else {}
        exact = [session.exact_of(arg) if kept.get(n) is None else kept[n] for n, arg in by_name.items()]
        pairs = self.run(args, exact if session.cumulative else [None] * len(args))
        values = [value for value, _ in pairs]
        session.backwards.append(values)
        if session.cumulative and len(pairs) == len(self.inputs):
            for name, (value, reference) in zip(self.inputs, pairs, strict=True):
                if is_floating(value):
                    session.exact[value] = reference
                    if name is not None:
                        session.add_gradient(name, value, reference)
        return values


def _is_floating_node(node: Node) -> bool:
    return is_floating(node.meta.get("val"))


def fingerprint(value: Tensor) -> tuple[float, float]:
    """Return the norm of a tensor, and its projection on a direction that depends on its number of elements alone.

    Elements that aren't finite count as 0. Equal numbers in another layout, or on another device, give equal results up
    to float64's rounding.
    """
    flat = (torch.view_as_real(value) if value.is_complex() else value).detach().reshape(-1).double()
    flat = torch.where(flat.isfinite(), flat, 0)
    direction = torch.arange(len(flat), dtype=torch.float64, device=flat.device).cos()
    return float(torch.linalg.vector_norm(flat)), float(flat @ direction)
