"""Find the modules that a callable uses, and their paths, which policies and reports use as names.

After its first call, warn of policy patterns that matched nothing, and log if nothing was compiled. After any call,
warn if the policy is about a part that Dynamo ran eagerly, where only autocast acts.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch.fx import GraphModule

from ampcompile.errors import warn_user
from ampcompile.passes.graph import decision_of, graphs, module_path
from ampcompile.policy import Policy
from ampcompile.torch_private import compilations, dynamo, optimizers, tracing
from ampcompile.torch_private.dispatcher import OpOverload

from . import current_call


def module_names(f: Any) -> dict[str, str]:
    """Paths, as in `named_modules`, of the modules that `modules_of(f)` yields and of their submodules.

    The keys are `str(id(module))`: `f` holds the modules, and the names last as long as one look at it or one
    compilation. A module inside two others has its longest path.
    """
    names: dict[str, str] = {}
    for root in modules_of(f):
        inner = root.module if isinstance(root, torch.nn.parallel.DistributedDataParallel) else root
        for path, module in inner.named_modules():
            path = optimizers.plain_name(path)
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
    """Names of the ops, and paths of the modules, in one graph, or in those compiled or run in a call."""

    ops: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    left: bool = False  # True if a graph is left to autocast, which says so itself
    quantized: bool = False  # True if a product runs in fp8
    unquantized: set[str] = field(default_factory=set)  # why products that a policy wants in fp8 don't

    @classmethod
    def of(cls, gm: GraphModule) -> Self:
        """The names in a captured graph and its bodies."""
        nodes = [node for graph in graphs(gm) for node in graph.graph.nodes if isinstance(node.target, OpOverload)]
        return cls({node.target.name() for node in nodes}, {module_path(node) for node in nodes})

    @classmethod
    def together(cls, told: Iterable[Self]) -> Self:
        """All names of some graphs."""
        names = cls()
        for graph in told:
            names.ops |= graph.ops
            names.modules |= graph.modules
            names.unquantized |= graph.unquantized
            names.quantized, names.left = names.quantized or graph.quantized, names.left or graph.left
        return names

    def add_products(self, gm: GraphModule) -> None:
        """Add what was decided about products that a policy wants in fp8."""
        decisions = [decision_of(node) for graph in graphs(gm) for node in graph.graph.nodes]
        self.quantized |= any(decision.fp8 for decision in decisions)
        self.unquantized |= {decision.unquantized for decision in decisions} - {""}

    def tell(self) -> None:
        """Tell these names to the current call, if it asks."""
        if current_call.graphs is not None:
            current_call.graphs.append(self)

    def told_by(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a graph's callable that tells these names: Dynamo may have compiled it for another object or call."""

        def tell_and_run(*args: Any) -> Any:
            self.tell()
            return run(*args)

        return tell_and_run


class Calls:
    """Runs a compiled callable, and looks at the graphs that run: in the first call, under a policy in all."""

    def __init__(self, compiled: Callable[..., Any], fn: Any, policy: Policy) -> None:
        self.run = self._look
        self._compiled, self._fn, self._policy = compiled, fn, policy
        self._matched = False  # True once patterns have been looked for among the names
        self._eager: set[str] = set()  # what has been told to run eagerly

    def _look(self, *args: Any, **kwargs: Any) -> Any:
        first = not self._matched
        before = compilations.count_attempts() if first else None
        stops = compilations.count_stops()
        result, told = _listen(self._compiled, args, kwargs)
        stopped = compilations.count_stops() > stops
        if first or stopped:
            self._compare(CompiledNames.together(told), bool(told), before, stopped)
        return result

    def run_uncompiled(self, *args: Any, **kwargs: Any) -> Any:
        """Run it where Dynamo compiles nothing, as under a transform or mode of the caller's."""
        if self._policy == Policy():
            return dynamo.run_uncompiled(self._fn, *args, **kwargs)
        result, told = _listen(dynamo.run_uncompiled, (self._fn, *args), kwargs)
        names = CompiledNames.together(told)
        if not names.left and not tracing.fakes_only():
            self._warn_of_eager(names, bool(told))
        return result

    def _compare(self, names: CompiledNames, ran: bool, before: Any, stopped: bool) -> None:
        why = "" if before is None else compilations.failed_since(before)
        if before is not None and not ran and why is not None:
            reason = why or "it has no tensor operation"
            log.info("Dynamo made no graph of %s, which runs eagerly under autocast: %s", named(self._fn), reason)
        if self._policy == Policy():
            self.run = self._compiled
            return
        if not names.left and (stopped or why is None):  # None: nothing was tried now, so graph breaks don't show
            self._warn_of_eager(names, ran, broken=stopped)
        if names.ops and not self._matched:
            self._matched = True
            warn(self._policy, names, self._fn, self._eager)

    def _warn_of_eager(self, names: CompiledNames, ran: bool, broken: bool = True) -> None:
        """Warn, once of each, of modules in none of the graphs that ran, and of ops that such modules may have run.

        Of ops only where a graph is known to be broken: a module may be one that isn't called.
        """
        unseen = {path: kind for path, kind in _owners(self._fn, names).items() if path not in names.modules}
        named_ones = (path for path in unseen if self._policy.of_module(path) != "default")
        eager = [f"{path or '*'} ({unseen[path]})" for path in named_ones]
        if (unseen and broken) or not ran:
            eager += [f"op {glob}" for glob, value in self._policy.ops if value != "default"]
        if not ran and not eager:
            eager = [f"module {glob}" for glob, value in self._policy.modules if value != "default"]
        if new := [each for each in eager if each not in self._eager]:
            self._eager |= set(new)
            warn_user(
                f"{named(self._fn)} runs in part eagerly, where autocast's rules hold and the policy isn't followed: "
                f"{', '.join(new)}. TORCH_LOGS=graph_breaks says why Dynamo doesn't compile it. Put "
                "ampcompile.precision on modules that are to run in another dtype; it acts in eager code too."
            )


def _listen(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[CompiledNames]]:
    """Run a call; return its result, and the names in graphs that are compiled or run in it."""
    outer, told = current_call.graphs, list[CompiledNames]()
    current_call.graphs = told
    try:
        return run(*args, **kwargs), told
    finally:
        current_call.graphs = outer


def _owners(fn: Any, names: CompiledNames) -> dict[str, str]:
    """Paths and classes of the modules with parameters of their own, whose ops are in graphs if these are compiled.

    Not those inside a layer of torch that has ops of its own: it calls none of them, and reads their parameters itself.
    """
    paths, owners = module_names(fn), {}
    for root in modules_of(fn):
        for module in root.modules():
            parent = paths.get(str(id(module)), "")
            for name, child in module.named_children():
                read = type(module).__module__.startswith("torch.nn.") and parent in names.modules
                if child._parameters and not read:
                    owners[paths.get(str(id(child)), name)] = type(child).__name__
        if root._parameters:
            owners[paths.get(str(id(root)), "")] = type(root).__name__
    return owners


def warn(policy: Policy, seen: CompiledNames, fn: Any, told: frozenset[str] | set[str] = frozenset()) -> None:
    """Warn of patterns that match no name in `seen` or in the modules of `fn`, and of fp8 that no product gets.

    Warn, too, of patterns that match only modules without an op in `seen`, unless one of these modules is in `told`.
    """
    names, modules = module_names(fn), [module for root in modules_of(fn) for module in root.modules()]
    classes = {names.get(str(id(module)), ""): type(module).__name__ for module in modules}
    for glob, near in policy.unmatched(set(seen.ops), {*seen.modules, *classes}, classes).items():
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        kind = "op" if glob in dict(policy.ops) else "module"
        warn_user(
            f"policy pattern {glob!r} matches no {kind} of the first call.{hint} ampcompile.explain lists the names of "
            "ops and modules."
        )
    owners = {} if seen.left else _owners(fn, CompiledNames())
    for glob, unread in policy.unread(seen.modules, owners).items():
        matched = [f"{path} ({owners[path]})" for path in unread]
        if told.isdisjoint(matched):
            warn_user(
                f"policy pattern {glob!r} matches {', '.join(matched[:3])}, and no graph of the first call has an "
                "operation of it: its forward isn't called, or runs eagerly. The module whose forward reads its "
                "weights, as its parent may, decides in which dtype."
            )
    if seen.unquantized and not seen.quantized:
        warn_user(
            f"the policy {str(policy)!r} asks for fp8, and no product of the first call gets it: "
            f"{'; '.join(sorted(seen.unquantized))}. They run in 16 bits; ampcompile.explain says of each why."
        )


def warn_of_saved(saved: Policy, fn: Any) -> None:
    """Warn of patterns of the option `saved` that match none of the modules of `fn`, if it has any."""
    paths = [*module_names(fn).values()]
    for glob, near in saved.unmatched((), paths).items() if paths else ():
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        warn_user(f"pattern {glob!r} of the option saved matches no module.{hint}")


def module_of(fn: Any) -> torch.nn.Module | None:
    """The module that `fn`, as torch.compile hands it to Dynamo, calls or is a method of; None for functions."""
    function = inspect.unwrap(fn)
    module = getattr(function, "__self__", function)
    return module if isinstance(module, torch.nn.Module) else None


def named(fn: Any) -> str:
    """The name of a callable in messages: the class of its module, or its own name."""
    module = module_of(fn)
    return getattr(inspect.unwrap(fn), "__qualname__", f"{fn}") if module is None else type(module).__name__
