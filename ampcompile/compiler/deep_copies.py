"""Compile deep copies of modules that were compiled in place; warn once that pickles aren't compiled.

torch drops the result of `module.compile` from copies and pickles. The model of an EMA, or one that is loaded again,
would silently run in another precision.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from ampcompile.errors import AmpWarning
from ampcompile.torch_private import dynamo_caches

from .unmatched import outside

_KEY = "_amp_compiled"


class CompiledInPlace:
    """A marker in the `__dict__` of a module, beside the compiled call that `module.compile` stores there.

    `copy` and `pickle` process it like any attribute. In a pickle it is `False`, which loads without ampcompile.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any]) -> None:
        self._module, self._compiled = weakref.ref(module), weakref.ref(compiled)

    def _in_use(self) -> nn.Module | None:
        """The module, unless it was compiled again since."""
        module, compiled = self._module(), self._compiled()
        return (
            module if module is not None and compiled is not None and module._compiled_call_impl is compiled else None
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledInPlace | None:
        module, compiled = self._in_use(), self._compiled()
        copied = memo.get(id(module))
        if module is None or compiled is None or copied is None:
            return None
        compiled_copy = dynamo_caches.compile_alike(compiled, copied._call_impl)  # which stores a marker in the copy
        vars(copied)["_compiled_call_impl"] = compiled_copy
        return vars(copied)[_KEY]

    def __reduce__(self) -> tuple[Any, ...]:
        if (module := self._in_use()) is not None:
            warn_of_pickle(type(module).__name__, "module.compile(backend='amp')")
        return bool, ()


def note(fn: Any, compiled: Callable[..., Any]) -> None:
    """Store a marker in a module that `module.compile` compiled; `fn` is the callable given to torch.compile."""
    module = getattr(fn, "__self__", None)
    if isinstance(module, nn.Module) and getattr(fn, "__name__", "") == "_call_impl":
        vars(module)[_KEY] = CompiledInPlace(module, compiled)


@functools.cache
def warn_of_pickle(kind: str, by: str) -> None:
    """Warn once per class that an unpickled module isn't compiled."""
    warnings.warn(
        f"found a pickle of {kind}, compiled in place; what is loaded of it isn't compiled, and runs in float32. "
        f"Compile what was loaded, by {by}, or save module.state_dict().",
        AmpWarning,
        stacklevel=outside(),
    )
