"""Run a call, and its backward, with a backend that interprets every graph in two precisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isnan
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ampcompile.compiler.backend import leave, rewrite
from ampcompile.compiler.call_state import casting, current_call
from ampcompile.compiler.left_to_autocast import LEFT
from ampcompile.compiler.lower import lower
from ampcompile.compiler.module_names import module_names, modules_of
from ampcompile.config import Options
from ampcompile.errors import AuditError, OptionError
from ampcompile.explaining.preserve_state import preserve_state
from ampcompile.explaining.recorder import uncompile
from ampcompile.passes.base import run_passes
from ampcompile.passes.graph import placeholders
from ampcompile.passes.replay.bind_weights_eagerly import BindWeightsEagerly
from ampcompile.policy import Policy
from ampcompile.torch_private import compiled_functions, dynamo_caches, joint_graphs, lowering, pytree
from ampcompile.torch_private.patches import uncompiled

from .adjoints import Adjoints
from .high_precision import is_floating
from .numbers import find_not_finite, ratio, relative_error
from .result import Audit
from .run import Session, interpreters
from .sensitivities import Sensitivities


@dataclass(frozen=True)
class Settings:
    """The arguments of `ampcompile.audit`, beside the options of compilation."""

    against: torch.dtype
    loss: Callable[[Any], Tensor] | None
    backward: bool
    cumulative: bool
    eager: bool = False
    """True if eager autocast inserts the casts, and not we."""

    def __post_init__(self) -> None:
        if self.against not in (torch.float64, torch.float32):
            raise OptionError(f"audit got against={self.against!r}: expected torch.float64 or torch.float32.")


def make_auditor(
    f: Any, settings: Settings, options: dict[str, Any], mode: str | None, dynamic: bool | None
) -> Callable[..., Audit]:
    """Return what `ampcompile.audit` returns; its arguments are checked at once."""
    f, chosen, dynamic = uncompile(f, options, mode, dynamic)

    def audit_call(*args: Any, **kwargs: Any) -> Audit:
        return Call(f, settings, chosen, dynamic, args, kwargs, joint_graphs.random_state()).audit()

    return audit_call


@dataclass(frozen=True)
class Call:
    """One call to run and compare, as often as asked, with the same random numbers each time."""

    f: Any
    settings: Settings
    options: Options
    dynamic: bool | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_state: Any

    def with_policy(self, policy: Policy) -> Call:
        """Return the same call under another policy."""
        return replace(self, options=replace(self.options, policy=policy))

    def audit(self, local: bool = True) -> Audit:
        """Run the call; `local`: each op also alone."""
        session = Session(self.settings.against, self.settings.cumulative, local)
        outputs = self.run(session)
        gradients = session.gradient_errors()
        compared = [squares for squares in gradients.values() if not isnan(squares[0])] or [*gradients.values()]
        pairs = {f"output {i}": pair for i, pair in enumerate(outputs)}
        pairs |= {f"gradient of {name}": pair for name, pair in session.gradients.items()}
        return Audit(
            ops=session.ops,
            outputs=[relative_error(*pair) for pair in outputs],
            gradients={name: ratio(*squares) for name, squares in gradients.items()},
            gradient_error=ratio(*map(sum, zip(*compared, strict=True))) if compared else None,
            not_finite=session.not_finite | {name: share for name, pair in pairs.items() if (share := _share(*pair))},
            unmeasured=sorted(session.unmeasured),
            against=self.settings.against,
            policy=self.options.policy,
            call=self,
        )

    def sensitivities(self) -> Sensitivities:
        """Run the call and differentiate its outputs and gradients with respect to what each op rounds."""
        adjoints = Adjoints(self.settings.against)
        session = Session(self.settings.against, True, False, adjoints)
        with_gradients = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(with_gradients):
            results = {f"output {i}": [exact] for i, (_, exact) in enumerate(self.run(session))}
            adjoints.differentiate(results | {"gradients": [exact for _, exact in session.gradients.values()]})
        return Sensitivities(adjoints.roundings, sorted(adjoints.unfollowed))

    def run(self, session: Session) -> list[tuple[Tensor, Tensor]]:
        """Run the call and its backward in a session; return both runs' values of what it returned."""
        backend = self._backend(
            session, {id(parameter): name for name, parameter in named_parameters(self.f, self.args, self.kwargs)}
        )
        widen = self._compile_beside(_widen, backend, dynamic=False)  # compiled, because that rounds gradients

        def cast(result: Tensor) -> Tensor:
            return (widen if session.ran else _widen)(result)

        with (
            preserve_state(self.f, self.args, self.kwargs),
            dynamo_caches.dynamo_as_it_was(backend),
            uncompiled(self.f),
            casting(cast),
        ):
            joint_graphs.start_from(self.random_state)
            result = torch.compile(self.f, backend=backend, dynamic=self.dynamic)(*self.args, **self.kwargs)
            if not session.ran:
                raise AuditError(
                    "audit found no op to compare: Dynamo compiled nothing of the call. Pass a module or function that "
                    "computes with tensors; TORCH_LOGS=graph_breaks says why Dynamo left it alone."
                )
            outputs = self._outputs(session, result)
            self.backward(result, partial(self._compile_beside, backend=backend, dynamic=self.dynamic))
        return outputs

    def _backend(self, session: Session, names: dict[int, str]) -> Any:
        run_as = replace(self.options, weights="every_call", lower="aot_eager", fuse="none")

        def interpret(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            if compiled_functions.is_backward(example_inputs):
                return lower(gm, example_inputs, run_as)
            make = partial(leave, reason="recorded as eager autocast runs it") if self.settings.eager else rewrite
            rewritten = make(gm, example_inputs, run_as).graph

            def is_of_user(value: Any) -> bool:
                return isinstance(value, Tensor) and value.is_leaf and session.find_exact(value) is None

            inputs = [
                names.get(id(value), node.name) + number if is_of_user(value) else None
                for node, value in zip(placeholders(gm), example_inputs, strict=True)
                for number in _numbers(value)
            ]
            left = LEFT in rewritten.meta
            if not left:
                run_passes([BindWeightsEagerly()], rewritten)
                lowering.forget_output_values(rewritten)
            forward, backward = interpreters(session, module_names(current_call.callable or self.f), inputs)
            return joint_graphs.aot_interpreted(rewritten, example_inputs, forward, backward, under_autocast=left)

        interpret.amp_options = lambda **_: self.options  # type: ignore[attr-defined]
        return interpret

    def _outputs(self, session: Session, result: Any) -> list[tuple[Tensor, Tensor]]:
        """Both runs' values of the floating tensors that `f` returned; if no graph made any, of the last graph's."""
        if not session.cumulative:
            return []
        parts = [part for leaf in pytree.tree_leaves(result) for part in compiled_functions.parts_of(leaf)]
        leaves = [part for part in parts if is_floating(part)]
        pairs = [(leaf.detach(), exact) for leaf in leaves if (exact := session.find_exact(leaf)) is not None]
        return pairs or [(leaf.detach(), session.exact[leaf]) for leaf in session.returned]

    def backward(self, result: Any, compile_loss: Callable[[Any], Any]) -> None:
        """Differentiate the loss of a result, if gradients are wanted and it has any.

        It is compiled like `f`: gradients may underflow where they enter the graph.
        """
        leaves = [leaf for leaf in pytree.tree_leaves(result) if is_floating(leaf) and leaf.requires_grad]
        if not self.settings.backward:
            return
        if self.settings.loss is not None:
            compile_loss(self.settings.loss)(result).backward()
        elif (scalar := next((leaf for leaf in leaves if leaf.numel() == 1), None)) is not None:
            scalar.sum().backward()
        elif leaves:
            compile_loss(_mean_squares)(leaves).backward()

    def _compile_beside(self, f: Any, backend: Any, dynamic: bool | None) -> Any:
        """Compile another function than the audited: patterns of the policy that match nothing in it are no error."""
        backend.amp_options, audited_options = lambda **_: replace(self.options, policy=Policy()), backend.amp_options
        compiled = torch.compile(f, backend=backend, dynamic=dynamic)
        backend.amp_options = audited_options
        return compiled


def _widen(result: Tensor) -> Tensor:
    return result.float()


def _share(mixed: Tensor, exact: Tensor) -> float:
    """Return the share of the elements with a NaN or an infinity that one run has alone."""
    in_mixed, in_exact = find_not_finite(mixed, exact)
    return float((in_mixed | in_exact).double().mean()) if mixed.numel() else 0.0


def _numbers(value: Any) -> list[str]:
    """Suffixes of a graph input's name, one for each part of it: a number, where it holds several tensors."""
    parts = compiled_functions.parts_of(value)
    several = sum(isinstance(part, Tensor) for part in parts) > 1
    return [f"[{i}]" if several else "" for i in range(len(parts))]


def _mean_squares(values: list[Tensor]) -> Tensor:
    return torch.stack([value.abs().float().square().mean() for value in values]).sum()


def named_parameters(f: Any, args: Any, kwargs: Any) -> list[tuple[str, Tensor]]:
    """Return the parameters of `f` and of modules in its arguments, with the names that `named_parameters` gives."""
    modules = [*modules_of(f), *(m for m in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(m, torch.nn.Module))]
    return [named for module in modules for named in module.named_parameters()]
