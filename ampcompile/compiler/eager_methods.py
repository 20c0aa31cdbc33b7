"""Warn, once per method, when a method other than `forward` of a compiled module is called and runs eagerly."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ampcompile.errors import AmpWarning
from ampcompile.torch_private import dynamo_caches, optimize_contexts, pytree

from .call_state import current_call
from .unmatched import outside

_warned: WeakKeyDictionary[type, set[str]] = WeakKeyDictionary()


def watch(name: str, method: MethodType) -> MethodType:
    """Wrap a method of a compiled module so that its first call that computes a tensor eagerly warns."""
    module = method.__self__
    warned = _warned.setdefault(type(module), set())
    if name in warned or hasattr(nn.Module, name) or current_call.callable is not None:
        return method
    if dynamo_caches.how_compiled(method) is not None:  # compiled by a decorator in its class
        return method

    function = method.__func__

    @functools.wraps(function)
    def eagerly(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)
        if name not in warned and any(_computed(result, self)):
            warned.add(name)
            _warn(type(self).__name__, name)
        return result

    optimize_contexts.pass_over(eagerly)
    return MethodType(eagerly, module)


def _computed(result: Any, module: nn.Module) -> Iterator[bool]:
    """Yield for each tensor in a result whether it is new, not a parameter or buffer of the module."""
    held = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return (isinstance(leaf, torch.Tensor) and id(leaf) not in held for leaf in pytree.tree_leaves(result))


def _warn(kind: str, name: str) -> None:
    warnings.warn(
        f"found a call of {kind}.{name} on a compiled module, expected one of forward: torch.compile(module, "
        f"backend='amp') compiles nothing else, so {name} ran eagerly, in float32 where no autocast is open. If it "
        "calls self(...), compile in place, by module.compile(backend='amp'); otherwise "
        f"ampcompile.compile_methods(module, {name!r}) compiles it.",
        AmpWarning,
        stacklevel=outside(),
    )
