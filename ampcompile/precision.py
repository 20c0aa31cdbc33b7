"""Fix the precision of a part of a program: `ampcompile.precision(dtype)` and `ampcompile.keep_fp32`."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ampcompile.torch_private import pytree

from .dtypes import hint_at_policy, named
from .errors import OptionError
from .passes.analysis.op_traits import computes
from .torch_private import dispatcher, marks
from .torch_private.dispatcher import OpOverload

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# The name that Dynamo of torch 2.15 sees of torch.Tensor's reflected operators, as `2 - x`: that of the inner function
# of their decorator.
_REFLECTED = "wrapped"
_OPERATORS = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder"}  # Python's names that differ
_CONVERSIONS = frozenset({"to", "type", "type_as", "clone", "contiguous", "detach", "float", "double", "half"})


class precision(TorchFunctionMode):
    """Run what is inside in `dtype`: float32, bfloat16 or float16; in eager mode and under `torch.compile` alike.

    As a decorator of a function, a module class or a module object: inputs that arrive in another floating dtype are
    converted, nested in tuples, lists and dicts too; integer, bool, complex and 8-bit tensors are untouched. float32
    means no autocast inside. A 16-bit dtype means autocast with that dtype: ops that autocast keeps in float32 stay in
    float32. A class is subclassed, so an imported one is not changed: `RoIPool32 = keep_fp32(RoIPool)`. An object is
    changed in place and returned; its parameters and buffers keep their dtype.

    As a context manager, `with precision(torch.float32):`, it acts on each op inside, and converts operands only for
    float32. Decorators cost less. Where two such blocks are nested, or a decorated function is called in one, the
    outer block wins.

    `dtype` may be a name, as "fp32". Raises OptionError for other dtypes and for targets that can't be decorated.

    >>> @ampcompile.keep_fp32  # or @ampcompile.precision(torch.float32)
    ... def energy(x):
    ...     return x @ x.mT
    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     print((x @ x.mT).dtype, energy(x).dtype)
    torch.bfloat16 torch.float32
    >>> with ampcompile.precision(torch.float16):
    ...     print((x @ x.mT).dtype)
    torch.float16
    """

    def __init__(self, dtype: torch.dtype | str) -> None:
        super().__init__()
        self.dtype = named(dtype)
        if self.dtype not in _FLOATS[:3]:
            raise OptionError(
                f"precision got {dtype!r}; expected torch.float32, torch.bfloat16 or torch.float16."
                + hint_at_policy(dtype)
            )

    def __call__(self, target: Any) -> Any:
        """Decorate a function, a module class or a module object."""
        if isinstance(target, type) and issubclass(target, torch.nn.Module):
            # Untraced, which would load Dynamo where nothing is compiled.
            subclass_with = _untraced_subclass_with if torch.compiler.is_compiling() else _subclass_with
            return subclass_with(target, self, self._function(target.forward))
        if isinstance(target, torch.nn.Module):
            return self._module(target)
        if isinstance(target, type) or not callable(target) or _runs_later(target):
            raise OptionError(
                f"precision can't decorate {target!r}; expected a function, a torch.nn.Module or a class of modules. "
                "The body of a generator or coroutine runs after the call returns: decorate what it calls."
            )
        return self._function(target)

    def _module(self, module: torch.nn.Module) -> torch.nn.Module:
        if "forward" in vars(module):  # compiled, or patched by another library
            module.forward = self._function(module.forward)
        else:
            module.__class__ = self(type(module))
        return module

    def _function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        dtype = self.dtype

        @functools.wraps(function)
        def in_precision(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _converted((args, kwargs), dtype)
            with _region(_device_type((args, kwargs)), dtype):
                return function(*args, **kwargs)

        return in_precision

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _computes(func.__name__) or "out" in kwargs:
            return func(*args, **kwargs)
        if self.dtype == torch.float32:
            args, kwargs = _converted((args, kwargs), self.dtype)
        with _region(_device_type((args, kwargs)), self.dtype):
            return func(*args, **kwargs)

    def __repr__(self) -> str:
        return f"ampcompile.precision({self.dtype})"


def _region(device_type: str, dtype: torch.dtype) -> torch.autocast:
    if dtype == torch.float32:
        return torch.autocast(device_type, enabled=False)
    return torch.autocast(device_type, dtype=dtype)


def _converted(arguments: Any, dtype: torch.dtype) -> Any:
    def convert(value: Any) -> Any:
        arrives = isinstance(value, torch.Tensor) and value.dtype in _FLOATS
        return value.to(dtype) if arrives and value.dtype != dtype else value

    return pytree.tree_map(convert, arguments)


def _device_type(arguments: Any) -> str:
    for value in pytree.tree_leaves(arguments):
        if isinstance(value, torch.Tensor):
            return "cpu" if value.is_meta else value.device.type  # no autocast acts on meta tensors
        if isinstance(value, torch.nn.Module):  # `self` of a method that gets no tensor
            for parameter in value.parameters():
                return "cpu" if parameter.is_meta else parameter.device.type
    return "cpu"


def _runs_later(function: Any) -> bool:
    kinds = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
    return any(is_kind(function) for is_kind in kinds)


@functools.cache
def _computing() -> frozenset[str]:
    """Names of the torch functions that compute something; without conversions and names ending in an underscore."""
    names = {name for name in torch.nn.functional.__dict__ if name.islower() and not name.startswith("_")}
    names |= {name for name in torch.functional.__all__ if not name.startswith("_")}
    for name in dispatcher.all_op_names():
        if name.startswith("aten::"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if isinstance(op, OpOverload) and computes(op):
                names.add(packet)
    return frozenset(name for name in names - _CONVERSIONS if not name.endswith("_")) | {_REFLECTED}


def _computes(name: str) -> bool:
    """Return True if a function of this name computes from its operands: `exp`, `linear`, `__matmul__`, `__radd__`."""
    if name.startswith("__") and name.endswith("__"):
        plain = name.strip("_")
        spellings = {plain, plain.removeprefix("r")}
        return not plain.startswith("i") and any(_OPERATORS.get(s, s) in _computing() for s in spellings)
    return name in _computing()


marks.mark_constant(_computes)


def _subclass_with(cls: type, decorator: Callable[[Any], Any], forward: Callable[..., Any]) -> type:
    """Return a subclass of `cls` with the same name. Unpickling makes it again by `decorator(cls)`.

    A class whose methods call `super(Name, self)` and whose name is about to be bound to the result, as by `@`, is
    changed in place: `super` would call these same methods again.
    """
    if _would_find_itself(cls):
        cls.forward = forward  # type: ignore[attr-defined]
        return cls

    def reduce(self: Any, protocol: Any) -> Any:
        if type(self) is subclass and _named_by(subclass) is not subclass:  # the name still refers to the wrapped class
            return _remake, (decorator, cls), self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return super(subclass, self).__reduce_ex__(protocol)

    members = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    subclass: Any = type(cls)(cls.__name__, (cls,), members)
    return subclass


_untraced_subclass_with = marks.run_untraced(_subclass_with)


def _remake(decorator: Callable[[Any], Any], cls: type) -> torch.nn.Module:
    subclass = decorator(cls)
    return subclass.__new__(subclass)


def _named_by(cls: type) -> Any:
    value: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        value = getattr(value, part, None)
    return value


def _would_find_itself(cls: type) -> bool:
    for function in filter(inspect.isfunction, vars(cls).values()):
        code = function.__code__
        if "super" in code.co_names and cls.__name__ in code.co_names + code.co_freevars:
            bound = inspect.getclosurevars(function)
            if {**bound.globals, **bound.nonlocals}.get(cls.__name__) is not cls:
                return True
    return False


keep_fp32 = precision(torch.float32)
