"""What the command line runs: `package.module:factory`, a function that returns a model and its inputs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ampcompile.errors import CommandLineError

_EXPECTED = "expected (model, args) or (model, args, kwargs), where args is a tuple or list and kwargs a dict"


@dataclass(frozen=True)
class Target:
    """A module or function, and the arguments of the call to look at."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load(spelling: str) -> Target:
    """Import and call the factory. Raises CommandLineError; what the factory itself raises goes through."""
    module_name, colon, name = spelling.partition(":")
    if not (module_name and colon and name):
        raise CommandLineError(
            f"found {spelling!r}; expected PACKAGE.MODULE:FACTORY, such as mymodels.gpt:small. Write the name of a "
            "function that takes no arguments after the colon."
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules of the folder that the command runs in
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise CommandLineError(
            f"found no module {error.name!r}; expected one that Python can import. Run the command in the folder that "
            f"holds {module_name.partition('.')[0]}, or set PYTHONPATH to it."
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        functions = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module_name]
        raise CommandLineError(
            f"{module_name} has no function {name!r}; expected one that it defines: {', '.join(functions) or 'none'}."
        )
    return _check(factory(), spelling)


def _check(made: Any, spelling: str) -> Target:
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        size = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise CommandLineError(f"{spelling} returned a {type(made).__name__}{size}; {_EXPECTED}.")
    f, args, kwargs = (*made, {})[:3]
    for value, good, what in (
        (f, callable(f), "model"),
        (args, isinstance(args, tuple | list), "args"),
        (kwargs, isinstance(kwargs, dict), "kwargs"),
    ):
        if not good:
            raise CommandLineError(f"{spelling} returned a {type(value).__name__} as {what}; {_EXPECTED}.")
    return Target(f, tuple(args), kwargs)
