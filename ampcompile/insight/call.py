"""One more run of a call: as it was compiled, on another backend, or in two precisions; its state is put back."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ampcompile.compiler import current_call, within_call
from ampcompile.compiler.ambient import options_of
from ampcompile.compiler.backend import leave, rewrite
from ampcompile.compiler.left_to_autocast import LEFT_TO_AUTOCAST
from ampcompile.compiler.lower import cutter_to_8_bits, lower
from ampcompile.compiler.module_names import module_names, modules_of
from ampcompile.config import Options
from ampcompile.errors import AuditError
from ampcompile.passes.after.recompute_casts import RecomputeCasts
from ampcompile.passes.base import run_passes
from ampcompile.passes.graph import name_modules, placeholders
from ampcompile.passes.replay import BindWeightsEagerly
from ampcompile.policy import Policy
from ampcompile.records.graphs import SavedRecord
from ampcompile.records.saved import record_saved
from ampcompile.torch_private import compilations, compiled_functions, cuts, lowering, pytree, storages
from ampcompile.torch_private.patches import uncompiled

from .exact import is_floating
from .run import Backward, Forward, Session


@dataclass(eq=False)
class Backend:
    """A Dynamo backend that compiles forward graphs by a function of its own, and backward graphs as `run_as` says."""

    options: Options
    compile_graph: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
    run_as: Options

    def __call__(
        self, gm: GraphModule, example_inputs: Sequence[Any], options: dict[str, Any] | None = None
    ) -> Callable[..., Any]:
        if compiled_functions.is_backward(example_inputs):
            return lower(gm, example_inputs, self.run_as)
        return self.compile_graph(gm, example_inputs)

    def amp_options(self, options: dict[str, Any] | None = None) -> Options:
        """Mark it as a backend of ours: calls run under these options, but for those that one function is given."""
        return replace(self.options, **(options or {}))


@dataclass(frozen=True)
class Subject:
    """A callable to look at, as it was before it was compiled, and how it is compiled."""

    f: Any
    options: Options
    dynamic: bool | None

    @classmethod
    def of(cls, f: Any, options: dict[str, Any], mode: str | None, dynamic: bool | None) -> Subject:
        """The original of a callable; options given by name beat those that it was compiled with."""
        compiled, given = compilations.how_compiled(f), Options.parse(options, mode)
        if compiled is None:
            return cls(f, given, dynamic)
        kept = options_of(compiled.backend) or Options()
        ours = {field.name: getattr(given, field.name) for field in fields(Options) if field.name in options}
        inductor = tuple({**dict(kept.inductor), **dict(given.inductor)}.items())
        chosen = replace(kept, **ours, inductor=inductor)
        return cls(compiled.original, chosen, compiled.dynamic if dynamic is None else dynamic)

    @contextlib.contextmanager
    def set_apart(
        self, args: Any, kwargs: Any, backend: Backend, cast: Callable[[Tensor], Tensor] | None = None
    ) -> Iterator[Any]:
        """Yield the callable as compiled by `backend`; what it changes and what Dynamo compiles is undone after."""
        with (
            preserve_state(self.f, args, kwargs),
            compilations.dynamo_as_it_was(backend),
            uncompiled(self.f),
            within_call(cast=cast),
        ):
            yield torch.compile(self.f, backend=backend, dynamic=self.dynamic)


def modules_in(f: Any, args: Any, kwargs: Any) -> list[torch.nn.Module]:
    """The modules that a call visibly uses: those of `f`, and those among the arguments."""
    arguments = pytree.arg_tree_leaves(*args, **kwargs)
    return [*modules_of(f), *(value for value in arguments if isinstance(value, torch.nn.Module))]


@contextlib.contextmanager
def preserve_state(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Restore gradients, buffers and random states afterwards, for the modules and tensors that `f` visibly uses.

    Not undone: writes to parameters (an optimizer stepping inside `f`), to tensors given as arguments, and all other
    side effects of Python code.
    """
    modules = modules_in(f, args, kwargs)
    tensors = pytree.tensors_in(args, kwargs) + [p for m in modules for p in m.parameters()]
    leaves = list({id(t): t for t in tensors if t.is_leaf and t.requires_grad}.values())
    owners = list({id(owner): owner for m in modules for owner in m.modules() if owner._buffers}.values())
    buffers = [(o, name, b, b.detach().clone()) for o in owners for name, b in o._buffers.items() if b is not None]
    grads = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    python, numpy = random.getstate(), sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    devices = {t.device.index for t in tensors if t.device.type == "cuda"}
    try:
        with torch.random.fork_rng(sorted(i for i in devices if i is not None), device_type="cuda"):
            yield
    finally:
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(drawn)
        with torch.no_grad():
            for owner, name, buffer, before in buffers:
                owner._buffers[name] = buffer
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


@dataclass(frozen=True)
class MeasuredCall:
    """One call to run and measure, as often as asked, with the same random numbers each time."""

    subject: Subject
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_state: Any = field(default_factory=compiled_functions.random_state)
    against: torch.dtype = torch.float64
    loss: Callable[[Any], Tensor] | None = None
    backward: bool = True
    cumulative: bool = True
    loss_scale: float = 1.0
    eager: bool = False
    """True if eager autocast inserts the casts, and not we."""

    def with_options(self, **options: Any) -> MeasuredCall:
        """Return the same call under another policy, or with other values kept in 8 bits."""
        changed = replace(self.subject.options, **options)
        return replace(self, subject=replace(self.subject, options=changed))

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """The parameters of the callable and of modules in its arguments, as `named_parameters` names them."""
        modules = modules_in(self.subject.f, self.args, self.kwargs)
        return [named for module in modules for named in module.named_parameters()]

    def run(self, session: Session) -> dict[str, tuple[Tensor, Tensor]]:
        """Run the call and its backward; return both runs' values of outputs, then of gradients, by name."""
        backend = self._backend(session)
        widen = self._compile_beside(_widen, backend, dynamic=False)  # compiled, because that rounds gradients

        def cast(result: Tensor) -> Tensor:
            return (widen if session.ran else _widen)(result)

        with self.subject.set_apart(self.args, self.kwargs, backend, cast) as compiled:
            compiled_functions.start_from(self.random_state)
            result = compiled(*self.args, **self.kwargs)
            if not session.ran:
                raise AuditError(
                    "audit found no op to compare: Dynamo compiled nothing of the call. Pass a module or function that "
                    "computes with tensors; TORCH_LOGS=graph_breaks says why Dynamo left it alone."
                )
            outputs = {f"output {i}": pair for i, pair in enumerate(_outputs(session, result))}
            self.differentiate(result, partial(self._compile_beside, backend=backend, dynamic=self.subject.dynamic))
        return outputs | {f"gradient of {name}": pair for name, pair in session.gradients.items()}

    def differentiate(self, result: Any, compile_loss: Callable[[Any], Any]) -> None:
        """Differentiate the loss of a result, if gradients are wanted and it has any.

        It is compiled like the call: gradients may underflow where they enter the graph.
        """
        leaves = [leaf for leaf in pytree.tree_leaves(result) if is_floating(leaf) and leaf.requires_grad]
        if not self.backward:
            return
        if self.loss is not None:
            loss = compile_loss(self.loss)(result)
        elif (scalar := next((leaf for leaf in leaves if leaf.numel() == 1), None)) is not None:
            loss = scalar.sum()
        elif leaves:
            loss = compile_loss(_mean_squares)(leaves)
        else:
            return
        (loss if self.loss_scale == 1 else loss * self.loss_scale).backward()

    def _backend(self, session: Session) -> Backend:
        run_as = replace(self.subject.options, weights="every_call", lower="aot_eager")
        names = {id(parameter): name for name, parameter in self.named_parameters()}

        def interpret(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            make = partial(leave, reason="recorded as eager autocast runs it") if self.eager else rewrite
            rewritten = make(gm, example_inputs, run_as).graph
            inputs = [
                names.get(id(value), node.name) + number if _is_of_user(value, session) else None
                for node, value in zip(placeholders(gm), example_inputs, strict=True)
                for number in _numbers(value)
            ]
            left = LEFT_TO_AUTOCAST in rewritten.meta
            if not left:
                run_passes([BindWeightsEagerly()], rewritten)
                lowering.forget_output_values(rewritten)
            paths = module_names(current_call.callable or self.subject.f)
            saved, cut = dict[str, SavedRecord](), None
            if run_as.saved.modules and not left:
                watch = partial(_note_saved, saved, kinds_of_inputs(gm, example_inputs), paths)
                cut = cutter_to_8_bits(rewritten, example_inputs, run_as, paths, watch, _cut_as_amp)
            session.saved.append(saved)
            forward, backward = (
                partial(Forward, saved, session, paths, inputs),
                partial(Backward, session, paths, inputs),
            )
            return compiled_functions.aot_interpreted(rewritten, example_inputs, forward, backward, left, cut)

        return Backend(self.subject.options, interpret, run_as)

    def _compile_beside(self, f: Any, backend: Backend, dynamic: bool | None) -> Any:
        """Compile another function than the audited: patterns of the policy that match nothing in it are no error."""
        options: dict[str, Any] = {"policy": Policy()}
        return torch.compile(f, backend=backend, dynamic=dynamic, options=options)


def kinds_of_inputs(gm: GraphModule, example_inputs: Sequence[Any]) -> list[tuple[str, str]]:
    """The kind and the name of each input of a graph: Dynamo's, then copies of weights."""
    kinds = ("weight" if isinstance(value, torch.nn.Parameter) else "input" for value in example_inputs)
    return [(kind or "copy", node.name) for node, kind in zip_longest(placeholders(gm), kinds)]


def _note_saved(
    saved: dict[str, SavedRecord], kinds: Sequence[tuple[str, str]], paths: Mapping[str, str], cut: cuts.Cut
) -> None:
    with name_modules(paths):
        records = record_saved(cut, kinds)
    saved |= {record.name: replace(record, error=0.0) for record in records if not record.alive_anyway}


def _cut_as_amp(joint: GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Cut as the compiled graph is, as far as its other passes don't matter: what is computed again isn't kept."""
    run_passes([RecomputeCasts()], joint)
    return cuts.min_cut_rematerialization_partition(joint, *args, **kwargs)


def _is_of_user(value: Any, session: Session) -> bool:
    return isinstance(value, Tensor) and value.is_leaf and session.find_exact(value) is None


def _numbers(value: Any) -> list[str]:
    """Suffixes of a graph input's name, one for each part of it: a number, where it holds several tensors."""
    parts = storages.parts_of(value)
    several = sum(isinstance(part, Tensor) for part in parts) > 1
    return [f"[{i}]" if several else "" for i in range(len(parts))]


def _outputs(session: Session, result: Any) -> list[tuple[Tensor, Tensor]]:
    """Both runs' values of the floating tensors that a call returned; if no graph made any, of the last graph's."""
    if not session.cumulative:
        return []
    parts = [part for leaf in pytree.tree_leaves(result) for part in storages.parts_of(leaf)]
    leaves = [part for part in parts if is_floating(part)]
    pairs = [(leaf.detach(), exact) for leaf in leaves if (exact := session.find_exact(leaf)) is not None]
    return pairs or [(leaf.detach(), session.exact[leaf]) for leaf in session.returned]


def _widen(result: Tensor) -> Tensor:
    return result.float()


def _mean_squares(values: list[Tensor]) -> Tensor:
    return torch.stack([value.abs().float().square().mean() for value in values]).sum()
