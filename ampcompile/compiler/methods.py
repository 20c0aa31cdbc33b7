"""Compile single methods other than `forward`, which torch.compile and `module.compile` don't compile."""

import difflib
import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from ampcompile.errors import OptionError
from ampcompile.torch_private import compilations, marks

from .ambient import options_of


class CompiledMethod:
    """A compiled method, stored in the `__dict__` of its module; a copy or pickle of that has its class's method."""

    def __init__(self, method: MethodType, name: str, compiled: Callable[..., Any]) -> None:
        functools.update_wrapper(self, compiled)
        self.__self__, self._name, self._compiled = method.__self__, name, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.__self__, self._name)


@marks.run_untraced
def compile_methods(module: nn.Module, *names: str, **options: Any) -> None:
    """Compile methods of a module in place, as `module.compile(backend="amp")` compiles its `forward`.

    `options` are those of `torch.compile(..., backend="amp", options=...)`, by name; they beat the options with which
    the module is compiled, by `torch.compile` or `module.compile`. Only this object changes: the names in its state
    dict stay. A deep copy and a pickle have the methods uncompiled, as with `module.compile`; a shallow copy calls this
    object's. `del module.decode` undoes it. A method that only calls `self(...)` needs none of
    this: `module.compile(backend="amp")` compiles what it calls.
    Raises OptionError for a name that isn't a method of the module's own class, for one that is compiled, and for an
    unknown option; nothing is compiled then.

    >>> class Autoencoder(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.encoder, self.decoder = nn.Linear(64, 4), nn.Linear(4, 64)
    ...
    ...     def decode(self, z):
    ...         return self.decoder(z)
    ...
    ...     def forward(self, x):
    ...         return self.decode(self.encoder(x))
    >>> model = Autoencoder()
    >>> compiled = torch.compile(model, backend="amp")  # compiles forward, and what it calls
    >>> ampcompile.compile_methods(model, "decode")
    >>> torch.equal(model.decode(x[:, :4]), torch.compile(model.decoder, backend="amp")(x[:, :4]))
    True
    """
    module, base = _as_compiled(module)
    if not names:
        raise OptionError("found no name of a method, expected some: compile_methods(module, 'decode').")
    methods = {name: _method(module, name) for name in names}
    compiled = {
        name: torch.compile(method, backend="amp", options={**base, **options}) for name, method in methods.items()
    }
    for name, method in methods.items():
        setattr(module, name, CompiledMethod(method, name, compiled[name]))


def _as_compiled(module: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The original module of a result of torch.compile, and the options it was compiled with for our backend."""
    if isinstance(module, type):
        raise OptionError(
            f"found the class {module.__name__}, expected a module made of it. For all of them decorate the method in "
            "the class, by @torch.compile(backend='amp')."
        )
    if not isinstance(module, nn.Module):
        raise OptionError(
            f"found {type(module).__name__!r}, expected a torch.nn.Module. Compile what is bound to other objects by "
            "object.method = torch.compile(object.method, backend='amp')."
        )
    how = compilations.how_compiled(module)
    if how is None:
        return module, {}
    if options_of(how.backend) is None:
        return how.original, {}
    options = {"dynamic": how.dynamic, **getattr(how.backend, "kwargs", {})}
    return how.original, options.pop("options", {}) | options


def _method(module: nn.Module, name: str) -> MethodType:
    """The method of that name. Raises OptionError if there is none to compile."""
    kind, of = type(module), f"{name!r} of {type(module).__name__}"
    if name in ("forward", "__call__"):
        raise OptionError(f"found {of}, expected another method: module.compile(backend='amp') compiles forward.")
    if not isinstance(name, str) or not hasattr(module, name):
        near = difflib.get_close_matches(str(name), dir(kind), n=3)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise OptionError(f"found {name!r}, expected the name of a method of {kind.__name__}.{hint}")
    method = getattr(module, name)
    if compilations.how_compiled(method) is not None:
        raise OptionError(
            f"found {of} compiled already, expected it as its class defines it: `del module.{name}` undoes "
            "compile_methods."
        )
    its_own = inspect.ismethod(method) and method.__self__ is module and method.__func__ is getattr(kind, name, 0)
    if not its_own or hasattr(nn.Module, name):
        raise OptionError(
            f"found {of}, a {type(method).__name__}; expected a method that the class defines for its objects. Compile "
            f"modules by module.{name}.compile(backend='amp'), functions by torch.compile(function, backend='amp')."
        )
    return method
