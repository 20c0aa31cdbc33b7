"""Find the modules that a callable uses, and their paths, which policies and reports use as names.

After its first call, warn of policy patterns that matched nothing, and log if nothing was compiled.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch.fx import GraphModule

from ampcompile.errors import warn_user
from ampcompile.passes.graph import decision_of, graphs, module_path
from ampcompile.policy import Policy
from ampcompile.torch_private import compilations
from ampcompile.torch_private.dispatcher import OpOverload

from .call_state import current_call

# Attributes in which wrappers hold a module: they aren't part of its path.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def module_names(f: Any) -> dict[str, str]:
    """Paths, as in `named_modules`, of the modules that `modules_of(f)` yields and of their submodules.

    The keys are `str(id(module))`: `f` holds the modules, and the names last as long as one look at it or one
    compilation. A module inside two others has its longest path.
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
    """Names of the ops, and paths of the modules, in the graphs compiled or run in some calls; if there were any."""

    ops: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    graphs: bool = False
    quantized: bool = False  # True if a product runs in fp8
    unquantized: set[str] = field(default_factory=set)  # why others don't that a policy asks for

    @classmethod
    def of(cls, gm: GraphModule) -> Self:
        """The names in a captured graph and its bodies."""
        nodes = [node for graph in graphs(gm) for node in graph.graph.nodes if isinstance(node.target, OpOverload)]
        return cls({node.target.name() for node in nodes}, {module_path(node) for node in nodes}, True)

    def add_products(self, gm: GraphModule) -> None:
        """Add what was decided about products that a policy wants in fp8."""
        decisions = [decision_of(node) for graph in graphs(gm) for node in graph.graph.nodes]
        self.quantized |= any(decision.fp8 for decision in decisions)
        self.unquantized |= {decision.unquantized for decision in decisions} - {""}

    def tell(self) -> None:
        """Add these names to those of the current call, if it is a first one."""
        if (seen := current_call.graphs) is not None:
            seen.ops |= self.ops
            seen.modules |= self.modules
            seen.unquantized |= self.unquantized
            seen.graphs, seen.quantized = True, seen.quantized or self.quantized

    def told_by(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a graph's callable that tells these names: Dynamo may have compiled it for another object or call."""

        def tell_and_run(*args: Any) -> Any:
            self.tell()
            return run(*args)

        return tell_and_run


class FirstCalls:
    """Runs a compiled callable, and inspects the graphs that run in its first calls, until the names are known."""

    def __init__(self, compiled: Callable[..., Any], fn: Any, policy: Policy) -> None:
        self.run = self._look
        self._compiled, self._fn, self._policy = compiled, fn, policy

    def _look(self, *args: Any, **kwargs: Any) -> Any:
        before, outer = compilations.count_attempts(), current_call.graphs
        current_call.graphs = names = CompiledNames()
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
    """Warn of patterns that match no name in `seen` or in the modules of `fn`, and of fp8 that no product gets."""
    names, modules = module_names(fn), [module for root in modules_of(fn) for module in root.modules()]
    classes = {names.get(str(id(module)), ""): type(module).__name__ for module in modules}
    for glob, near in policy.unmatched(set(seen.ops), {*seen.modules, *classes}, classes).items():
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        kind = "op" if glob in dict(policy.ops) else "module"
        warn_user(
            f"policy pattern {glob!r} matches no {kind} of the first call.{hint} ampcompile.explain lists the names of "
            "ops and modules."
        )
    if seen.unquantized and not seen.quantized:
        warn_user(
            f"the policy {str(policy)!r} asks for fp8, and no product of the first call gets it: "
            f"{'; '.join(sorted(seen.unquantized))}. They run in 16 bits; ampcompile.explain says of each why."
        )


def named(fn: Any) -> str:
    """The name of a callable in messages: the class of its module, or its own name."""
    function = inspect.unwrap(fn)
    module = getattr(function, "__self__", function)
    return type(module).__name__ if isinstance(module, torch.nn.Module) else getattr(function, "__qualname__", f"{fn}")
