"""Questions about one call: `ampcompile.explain(f)(*args)`, and `audit` and `record` alike.

The files that answer import Dynamo, which `import ampcompile` must not: they are imported when a question is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ampcompile.dtypes import named
from ampcompile.errors import OptionError
from ampcompile.torch_private import marks

if TYPE_CHECKING:
    from .audit import Audit
    from .call import Subject
    from .recording import Recording
    from .report import Report


@dataclass(frozen=True)
class DeferredCall:
    """The result of `explain(f)`, `audit(f)` and `record(f)`: calling it with the arguments of `f` does the work."""

    f: Callable[..., Any]
    run: Callable[[Any, Any], Any]
    name: str

    @marks.run_untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self.__dataclass_fields__:
            raise AttributeError(name)
        raise AttributeError(f"{self!r}; it has no {name!r} before that")

    def __repr__(self) -> str:
        of = getattr(self.f, "__name__", type(self.f).__name__)
        return f"<{self.name}({of}) waits for a call of {of}: {self.name}({of})(*args, **kwargs) gives the result>"


def check_arguments(name: str, f: Any, arguments: tuple[Any, ...], option: str = "dtype=torch.float16") -> None:
    """Raise OptionError for what can't be called, and for arguments that belong to the call."""
    if not callable(f):
        raise OptionError(f"{name} got {f!r}, expected a module or function: {name}(model)(x).")
    if arguments:
        raise OptionError(
            f"{name} got {1 + len(arguments)} arguments, expected the callable alone, and options by name. Call what "
            f"it returns with the arguments of the call: {name}(model)(x), or {name}(model, {option})(x)."
        )


def _subject(name: str, f: Any, arguments: tuple[Any, ...], *how: Any) -> Subject:
    check_arguments(name, f, arguments)
    from .call import Subject

    return Subject.of(f, *how)


@marks.run_untraced
def explain(
    f: Callable[..., Any], *arguments: Any, mode: str | None = None, dynamic: bool | None = None, **options: Any
) -> Callable[..., Report]:
    """Explain one call: `explain(f)(*args, **kwargs)` runs `f` once and returns a `Report`: casts, ops, what is kept.

    `f` is a module or function, compiled (the options it was compiled with are used) or not. Keywords are options of
    `torch.compile(f, backend="amp", options=...)`, `mode` and `dynamic`; they beat those that `f` was compiled with.
    No code is generated, and what is compiled already stays. The call itself is a real one:
    gradients, buffers and random states are restored afterwards, but an optimizer that steps inside `f` has stepped.
    Raises the errors of `f`, and OptionError.

    >>> report = ampcompile.explain(model, dtype=torch.float16)(x)
    >>> for cast in report.casts:
    ...     print(cast.op, cast.of, cast.sizes, cast.dtypes, *cast.fate)
    aten.linear input 8x64 f32>f16 inserted
    aten.linear weight 4x64 f32>f16 inserted hoisted
    aten.linear bias 4 f32>f16 inserted hoisted
    output activation 8x4 f16>f32 inserted
    """
    subject = _subject("ampcompile.explain", f, arguments, options, mode, dynamic)
    from .explain import explain_call

    return DeferredCall(f, partial(explain_call, subject), "ampcompile.explain")


@marks.run_untraced
def audit(
    f: Callable[..., Any],
    *arguments: Any,
    against: torch.dtype | str = torch.float64,
    loss: Callable[[Any], torch.Tensor] | None = None,
    backward: bool = True,
    cumulative: bool = True,
    loss_scale: float = 1.0,
    mode: str | None = None,
    dynamic: bool | None = None,
    **options: Any,
) -> Callable[..., Audit]:
    """Audit one call: `audit(f)(*args, **kwargs)` runs `f` in mixed and in high precision and returns an `Audit`.

    `f`, `mode`, `dynamic` and the options are those of `ampcompile.explain`. `against` is torch.float64 or
    torch.float32. Gradients are those of `loss(result)`, 0-dim; without `loss` of the first scalar that `f` returns,
    else of the mean square of all it returns; `backward=False` leaves them out. `loss_scale` multiplies that loss, as a
    scaler does. With `cumulative=False` there is no
    second run: each op is compared alone, which takes no more memory than the tensors of one op.
    The call really runs; gradients, buffers and random states are restored afterwards. Raises what `f` raises,
    OptionError and AuditError.

    >>> audit = ampcompile.audit(model)(x)
    >>> audit.first_overflow is None, 1e-4 < audit.error < 1e-2
    (True, True)
    """
    subject = _subject("ampcompile.audit", f, arguments, options, mode, dynamic)
    if named(against) not in (torch.float64, torch.float32):
        raise OptionError(f"audit got against={against!r}: expected torch.float64 or torch.float32.")
    from .audit import audit_call

    settings = {"against": named(against), "loss": loss, "backward": backward, "cumulative": cumulative}
    settings["loss_scale"] = loss_scale
    return DeferredCall(f, partial(audit_call, subject, settings), "ampcompile.audit")


@marks.run_untraced
def record(
    f: Callable[..., Any],
    *arguments: Any,
    eager: bool = False,
    loss: Callable[[Any], torch.Tensor] | None = None,
    backward: bool = True,
    mode: str | None = None,
    dynamic: bool | None = None,
    **options: Any,
) -> Callable[..., Recording]:
    """Record one call: `record(f)(*args, **kwargs)` returns a `Recording` to save, and to `compare` with another.

    The call runs twice: op by op, as `audit` runs it against float64, and as compiled, for the results of the compiled
    call itself. If `f` is compiled and no options are given, that is `f` as it is. `eager`: the ops and results of
    eager autocast instead. The other arguments are those of `audit`; gradients, buffers and random states are restored
    afterwards. Raises what `f` raises, OptionError and AuditError.

    >>> ampcompile.record(model, lower="aot_eager")(x).save("run.json")
    >>> ampcompile.compare("run.json", ampcompile.record(model, eager=True)(x)).agree
    True
    """
    subject = _subject("ampcompile.record", f, arguments, options, mode, dynamic)
    from ampcompile.torch_private.compilations import how_compiled

    from .recording import record_call

    as_given = how_compiled(f) is not None and not options and mode is None
    settings = {"loss": loss, "backward": backward, "eager": eager}
    return DeferredCall(f, partial(record_call, subject, settings, f if as_given else None), "ampcompile.record")
