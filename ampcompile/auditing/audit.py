"""Measure how wrong a mixed run is, and where: `ampcompile.audit(f)(*args)`; record it, to compare it with another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ampcompile.dtypes import named
from ampcompile.explaining.explain import Awaiting, check_arguments

if TYPE_CHECKING:
    from .recording import Recording
    from .result import Audit


def audit(
    f: Callable[..., Any],
    *arguments: Any,
    against: torch.dtype | str = torch.float64,
    loss: Callable[[Any], torch.Tensor] | None = None,
    backward: bool = True,
    cumulative: bool = True,
    mode: str | None = None,
    dynamic: bool | None = None,
    **options: Any,
) -> Callable[..., Audit]:
    """Audit one call: `audit(f)(*args, **kwargs)` runs `f` in mixed and in high precision and returns an `Audit`.

    `f`, `mode`, `dynamic` and the options are those of `ampcompile.explain`. `against` is torch.float64 or
    torch.float32. Gradients are those of `loss(result)`, 0-dim; without `loss` of the first scalar that `f` returns,
    else of the mean square of all it returns; `backward=False` leaves them out. With `cumulative=False` there is no
    second run: each op is compared alone, which takes no more memory than the tensors of one op.
    The call really runs; gradients, buffers and random states are restored afterwards. Raises what `f` raises,
    OptionError and AuditError.

    >>> audit = ampcompile.audit(model)(x)
    >>> audit.first_overflow is None, 1e-4 < audit.error < 1e-2
    (True, True)
    """
    check_arguments("ampcompile.audit", f, arguments)
    from .recorder import Settings, make_auditor  # it imports Dynamo, and `import ampcompile` must not

    run = make_auditor(f, Settings(named(against), loss, backward, cumulative), options, mode, dynamic)
    return Awaiting(f, run, "ampcompile.audit")


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
    check_arguments("ampcompile.record", f, arguments)
    from .record_run import make_recorder
    from .recorder import Settings

    run = make_recorder(f, Settings(torch.float64, loss, backward, True, eager), options, mode, dynamic)
    return Awaiting(f, run, "ampcompile.record")
