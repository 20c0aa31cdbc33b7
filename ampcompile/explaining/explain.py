"""Explain the casts of a call, with places and reasons: `ampcompile.explain(f)(*args)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampcompile.errors import OptionError

if TYPE_CHECKING:
    from .report import Report


@dataclass(frozen=True)
class Awaiting:
    """The result of `explain(f)` and `audit(f)`: calling it with the arguments of `f` does the work."""

    f: Callable[..., Any]
    run: Callable[..., Any]
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self.__dataclass_fields__:
            raise AttributeError(name)
        raise AttributeError(f"{self!r}; it has no {name!r} before that")

    def __repr__(self) -> str:
        of = getattr(self.f, "__name__", type(self.f).__name__)
        return f"<{self.name}({of}) waits for a call of {of}: {self.name}({of})(*args, **kwargs) gives the result>"


def check_arguments(name: str, f: Any, arguments: tuple[Any, ...], option: str = "dtype=torch.float16") -> None:
    """Raise OptionError if `explain` or one of its kind was given no callable, or the arguments of the call as well."""
    if not callable(f):
        raise OptionError(f"{name} got {f!r}, expected a module or function: {name}(model)(x).")
    if arguments:
        raise OptionError(
            f"{name} got {1 + len(arguments)} arguments, expected the callable alone, and options by name. Call what "
            f"it returns with the arguments of the call: {name}(model)(x), or {name}(model, {option})(x)."
        )


def explain(
    f: Callable[..., Any], *arguments: Any, mode: str | None = None, dynamic: bool | None = None, **options: Any
) -> Callable[..., Report]:
    """Explain one call: `explain(f)(*args, **kwargs)` runs `f` once and returns a `Report` of every cast in it.

    `f` is a module or function, compiled (the options it was compiled with are used) or not. Keywords are options of
    `torch.compile(f, backend="amp", options=...)`, `mode` and `dynamic`; they beat those that `f` was compiled with.
    Nothing is lowered through Inductor, and code that is compiled already stays. The call itself is a real one:
    gradients, buffers and random states are restored afterwards, but an optimizer that steps inside `f` has stepped.
    Raises the errors of `f`, and OptionError.

    >>> report = ampcompile.explain(model, dtype=torch.float16)(x)
    >>> for cast in report.casts:
    ...     print(cast.op, cast.of, cast.sizes, cast.dtypes, *cast.fate)
    aten.linear input 8x64 f32>f16 inserted
    aten.linear weight 4x64 f32>f16 inserted hoisted
    aten.linear weight 4 f32>f16 inserted hoisted
    output activation 8x4 f16>f32 inserted
    """
    check_arguments("ampcompile.explain", f, arguments)
    from .recorder import make_explainer  # it imports Dynamo, and `import ampcompile` must not

    return Awaiting(f, make_explainer(f, options, mode, dynamic), "ampcompile.explain")
