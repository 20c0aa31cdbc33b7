"""The target of a command: `package.module:factory` or `file.py:factory`, which returns a model and its inputs."""

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from ampcompile.errors import OptionError, first_line
from ampcompile.insight.call import preserve_state

_RETURNED = "(model, args) or (model, args, kwargs), where args is a tuple or list and kwargs a dict"
_EXPECTED = f"expected {_RETURNED}"


@dataclass(frozen=True)
class Target:
    """A module or function, and the arguments of the call to examine."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: Callable[[Callable[[], Any]], Any] = lambda run: run()
    """Calls a function from a frame that stands where the factory is defined: warnings then name the user's file."""


def load(spelling: str) -> Target:
    """Call the factory, whose errors propagate, and its model once. Raises OptionError, also if that raises."""
    place, colon, name = spelling.rpartition(":")
    if not (place and colon and name):
        raise OptionError(
            f"found {spelling!r}; expected PACKAGE.MODULE:FACTORY or FILE.py:FACTORY, such as mymodels.gpt:small. "
            "Write the name of a function that takes no arguments after the colon."
        )
    folder, module_name = _of_file(Path(place)) if place.endswith(".py") else ("", place)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # "": modules of the folder that the command runs in
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise OptionError(
            f"found no module {error.name!r}; expected one that Python can import. Run the command in the folder that "
            f"holds {module_name.partition('.')[0]}, or set PYTHONPATH to it."
        ) from error
    factory = getattr(module, name, None)
    if isinstance(factory, torch.nn.Module):
        raise OptionError(
            f"{spelling} is a {type(factory).__name__}; expected a function without arguments that returns {_RETURNED}."
        )
    if not callable(factory):
        functions = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module_name]
        raise OptionError(
            f"{module_name} has no function {name!r}; expected one that it defines: {', '.join(functions) or 'none'}."
        )
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise OptionError(
            f"{spelling} can't be called without arguments ({error}); expected a function that takes none. Write one "
            "that calls it with the arguments you want."
        ) from error
    target = _check(factory(), spelling)
    _call_once(target, spelling)
    code = getattr(inspect.unwrap(factory), "__code__", None)
    origin: dict[str, Any] = {"co_filename": module.__file__ or ""}
    if code is not None:
        origin = {"co_filename": code.co_filename, "co_firstlineno": code.co_firstlineno}
    return replace(target, call=FunctionType(Target.call.__code__.replace(**origin), {}))


def _of_file(path: Path) -> tuple[str, str]:
    """The folder from which to import a file, and its module's name there, with the packages that contain it."""
    if not path.is_file():
        raise OptionError(f"found no file {path}; expected a Python file. Write its path from the current folder.")
    folder, names = path.resolve().parent, [path.stem]
    while (folder / "__init__.py").is_file():
        folder, names = folder.parent, [folder.name, *names]
    return str(folder), ".".join(names)


def _call_once(target: Target, spelling: str) -> None:
    """Call the model once without ampcompile, so that errors in the arguments are reported first."""
    try:
        with preserve_state(target.f, target.args, target.kwargs), torch.no_grad():
            target.f(*target.args, **target.kwargs)
    except Exception as error:  # a model may raise any error
        reason = first_line(error).rstrip(".")
        raise OptionError(
            f"{spelling} returned a model that raises {type(error).__name__} when it is called: {reason}. Expected one "
            "that takes the args and kwargs that come with it; call it in Python to see where it raises."
        ) from error


def _check(made: Any, spelling: str) -> Target:
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        size = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise OptionError(f"{spelling} returned a {type(made).__name__}{size}; {_EXPECTED}.")
    f, args, kwargs = (*made, {})[:3]
    for value, good, what in (
        (f, callable(f), "model"),
        (args, isinstance(args, tuple | list), "args"),
        (kwargs, isinstance(kwargs, dict), "kwargs"),
    ):
        if not good:
            raise OptionError(f"{spelling} returned a {type(value).__name__} as {what}; {_EXPECTED}.")
    return Target(f, tuple(args), kwargs)
