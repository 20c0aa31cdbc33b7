"""Find the modules that a callable uses, and their paths, which policies and reports use as names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

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
    owner = getattr(f, "__self__", None)
    held: list[Any] = [f, owner]
    if not isinstance(owner, torch.nn.Module):
        held += list(getattr(owner, "__dict__", {}).values())
    plain = inspect.unwrap(getattr(f, "__func__", f)) if callable(f) else f
    held.append(plain)  # Dynamo wraps some modules of torch in a function
    if inspect.isfunction(plain):
        used = inspect.getclosurevars(plain)
        held += [*used.nonlocals.values(), *used.globals.values()]
    return (value for value in held if isinstance(value, torch.nn.Module))
