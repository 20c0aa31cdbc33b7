"""Run a graph's ops side by side: in mixed precision, each alone in high precision, and in the exact run."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.weak import WeakTensorKeyDictionary

from ampcompile.dtypes import short_name
from ampcompile.passes.analysis.op_traits import draws_random_numbers
from ampcompile.passes.graph import module_path, name_modules, op_name, source_line
from ampcompile.torch_private import joint_graphs, pytree
from ampcompile.torch_private.storages import is_dense

from .adjoints import Adjoints
from .high_precision import compute_in_high_precision, is_floating, rounds, to_high_precision
from .numbers import measure, squares
from .recording import Step, fingerprint
from .records import OpNumbers, Place


class Session:
    """One audited call, through which its graphs pass each other the exact run's values.

    `cumulative`: True if there is an exact run. `local`: True if each op also runs alone, and is recorded.
    `adjoints`: with them the exact run goes on from the mixed run's numbers, and is differentiated. `steps`: a list to
    add a record of each op to.
    """

    def __init__(
        self,
        against: torch.dtype,
        cumulative: bool,
        local: bool,
        adjoints: Adjoints | None = None,
        steps: list[Step] | None = None,
    ) -> None:
        self.against, self.cumulative, self.local = against, cumulative, local
        self.adjoints, self.steps = adjoints, steps
        self.ran = False  # True once a graph has run
        self.ops: list[OpNumbers] = []
        self.unmeasured: set[str] = set()
        self.exact = WeakTensorKeyDictionary()  # the exact run's values, by those of the mixed run that left a graph
        self.returned: list[Tensor] = []  # by the graph that ran last
        self.pending: list[_Saved] = []  # forward runs whose backward hasn't run
        self.gradients: dict[str, tuple[Tensor, Tensor]] = {}  # mixed and exact, summed over all uses
        self.backwards: list[list[Any]] = []  # held, else autograd adds in place
        self.not_finite: dict[str, float] = {}  # the share of the elements, by input

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

    def look_at_inputs(self, names: list[str | None], values: list[Any]) -> None:
        """Record named inputs that hold NaN or infinities; an input with the name None is from another graph."""
        for name, value in zip(names, values, strict=False):
            if name is not None and is_floating(value) and not value.isfinite().all():
                self.not_finite[f"input {name}"] = 1 - float(value.isfinite().double().mean())

    @torch.enable_grad()
    def add_gradient(self, name: str, mixed: Tensor, exact: Tensor) -> None:
        """Add a gradient of an input; an input that several graphs use has several."""
        mixed = to_high_precision(mixed, self.against)
        earlier = self.gradients.get(name)
        self.gradients[name] = (mixed, exact) if earlier is None else (earlier[0] + mixed, earlier[1] + exact)

    def gradient_errors(self) -> dict[str, tuple[float, float]]:
        """Squared distance and squared norm of every gradient."""
        return {name: squares(mixed, exact) for name, (mixed, exact) in self.gradients.items()}


class _Saved:
    """The exact run's values that a forward run keeps for its backward, by the names they have in both graphs."""

    def __init__(self, values: dict[str, Any], exact: dict[str, Any]) -> None:
        self.memory = {name: _memory(value) for name, value in values.items()}
        self.exact = exact

    def belongs_to(self, values: dict[str, Any]) -> bool:
        return all(self.memory.get(name) == _memory(value) for name, value in values.items() if name in self.memory)


def _layout(value: Tensor) -> tuple[Any, ...]:
    return value.data_ptr(), value.dtype, value.shape, value.stride()


def _memory(value: Any) -> int | None:
    return value.data_ptr() if isinstance(value, Tensor) and value.numel() else None


def interpreters(
    session: Session, names: dict[str, str], inputs: list[str | None]
) -> tuple[joint_graphs.Interpret, joint_graphs.Interpret]:
    """Return functions that interpret forward and backward of one graph.

    `names`: paths of modules. `inputs`: names of the graph's inputs, None for those that another graph made.
    """

    def forward(gm: GraphModule) -> joint_graphs.Run:
        run = _PairedRun(gm, session, names, backward=False, inputs=inputs)

        def forward_run(args: list[Any]) -> Any:
            session.ran = True
            session.look_at_inputs(inputs, args)
            exact = [session.exact_of(arg) for arg in args] if session.cumulative else []
            values, exact_values = run(args, exact)
            if session.cumulative:
                for value, reference in zip(values, exact_values, strict=True):
                    if is_floating(value):
                        session.exact[value] = reference
                keys = [n.name if isinstance(n, Node) else "" for n in run.outputs]
                session.pending.append(
                    _Saved(dict(zip(keys, values, strict=True)), dict(zip(keys, exact_values, strict=True)))
                )
            session.returned = [value for value in values if is_floating(value)]
            return values

        return forward_run

    def backward(gm: GraphModule) -> joint_graphs.Run:
        joint_graphs.name_backward_nodes(gm.graph)
        run = _PairedRun(gm, session, names, backward=True)
        placeholders = [node.name for node in gm.graph.find_nodes(op="placeholder")]

        def backward_run(args: list[Any]) -> Any:
            by_name = dict(zip(placeholders, args, strict=True))
            saved = next((s for s in reversed(session.pending) if s.belongs_to(by_name)), None)
            saved_exact = saved.exact if saved is not None else {}
            if saved is not None:
                session.pending.remove(saved)
            exact = [saved_exact.get(name) for name in placeholders]
            exact = [session.exact_of(arg) if e is None else e for arg, e in zip(args, exact, strict=True)]
            values, exact_values = run(args, exact if session.cumulative else [])
            session.backwards.append(values)
            if session.cumulative and len(values) == len(inputs):
                for name, value, reference in zip(inputs, values, exact_values, strict=True):
                    if is_floating(value):
                        session.exact[value] = reference
                        if name is not None:
                            session.add_gradient(name, value, reference)
            return values

        return backward_run

    return forward, backward


class _PairedRun:
    """Runs one functional graph in mixed precision and in the exact run, and compares every op."""

    def __init__(
        self,
        gm: GraphModule,
        session: Session,
        names: dict[str, str],
        backward: bool,
        inputs: Sequence[str | None] = (),
    ) -> None:
        self.gm, self.session = gm, session
        self.inputs = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=False))
        self.steps: dict[Node, tuple[int, ...]] = {}  # the numbers of the recorded steps that a value comes from
        self.outputs: list[Any] = pytree.tree_leaves(gm.graph.output_node().args[0])
        with name_modules(names):
            self.places = {n: _place_of(n, backward) for n in gm.graph.nodes if n.op == "call_function"}
        self.last_uses: dict[Node, list[Node]] = {}
        seen: set[Node] = set()
        for node in reversed(gm.graph.nodes):
            unused = [n for n in node.all_input_nodes if n not in seen]
            self.last_uses[node] = unused
            seen.update(unused)

    @torch.no_grad()
    def __call__(self, args: list[Any], exact: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return the results of both runs. `exact` are the exact run's inputs, empty if there is no such run."""
        values: dict[Node, Any] = {}
        exact_values: dict[Node, Any] = {}
        inputs = iter(args)
        exact_inputs = iter(exact)
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                values[node], exact_values[node] = next(inputs), next(exact_inputs, None)
                if self.session.steps is not None and self.inputs.get(node) and isinstance(values[node], Tensor):
                    place = Place(f"input {self.inputs[node]}", "", "", False)
                    self._add_step(node, place, [values[node]], exact_values[node], (0.0, 0.0))
            elif node.op == "get_attr":
                values[node] = attrgetter(str(node.target))(self.gm)
                exact_values[node] = to_high_precision(values[node], self.session.against)
            elif node.op == "output":
                break
            else:
                assert node.op == "call_function", f"unexpected {node.op} in a functional graph"
                values[node], exact_values[node] = self._step(node, values, exact_values)
            for unused in self.last_uses[node]:
                if unused not in self.outputs:
                    del values[unused], exact_values[unused]
        results, exact_results = (
            [env[o] if isinstance(o, Node) else o for o in self.outputs] for env in (values, exact_values)
        )
        return results, exact_results

    def _step(self, node: Node, values: dict[Node, Any], exact_values: dict[Node, Any]) -> tuple[Any, Any]:
        session = self.session
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        result = node.target(*args, **kwargs)
        exact = None
        if session.cumulative:
            exact_args, exact_kwargs = map_arg((node.args, node.kwargs), exact_values.__getitem__)
            exact = self._compute_high(node, exact_args, exact_kwargs, result)
            if session.adjoints is not None and exact is not None:
                exact = session.adjoints.follow(node, self.places[node], result, (exact_args, exact_kwargs), exact)
        if session.local and rounds(node, result):
            self._record(node, result, self._compute_high(node, args, kwargs, result), exact)
        elif session.steps is not None:
            self.steps[node] = self._operands(node)
        if session.cumulative and exact is None:
            exact = to_high_precision(result, session.against)
        return result, exact

    def _compute_high(self, node: Node, args: Any, kwargs: Any, result: Any) -> Any:
        if not any(isinstance(value, Tensor) for value in pytree.tree_leaves(result)):
            return result  # sizes and numbers: those of the mixed run
        return compute_in_high_precision(node, args, kwargs, result, self.session.against)

    def _record(self, node: Node, result: Any, alone: Any, exact: Any) -> None:
        mixed, local, cumulative = (
            None if value is None else [leaf for leaf in pytree.tree_leaves(value) if is_floating(leaf)]
            for value in (result, alone, exact)
        )
        assert mixed is not None
        place = self.places[node]
        if alone is None and any(map(_is_floating_node, node.all_input_nodes)):
            self.session.unmeasured.add(place.op)
        numbers = measure(mixed, local, cumulative)
        self.session.ops.append(OpNumbers(**vars(place), dtype=mixed[0].dtype, numbers=numbers))
        if self.session.steps is not None:
            known = draws_random_numbers(node.target) or not any(map(_is_floating_node, node.all_input_nodes))
            errors = (0.0 if alone is None and known else numbers.local, numbers.cumulative)
            self._add_step(node, place, mixed, mixed[0] if cumulative is None else cumulative[0], errors)

    def _add_step(
        self, node: Node, place: Place, mixed: list[Tensor], exact: Tensor, errors: tuple[float | None, float | None]
    ) -> None:
        """Add an input, or an op with its results, to the recorded steps."""
        assert self.session.steps is not None
        sizes = sorted(n.meta["val"].numel() for n in node.all_input_nodes if _is_floating_node(n))[-2:]
        length = (prod(sizes) / max(mixed[0].numel(), 1)) ** (1 / max(len(sizes), 1))
        dtype, shape = short_name(mixed[0].dtype), tuple(mixed[0].shape)
        step = Step(place, dtype, shape, fingerprint(exact), *errors, max(length, 1.0), self._operands(node))
        self.steps[node] = (len(self.session.steps),)
        self.session.steps.append(step)

    def _operands(self, node: Node) -> tuple[int, ...]:
        return tuple(dict.fromkeys(number for n in node.all_input_nodes for number in self.steps.get(n, ())))


def _place_of(node: Node, backward: bool) -> Place:
    return Place(op_name(node.target), module_path(node), source_line(node), backward)


def _is_floating_node(node: Node) -> bool:
    return is_floating(node.meta.get("val"))
