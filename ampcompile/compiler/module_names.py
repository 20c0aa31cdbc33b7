"""Find the modules that a callable uses, and their paths, which policies and reports use as names.

After its first call, warn of policy patterns that matched nothing, and log if nothing was compiled.
"""

import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import GraphModule

from ampcompile.errors import AmpWarning
from ampcompile.passes.graph import graphs, module_path
from ampcompile.policy import Policy
from ampcompile.torch_private import compilations
from ampcompile.torch_private.types import OpOverload

from .call_state import current_call

# Attributes in which wrappers hold a module: they aren't part of its path.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def module_names(f: Any) -> dict[str, str]:
    """Paths, as in `named_modules`, of the modules that `modules_of(f)` yields and of their submodules.

    The keys are `str(id(module))`. A module inside two others has its longest path.
    """
    names: dict[str, str] = {}
    for root in modules_of(f):
        inner = root.module if isinstance(root, torch.nn.parallel.DistributedDataParallel) else root
        for path, module in inner.named_modules():
            path = ".".join(part for part in path.split(".") if part not in _WRAPPERS)
            names[str(id(module))] = max(path, names.get(str(id(module)), ""), key=len)
    return names


def modules_of(f: Any) -> Iterator[torch.nn.Module]:
    """Yield the modules among `f`, its `__self__`, that object's attributes, and `f`'s closure and used globals."""
    return (value for value in used_by(f) if isinstance(value, torch.nn.Module))


def used_by(f: Any) -> list[Any]:
    """`f`, its `__self__`, that object's attributes if it is no module, and `f`'s closure and used globals."""
    owner = getattr(f, "__self__", None)
    used: list[Any] = [f, owner]
    if not isinstance(owner, torch.nn.Module):
        used += list(getattr(owner, "__dict__", {}).values())
    plain = inspect.unwrap(getattr(f, "__func__", f)) if callable(f) else f
    used.append(plain)  # Dynamo wraps some modules of torch in a function
    if inspect.isfunction(plain):
        variables = inspect.getclosurevars(plain)
        used += [*variables.nonlocals.values(), *variables.globals.values()]
    return used


log = logging.getLogger("ampcompile")


@dataclass
class CompiledNames:
    """Names of the ops, and paths of the modules, in the graphs compiled in some calls; the number of graphs."""

    ops: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    graphs: int = 0

    def add(self, gm: GraphModule) -> None:
        """Record a captured graph and its bodies."""
        self.graphs += 1
        for node in (node for graph in graphs(gm) for node in graph.graph.nodes):
            if isinstance(node.target, OpOverload):
                self.ops.add(node.target.name())
                self.modules.add(module_path(node))


_known = WeakKeyDictionary[Any, dict[Policy, CompiledNames]]()
"""By the class of a module, or the code of a function: Dynamo doesn't compile it again for another object or call."""


class FirstCalls:
    """Runs a compiled callable, and inspects the compiled graphs in its first calls, until the names are known."""

    def __init__(self, compiled: Callable[..., Any], fn: Any, policy: Policy) -> None:
        self.run = self._look
        self._compiled, self._fn, self._policy = compiled, fn, policy
        owner, code = getattr(fn, "__self__", None), getattr(inspect.unwrap(fn), "__code__", type(fn))
        shared = type(owner) if isinstance(owner, torch.nn.Module) else code
        self._names = _known.setdefault(shared, {}).setdefault(policy, CompiledNames())

    def _look(self, *args: Any, **kwargs: Any) -> Any:
        before, outer = compilations.count_attempts(), current_call.graphs
        current_call.graphs = names = self._names
        try:
            result = self._compiled(*args, **kwargs)
        finally:
            current_call.graphs = outer
        if names.ops and self._policy != Policy():
            warn(self._policy, names, self._fn)
        if names.ops or self._policy == Policy():  # else Dynamo ran it eagerly
            self.run = self._compiled
        if not names.graphs and (why := compilations.failed_since(before)) is not None:
            why = why or "it has no tensor operation"
            log.info("Dynamo made no graph of %s, which runs eagerly under autocast: %s", named(self._fn), why)
        return result


def warn(policy: Policy, seen: CompiledNames, fn: Any) -> None:
    """Warn of each pattern that matches no name in `seen` or in the modules of `fn`, at the user's calling line."""
    names, modules = module_names(fn), [module for root in modules_of(fn) for module in root.modules()]
    classes = {names.get(str(id(module)), ""): type(module).__name__ for module in modules}
    for glob, near in policy.unmatched(set(seen.ops), {*seen.modules, *classes}, classes).items():
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        kind = "op" if glob in dict(policy.ops) else "module"
        warnings.warn(
            f"policy pattern {glob!r} matches no {kind} of the first call.{hint} ampcompile.explain lists the names of "
            "ops and modules.",
            AmpWarning,
            stacklevel=find_user_level(),
        )


def named(fn: Any) -> str:
    """The name of a callable in messages: the class of its module, or its own name."""
    function = inspect.unwrap(fn)
    module = getattr(function, "__self__", function)
    return type(module).__name__ if isinstance(module, torch.nn.Module) else getattr(function, "__qualname__", f"{fn}")


_INSIDE = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], torch.__path__[0]))


def find_user_level() -> int:
    """The `stacklevel`, from the caller's frame, of the innermost frame that is neither ours nor torch's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_code.co_filename.startswith(_INSIDE) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level
