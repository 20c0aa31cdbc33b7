"""The result of `ampcompile.audit`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import torch

from ampcompile.dtypes import short_name
from ampcompile.errors import AuditError
from ampcompile.policy import Policy

from . import suggest, table
from .records import ModuleNumbers, OpNumbers, Place, group_by_module
from .sensitivities import Sensitivities

if TYPE_CHECKING:
    from .recorder import Call


@dataclass(frozen=True)
class Audit:
    """The numbers of one call and its backward. `str(audit)` is a table that fits the terminal."""

    ops: Sequence[OpNumbers]
    """Every op that computes floating values, in the order in which they ran."""
    outputs: Sequence[float]
    """Relative error of each floating tensor returned, against the exact run. Empty without `cumulative`."""
    gradients: Mapping[str, float]
    """Relative error of the gradient of each parameter, and of each input that requires grad, by name."""
    gradient_error: float | None
    """Relative error of all gradients together; None if there are none."""
    unmeasured: Sequence[str]
    """Ops that don't run in high precision: the exact run continues with the mixed run's numbers after them."""
    against: torch.dtype
    not_finite: Mapping[str, float] = field(default_factory=dict)
    """Share of the elements that are NaN or infinite, by name: of inputs, and in either run of outputs and gradients.

    Only those above 0; in outputs and gradients, infinities that both runs have don't count.
    """
    policy: Policy = Policy()  # noqa: RUF009
    call: Call | None = field(default=None, repr=False, compare=False)
    """The audited callable and its inputs, to run it again."""

    @property
    def modules(self) -> list[ModuleNumbers]:
        """The ops of each module: those that it calls itself."""
        return group_by_module(self.ops)

    @property
    def first_overflow(self) -> Place | None:
        """The first op that made an infinity or NaN out of finite numbers where float32 would not."""
        return next((op for op in self.ops if op.numbers.overflowed), None)

    @property
    def first_not_finite(self) -> Place | None:
        """The first op with NaN in either run, or with an infinity in one alone; its operands may have some already."""
        return next((op for op in self.ops if op.numbers.not_finite or op.numbers.not_finite_exact), None)

    @property
    def first_underflow(self) -> Place | None:
        """The first op that flushed a number to zero that float32 would have kept."""
        return next((op for op in self.ops if op.numbers.flushed), None)

    @property
    def error(self) -> float:
        """The worst of the errors of the outputs and of all gradients together. Raises AuditError if there is none.

        NaN if one of them is NaN.
        """
        errors = [*self.outputs, *([self.gradient_error] if self.gradient_error is not None else [])]
        if not errors:
            raise AuditError(
                "audit has no error of the whole run: it was made with cumulative=False, or the call returned no "
                "floating tensor. Audit with cumulative=True a call that returns what matters."
            )
        return next(filter(math.isnan, errors), max(errors))

    def sensitivities(self) -> Sensitivities:
        """Predict what the roundings of each module add to the errors of outputs and gradients, by kind of op.

        Runs the call once more, in high precision from the mixed run's numbers, and differentiates that run: this
        takes the memory of a run in float64 that keeps the operands of all ops, and the time of several backwards.
        """
        assert self.call is not None
        return self.call.sensitivities()

    def suggest(
        self,
        tolerance: float,
        trials: int = 60,
        progress: Callable[[str], None] | None = None,
        by: Literal["module", "op"] = "module",
    ) -> Policy:
        """Return a policy that keeps few modules in float32 so that `error` is at most `tolerance`, as measured.

        Runs the call once for `sensitivities`, then audits at most `trials` policies: mostly one or two, more where
        predictions fail. `progress` gets a line on each. With `by="op"` one more audit tries to keep only some kinds of
        ops in those modules, as `op softmax@blocks.3=fp32`; where that doesn't do, modules are kept. Raises AuditError
        if everything in float32 doesn't meet the tolerance, and for a tolerance that is no number above 0.
        """
        return suggest.suggest(self, tolerance, trials, progress or (lambda _: None), by)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "against": short_name(self.against),
            "policy": str(self.policy),
            "outputs": list(self.outputs),
            "gradient_error": self.gradient_error,
            "gradients": dict(self.gradients),
            "not_finite": dict(self.not_finite),
            "first_not_finite": self.first_not_finite and _place(self.first_not_finite),
            "first_overflow": self.first_overflow and _place(self.first_overflow),
            "first_underflow": self.first_underflow and _place(self.first_underflow),
            "unmeasured": list(self.unmeasured),
            "modules": [{"module": m.module, "ops": m.ops, **asdict(m.numbers)} for m in self.modules],
            "ops": [{**_place(o), "dtype": short_name(o.dtype), **asdict(o.numbers)} for o in self.ops],
        }

    def __str__(self) -> str:
        return table.render(self)


def _place(op: Place) -> dict[str, Any]:
    return {field.name: getattr(op, field.name) for field in fields(Place)}
