"""One more run of a call: under the options it was compiled with, on another backend, and with its state put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ampcompile.compiler.ambient import options_of
from ampcompile.compiler.call_state import casting
from ampcompile.compiler.lower import lower
from ampcompile.compiler.module_names import modules_of
from ampcompile.config import Options
from ampcompile.torch_private import compiled_functions, dynamo_caches, pytree
from ampcompile.torch_private.patches import uncompiled


@dataclass(eq=False)
class Backend:
    """A Dynamo backend that compiles forward graphs by a function of its own, and backward graphs as `run_as` says."""

    options: Options
    compile_graph: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
    run_as: Options

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if compiled_functions.is_backward(example_inputs):
            return lower(gm, example_inputs, self.run_as)
        return self.compile_graph(gm, example_inputs)

    def amp_options(self, **_: Any) -> Options:
        """Mark it as a backend of ours: calls run under these options."""
        return self.options


@dataclass(frozen=True)
class Subject:
    """A callable to look at, as it was before it was compiled, and how it is compiled."""

    f: Any
    options: Options
    dynamic: bool | None

    @classmethod
    def of(cls, f: Any, options: dict[str, Any], mode: str | None, dynamic: bool | None) -> Subject:
        """The original of a callable; options given by name beat those that it was compiled with."""
        compiled, given = dynamo_caches.how_compiled(f), Options.parse(options, mode)
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
        """Yield the callable as compiled by `backend`; what it changes, and what Dynamo compiles, is undone afterwards.

        `cast` widens results of the call.
        """
        with (
            preserve_state(self.f, args, kwargs),
            dynamo_caches.dynamo_as_it_was(backend),
            uncompiled(self.f),
            casting(cast),
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
    tensors = [t for t in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(t, Tensor)]
    tensors += [p for m in modules for p in m.parameters()]
    leaves = list({id(t): t for t in tensors if t.is_leaf and t.requires_grad}.values())
    owners = list({id(owner): owner for m in modules for owner in m.modules() if owner._buffers}.values())
    buffers = [(o, name, b, b.detach().clone()) for o in owners for name, b in o._buffers.items() if b is not None]
    grads = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    devices = {t.device.index for t in tensors if t.device.type == "cuda"}
    try:
        with torch.random.fork_rng(sorted(i for i in devices if i is not None), device_type="cuda"):
            yield
    finally:
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
        with torch.no_grad():
            for owner, name, buffer, before in buffers:
                owner._buffers[name] = buffer
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
