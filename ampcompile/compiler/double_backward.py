"""Compute gradients of gradients through a graph that AOTAutograd compiled.

The backward that AOTAutograd compiles has no derivative. So each call stores its inputs in its autograd node, and a
backward that is to be differentiated again (`create_graph=True`) runs the rewritten graph again, op by op, on those
inputs, and lets autograd differentiate that run. Other calls pay only for a tuple of references.

Copies of weights are among the inputs: if a weight, but not its copy, was written after the call, the gradients are
still those of the call. The node drops copies when autograd drops saved tensors, so later calls refresh them in place.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ampcompile.passes.analysis.op_traits import (
    STATISTICS,
    STATISTICS_UNREAD_IF,
    arguments_by_name,
    arguments_of,
    has,
    name_of,
    written_arguments,
)
from ampcompile.passes.base import run_passes
from ampcompile.passes.graph import bodies, copy_graph, placeholders
from ampcompile.passes.pipeline import replay
from ampcompile.passes.replay import has_closed_backward
from ampcompile.passes.weight_copy import read_copy
from ampcompile.torch_private import autocast, compiled_functions, pytree, tracing
from ampcompile.torch_private.dispatcher import OpOverload

from .plain_graph import CLOSED, differentiate, make_stand_in, refuse_gradients

Run = Callable[..., Any]
_EAGERLY = (
    ': expected one that gives the same numbers when it runs again; compile it with options={"lower": "eager"}, which '
    "keeps what autograd needs"
)
_DRAWS = "draws random numbers, as dropout does" + _EAGERLY
_READS_OLD = "reads inputs that it also writes to, of more than a megabyte" + _EAGERLY
_MOST = 1 << 20  # so many bytes of what a graph is about to overwrite are kept in each call
_WRITES = "writes to an input in place" + _EAGERLY
SUBCLASSES = "takes or returns tensor subclasses" + _EAGERLY
_ELSEWHERE = "was called by other means than torch.compile" + _EAGERLY
_WRITTEN = "read an input that was written since: expected it as it was; take the gradient before the write"


class _Call(NamedTuple):
    """The graph's inputs in one call, and the versions of those that the graph doesn't write itself.

    `before`: by index, what inputs held that the graph reads and then writes, as spectral norm does with its vectors.
    """

    args: tuple[Any, ...]
    before: dict[int, Tensor]
    versions: list[int]


def copy_with_bodies(gm: GraphModule) -> GraphModule:
    """Copy a graph and its bodies, so that later changes of `gm` don't reach the copy. Constants are shared."""
    twin = copy_graph(gm)
    twin.meta |= gm.meta  # a checkpoint's body has its policy there
    for node, body in bodies(gm):
        setattr(twin, str(node.target), copy_with_bodies(body))
    return twin


class DoubleBackward:
    """The differentiable backward of one compiled graph: `function` is AOTAutograd's, `gm` the rewritten graph."""

    def __init__(
        self, gm: GraphModule, function: compiled_functions.AutogradFunction, refusal: str | None = None
    ) -> None:
        self._gm, self._function = gm, function
        self.call = threading.local()  # .inputs: the graph's inputs in this thread's current call
        self._slots = compiled_functions.result_slots(function)
        self._sources: list[int | None] | None = None  # for each argument of the function, the graph input's index
        self._watched: list[int] = []  # the inputs whose versions are recorded
        self.refusal = refusal or self._refusal()  # why there is none
        compiled_functions.survive_kept_graphs(function)
        compiled_functions.intercept(function, self._remember, self._backward)

    def _refusal(self) -> str | None:
        """The reason why the graph can't run again, as far as it is known without running it; None if it can."""
        if compiled_functions.writes_to_differentiated_inputs(self._function):
            return _WRITES
        if compiled_functions.takes_apart_subclasses(self._function):
            return SUBCLASSES
        run_passes(replay(), self._gm)
        return CLOSED if has_closed_backward(self._gm) else None

    def _remember(self, ctx: Any, arguments: Sequence[Any]) -> None:
        args = getattr(self.call, "inputs", None)
        # Fakes are other objects than the inputs: which input an argument is couldn't be learned from them.
        if args is None or self.refusal or (self._sources is None and tracing.fakes_only()):
            ctx.amp_call = None
            return
        if self._sources is None:
            self._learn_sources(args, arguments)
        before = {i: args[i].detach().clone() for i in self._overwritten} if not self.refusal else {}
        ctx.amp_call = _Call(args, before, _versions(args, self._watched))

    def _learn_sources(self, args: tuple[Any, ...], arguments: Sequence[Any]) -> None:
        """At the first call, find the input of each argument: AOTAutograd drops duplicate inputs, and adds others."""
        index = {id(arg): i for i, arg in reversed(list(enumerate(args)))}
        sources = [index.get(id(argument)) if isinstance(argument, Tensor) else None for argument in arguments]
        written = {sources[i] for i in compiled_functions.written_arguments(self._function)}
        self._written = [i for i in written if i is not None]
        self._overwritten = [i for i in self._written if not only_updates_statistics(placeholders(self._gm)[i])]
        if None in written or sum(args[i].nbytes for i in self._overwritten) > _MOST:
            self.refusal = _READS_OLD
        read = [not all(user.target is read_copy for user in node.users) for node in placeholders(self._gm)]
        # A weight that is read by its copy alone may be written: the copy still holds the numbers of the call.
        self._watched = [i for i, arg in enumerate(args) if isinstance(arg, Tensor) and read[i] and i not in written]
        self._sources = sources

    def _backward(self, original: Run, ctx: Any, gradients: Any) -> Any:
        call: _Call | None = ctx.amp_call
        if not torch.is_grad_enabled():
            if not compiled_functions.graph_is_kept():
                ctx.amp_call = None  # as autograd drops saved tensors: a copy that is held isn't overwritten
            return original(ctx, gradients)
        if call is None or self.refusal:
            return self._refuse_second(original, ctx, gradients, self.refusal or _ELSEWHERE)
        if call.versions != _versions(call.args, self._watched):
            return self._refuse_second(original, ctx, gradients, _WRITTEN)
        try:
            result = self._replay(call, ctx.needs_input_grad, list(gradients))
        except RandomNumbersDrawn:
            self.refusal = _DRAWS  # of the graph, not of the call: later calls needn't store their inputs
            return self._refuse_second(original, ctx, gradients, self.refusal)
        if not compiled_functions.graph_is_kept():
            ctx.amp_call = None
        return result

    def _replay(self, call: _Call, needed: Sequence[bool], gradients: list[Tensor | None]) -> Any:
        """Gradients of the function's arguments, as differentiable functions of the inputs and `gradients`."""
        assert self._sources is not None
        args = call.args
        wanted = {i: args[i] for i, need in zip(self._sources, needed, strict=True) if need and i is not None}
        # Without history: else the run would be differentiated with respect to what the inputs were computed from, too.
        inside = {i: make_stand_in(tensor) for i, tensor in wanted.items()}
        inputs = [inside.get(i, arg) for i, arg in enumerate(args)]
        for i in self._written:  # the call has updated them already
            inputs[i] = call.before.get(i, args[i]).clone()
        with forbid_random_numbers(args), torch.enable_grad(), autocast.autocast_off():
            # None counts as a result: slots are numbered so.
            results = pytree.tree_leaves(self._gm(*inputs), is_leaf=lambda value: value is None)
        reached = list(self._find_reached(results, gradients))
        by_input: dict[int, Tensor | None] = {}
        if reached:
            computed = differentiate(reached, [*wanted.values()], [*inside.values()], keep=True)
            by_input = dict(zip(wanted, computed, strict=True))
        return tuple(
            by_input.get(i) if need and i is not None else None for i, need in zip(self._sources, needed, strict=True)
        )

    def _find_reached(self, results: list[Any], gradients: Sequence[Tensor | None]) -> Any:
        for slot, gradient in zip(self._slots, gradients, strict=False):
            if slot is not None and gradient is not None:
                output, has_base = slot
                # AOTAutograd makes views outside of its function, which returns their base: the base has the gradient.
                result = results[output]._base if has_base else results[output]
                if result.requires_grad:
                    yield result, gradient

    def _refuse_second(self, original: Run, ctx: Any, gradients: Any, reason: str) -> Any:
        """Return the compiled backward's gradients, such that differentiating them raises an error."""
        with torch.no_grad():
            result = original(ctx, gradients)
        return refuse_gradients(reason, result)


def _versions(args: tuple[Any, ...], watched: list[int]) -> list[int]:
    try:
        return [args[i]._version for i in watched]
    except RuntimeError:  # inference tensors have none
        return [-1 if args[i].is_inference() else args[i]._version for i in watched]


def only_updates_statistics(value: Node) -> bool:
    """True if a written input is only a statistic or counter: no result depends on its old value."""
    return all(_updates_statistics(user, value) or _updates_itself(user, value) for user in value.users)


def _updates_statistics(user: Node, value: Node) -> bool:
    if not has(user.target, STATISTICS_UNREAD_IF.keys()):
        return False
    arguments = arguments_by_name(user.target, user.args, user.kwargs)
    names = {name for name, argument in arguments.items() if argument is value}
    return bool(arguments[STATISTICS_UNREAD_IF[name_of(user.target)]]) and names <= STATISTICS


def _updates_itself(user: Node, value: Node) -> bool:
    if not isinstance(user.target, OpOverload) or user.users:
        return False
    first = arguments_of(user.target)[0].name
    return first in written_arguments(user.target) and user.args[0] is value and user.all_input_nodes == [value]


class RandomNumbersDrawn(Exception):
    """Random numbers were drawn."""


@contextlib.contextmanager
def forbid_random_numbers(values: Sequence[Any]) -> Iterator[None]:
    """Raise RandomNumbersDrawn at the end if any were drawn on a tensor's device, with the generators restored."""
    devices = {value.device for value in values if isinstance(value, Tensor)} | {torch.device("cpu")}
    modules = [(d, torch.get_device_module(d)) for d in devices if d.type != "cpu"]
    before: list[tuple[Any, Tensor, tuple[Any, ...]]] = [(torch, torch.get_rng_state(), ())]
    before += [(module, module.get_rng_state(device), (device,)) for device, module in modules]
    yield
    drawn = [not torch.equal(state, module.get_rng_state(*where)) for module, state, where in before]
    if any(drawn):
        for module, state, where in before:
            module.set_rng_state(state, *where)
        raise RandomNumbersDrawn
