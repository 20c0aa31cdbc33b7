"""Deep copies of what was compiled in place are compiled alike; pickles aren't, and say so once.

torch drops what `module.compile` made from copies and pickles. With it would go the precision: of an EMA's model, or
of one that is loaded again.
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
    """Stands in the `__dict__` of a module beside the compiled call that `module.compile` leaves there.

    `copy` and `pickle` meet it among what the module holds. In a pickle it is `False`, which loads without ampcompile.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any]) -> None:
        self._module, self._compiled = weakref.ref(module), weakref.ref(compiled)

    def _in_use(self) -> nn.Module | None:
        """The module, unless it was compiled otherwise since."""
        module, compiled = self._module(), self._compiled()
        return (
            module if module is not None and compiled is not None and module._compiled_call_impl is compiled else None
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledInPlace | None:
        module, compiled = self._in_use(), self._compiled()
        copied = memo.get(id(module))
        if module is None or compiled is None or copied is None:
            return None
        again = dynamo_caches.compile_alike(compiled, copied._call_impl)  # which notes itself in the copy
        vars(copied)["_compiled_call_impl"] = again
        return vars(copied)[_KEY]

    def __reduce__(self) -> tuple[Any, ...]:
        if (module := self._in_use()) is not None:
            warn_of_pickle(type(module).__name__, "module.compile(backend='amp')")
        return bool, ()


def note(fn: Any, compiled: Callable[..., Any]) -> None:
    """Note in a module what `module.compile` makes of it; `fn` is what torch.compile was given."""
    module = getattr(fn, "__self__", None)
    if isinstance(module, nn.Module) and getattr(fn, "__name__", "") == "_call_impl":
        vars(module)[_KEY] = CompiledInPlace(module, compiled)


@functools.cache
def warn_of_pickle(kind: str, by: str) -> None:
    """Warn once that what is unpickled of a module of this class isn't compiled."""
    warnings.warn(
        f"found a pickle of {kind}, compiled in place; what is loaded of it isn't compiled, and runs in float32. "
        f"Compile what was loaded, by {by}, or save module.state_dict().",
        AmpWarning,
        stacklevel=outside(),
    )
