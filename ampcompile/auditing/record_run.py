"""Record a run: op by op, in interpreted graphs, and the results of the compiled call itself."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ampcompile.compiler.ambient import autocast_for, device_type_of
from ampcompile.compiler.backend import rewrite
from ampcompile.compiler.lower import lower
from ampcompile.compiler.unmatched import named
from ampcompile.config import Options
from ampcompile.explaining.preserve_state import preserve_state
from ampcompile.explaining.recorder import uncompile
from ampcompile.policy import Policy
from ampcompile.torch_private import compiled_functions, dynamo_caches, joint_graphs, pytree
from ampcompile.torch_private.patches import uncompiled

from .high_precision import is_floating
from .numbers import relative_error
from .recorder import Call, Settings, named_parameters
from .recording import Recording, Returned, Step
from .run import Session


def make_recorder(
    f: Any, settings: Settings, options: dict[str, Any], mode: str | None, dynamic: bool | None
) -> Callable[..., Recording]:
    """Return what `ampcompile.record` returns; its arguments are checked at once."""
    original, chosen, dynamic = uncompile(f, options, mode, dynamic)
    if settings.eager:
        chosen = replace(chosen, policy=Policy())  # ours, not autocast's
    as_given = dynamo_caches.how_compiled(f) is not None and not options and mode is None

    def record_call(*args: Any, **kwargs: Any) -> Recording:
        call = Call(original, settings, chosen, dynamic, args, kwargs, joint_graphs.random_state())
        found = _results_of_call(call, f if as_given else None)  # first: the other run has copies of weights cast again
        steps: list[Step] = []
        session = Session(settings.against, True, True, steps=steps)
        ops = {f"output {i}": pair for i, pair in enumerate(call.run(session))}
        ops |= {f"gradient of {name}": pair for name, pair in session.gradients.items()}
        results = {
            name: Returned(relative_error(mixed, exact), relative_error(found[name], exact), exact.numel())
            for name, (mixed, exact) in ops.items()
            if name in found and found[name].shape == exact.shape
        }
        return Recording(_about(call), steps, results)

    return record_call


def _about(call: Call) -> dict[str, str]:
    device_type = device_type_of(None, call.args, call.kwargs)
    device = torch.cuda.get_device_name() if device_type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {
        "callable": named(call.f),
        "recorded": str(date.today()),
        "torch": torch.__version__,
        "ampcompile": version("ampcompile"),
        "machine": f"{platform.system()} {platform.machine()}, {device_type} {device}",
        "run": "eager autocast" if call.settings.eager else "compiled",
    } | {f"option {name}": str(value) for name, value in vars(call.options).items()}


def _results_of_call(call: Call, compiled: Any) -> dict[str, Tensor]:
    """Return outputs, and gradients of parameters, of the call as `compiled`, or else compiled anew, or run eagerly."""
    with preserve_state(call.f, call.args, call.kwargs):
        joint_graphs.start_from(call.random_state)
        result = _run(call, compiled)
        call.backward(result, lambda loss: loss)
        leaves = [leaf for leaf in pytree.tree_leaves(result) if is_floating(leaf)]
        found = {f"output {i}": leaf.detach() for i, leaf in enumerate(leaves)}
        parameters = named_parameters(call.f, call.args, call.kwargs)
        return found | {f"gradient of {name}": p.grad for name, p in parameters if p.grad is not None}


def _run(call: Call, compiled: Any) -> Any:
    if call.settings.eager:
        with uncompiled(call.f), autocast_for(device_type_of(None, call.args, call.kwargs), call.options):
            return call.f(*call.args, **call.kwargs)
    if compiled is not None:
        return compiled(*call.args, **call.kwargs)
    backend = _Backend(call.options)
    with dynamo_caches.dynamo_as_it_was(backend), uncompiled(call.f):
        return torch.compile(call.f, backend=backend, dynamic=call.dynamic)(*call.args, **call.kwargs)


@dataclass(frozen=True)
class _Backend:
    """The backend `amp` with options that are parsed already."""

    options: Options

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if not compiled_functions.is_backward(example_inputs):
            gm = rewrite(gm, example_inputs, self.options).graph
        return lower(gm, example_inputs, self.options)

    def amp_options(self, **_: Any) -> Options:
        return self.options
