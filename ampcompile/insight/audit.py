"""The result of `ampcompile.audit`: errors by op and module, the first overflow, and what to keep in float32."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, overload

import torch
from rich.table import Table

from ampcompile.dtypes import FP8, short_name
from ampcompile.errors import AuditError
from ampcompile.policy import Policy
from ampcompile.records.graphs import Numbers, OpRecord, SavedRecord, plain

from .call import MeasuredCall, Subject
from .exact import combine, find_not_finite, ratio, relative_error, squares
from .run import Session
from .search import Trials, keep_in_float32, quantize, save_in_8_bits
from .show import error_text, human_bytes, show_progress, table, text_of

MODULES, OPS, NAMES = 40, 10, 3  # most rows of the tables of modules and of ops, and most names in a line


@dataclass(frozen=True)
class Audit:
    """The numbers of one call and its backward. `str(audit)` is a table that fits the terminal."""

    ops: Sequence[OpRecord]
    """Every op that computes floating values, in the order in which they ran, with its `numbers`."""
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
    saved: Sequence[SavedRecord] = ()
    """With the option `saved`: the values that backward keeps, with their errors."""
    policy: Policy = field(default_factory=Policy)
    call: MeasuredCall | None = field(default=None, repr=False, compare=False)
    """The audited callable and its inputs, to run it again."""

    @property
    def modules(self) -> dict[str, Numbers]:
        """The measurements of the ops that each module calls itself: the worst errors, shares of all elements.

        By path, in the order in which modules ran first.
        """
        groups: dict[str, list[Numbers]] = {}
        for op in self.ops:
            groups.setdefault(op.module, []).append(op.numbers)
        return {module: combine(parts) for module, parts in groups.items()}

    @property
    def first_overflow(self) -> OpRecord | None:
        """The first op that made an infinity or NaN out of finite numbers where float32 would not."""
        return next((op for op in self.ops if op.numbers.overflowed), None)

    @property
    def first_not_finite(self) -> OpRecord | None:
        """The first op with NaN in either run, or with an infinity in one alone; its operands may have some already."""
        return next((op for op in self.ops if op.numbers.not_finite), None)

    @property
    def first_underflow(self) -> OpRecord | None:
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

    @overload
    def suggest(  # type: ignore[overload-overlap]
        self,
        tolerance: float,
        trials: int = 60,
        progress: Callable[[str], None] | None = None,
        *,
        allow: Literal["saved"],
    ) -> dict[str, str | None]: ...

    @overload
    def suggest(
        self,
        tolerance: float,
        trials: int = 60,
        progress: Callable[[str], None] | None = None,
        allow: str | None = None,
    ) -> Policy: ...

    def suggest(
        self,
        tolerance: float,
        trials: int = 60,
        progress: Callable[[str], None] | None = None,
        allow: str | None = None,
    ) -> Policy | dict[str, str | None]:
        """Return a policy that keeps few modules in float32 so that `error` is at most `tolerance`, as measured.

        Audits at most `trials` policies: first everything in float32, then without the modules that aren't needed,
        halves of them first, then quarters, at last single modules. With `allow="fp8"` it then quantizes as many
        modules with linear products as the tolerance admits, those with large weights first; heads stay as they are.
        Other recipes are allowed in the same way. `allow="saved"` keeps the audited policy, and returns the dict for
        the option `saved`: the modules whose values may be kept for backward in 8 bits, as many bytes as the tolerance
        admits. `progress` gets a line on each; without it, a terminal shows
        the latest. A last line, else on stderr, says if the policy stays as it is. Raises AuditError if everything in
        float32, or with `allow="saved"` nothing in 8 bits, doesn't meet the tolerance, and for a tolerance that is no
        number above 0.
        """
        if not (isinstance(tolerance, int | float) and 0 < tolerance < math.inf and trials >= 1):
            raise AuditError(
                f"found suggest(tolerance={tolerance!r}, trials={trials!r}); expected a relative error above 0, such "
                "as 1e-2, and at least one trial."
            )
        if allow not in (None, "saved", *FP8):
            names = ", ".join(map(repr, (*FP8, "saved")))
            raise AuditError(
                f"found suggest(allow={allow!r}); expected one of {names}, or None for 16 bits and float32 alone."
            )
        if math.isnan(self.error):
            raise AuditError(
                "found outputs or gradients in which no number is finite in both runs; expected some to compare. "
                "audit.not_finite and audit.first_not_finite say where that begins: mend the model or its inputs there."
            )
        with nullcontext(progress) if progress is not None else show_progress("searching") as say:
            if allow == "saved":
                assert self.call is not None
                kept = {self.call.subject.options.saved: self.error}
                chosen = save_in_8_bits(Trials(partial(self._run_with, "saved"), kept, tolerance, trials, say))
                return {glob: None if how == "default" else how for glob, how in chosen.modules}
            audits = Trials(partial(self._run_with, "policy"), {self.policy: self.error}, tolerance, trials, say)
            policy = self.policy if self.error <= tolerance else keep_in_float32(audits, self.policy, self.modules)
            policy = policy if allow is None else quantize(audits, policy, allow)
        if policy == self.policy:
            stays = f"the audited policy stays as it is: its error of {self.error:.2g} is within {tolerance:.2g}"
            words = stays + f", and no module was added in {allow}" * (allow is not None)
            progress(words) if progress is not None else print(words, file=sys.stderr)
        return policy

    def _run_with(self, option: str, value: Policy, local: bool) -> tuple[float, Sequence[Any]]:
        assert self.call is not None
        audit = measure_call(self.call.with_options(**{option: value}), local)
        return audit.error, audit.ops if option == "policy" else audit.saved

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        derived = ("modules", "first_not_finite", "first_overflow", "first_underflow")
        return plain(self) | {name: plain(getattr(self, name)) for name in derived} | {"policy": str(self.policy)}

    def __str__(self) -> str:
        return text_of(self._parts())

    def _parts(self) -> list[str | Table]:
        """The lines and tables of the text: the whole run, the first overflow, modules, the worst ops."""
        lost, modules = [op for op in self.ops if op.numbers.not_finite], self.modules
        columns = ["alone", "from start", "largest", "overflow", "to zero", *(["not finite"] if lost else [])]
        worst = sorted(modules, key=lambda module: modules[module].badness, reverse=True)[:MODULES]
        title = "module" if len(worst) == len(modules) else f"module (the worst {len(worst)} of {len(modules)})"
        # Below the first of `lost`: NaN in all that follow may come from there.
        ops = sorted(self.ops, key=lambda op: (op in lost[:1], op.numbers.badness), reverse=True)[:OPS]

        count = len(columns)
        rows = [(m or "(none)", str(modules[m].ops), *_cells(modules[m], count)) for m in modules if m in worst]
        op_rows = [(op.title, op.module or "(none)", op.line, op.in_dtype, *_cells(op.numbers, count)) for op in ops]
        parts: list[str | Table] = [
            *self._headlines(lost),
            "",
            table([title], ["ops", *columns], rows),
            "",
            table(["op, the worst first", "module", "line", "dtype"], columns, op_rows),
            "",
            f"alone: an op's own error, against {short_name(self.against)} on the same operands; from start: of all "
            "ops so far; largest: magnitude; overflow, to zero: shares of the elements that float32 would keep; the "
            "worst first: those that overflow, then by to zero, then by alone"
            + "; not finite: share of NaN and infinities"
            * bool(lost),
        ]
        if low := [record for record in self.saved if record.kept_as != record.dtype]:
            worst_first = sorted(low, key=lambda record: -(record.error or 0.0))[:OPS]
            title = f"kept for backward in 8 bits: {len(low)} of {len(self.saved)}, the worst first"
            cells = [
                (r.op, r.module or "(none)", r.line, human_bytes(r.bytes), error_text(r.error)) for r in worst_first
            ]
            parts += ["", table([title, "module", "line"], ["bytes", "alone"], cells)]
        if self.unmeasured:
            parts.append(f"not run in high precision: {', '.join(self.unmeasured)}")
        return parts

    def _headlines(self, lost: Sequence[OpRecord]) -> Iterator[str]:
        exact = short_name(self.against)
        yield f"mixed run against {exact}: {len(self.ops)} ops"
        if self.not_finite:
            named = [f"{name} ({_share(share)})" for name, share in self.not_finite.items()]
            more = f" and {len(named) - NAMES} more" if len(named) > NAMES else ""
            yield f"not finite: {', '.join(named[:NAMES])}{more}"
        if lost:
            yield f"first not finite: {lost[0]}; {len(lost)} ops in all"
        if self.outputs:
            yield f"relative error of the outputs: {', '.join(map(error_text, self.outputs))}"
        if self.gradient_error is not None:
            yield f"relative error of all gradients together: {error_text(self.gradient_error)}"
        yield f"first overflow: {self.first_overflow or 'none'}"
        yield f"first flush to zero: {self.first_underflow or 'none'}"


def audit_call(subject: Subject, settings: dict[str, Any], args: Any, kwargs: Any) -> Audit:
    """Run a call in mixed and in high precision, and compare."""
    with show_progress("auditing") as say:
        return measure_call(MeasuredCall(subject, args, kwargs, **settings), progress=say)


def measure_call(call: MeasuredCall, local: bool = True, progress: Callable[[str], None] = lambda _: None) -> Audit:
    """Run a call; `local`: each op also alone. `progress` gets a line after each op."""
    session = Session(call.against, call.cumulative, local, progress=progress)
    pairs = call.run(session)
    errors = {name: relative_error(*pair) for name, pair in pairs.items() if name.startswith("output ")}
    gradients = {name: squares(*pair) for name, pair in session.gradients.items()}
    compared = [pair for pair in gradients.values() if not math.isnan(pair[0])] or [*gradients.values()]
    shares = {name: float(find_not_finite(*pair).double().mean()) for name, pair in pairs.items() if pair[0].numel()}
    return Audit(
        ops=session.ops,
        outputs=[*errors.values()],
        gradients={name: ratio(*pair) for name, pair in gradients.items()},
        gradient_error=ratio(*map(sum, zip(*compared, strict=True))) if compared else None,
        not_finite=session.not_finite | {name: share for name, share in shares.items() if share},
        saved=[record for saved in session.saved for record in saved.values()],
        unmeasured=sorted(session.unmeasured),
        against=call.against,
        policy=call.subject.options.policy,
        call=call,
    )


def _cells(numbers: Numbers, count: int) -> tuple[str, ...]:
    errors = error_text(numbers.local), error_text(numbers.cumulative), f"{numbers.largest:.1e}"
    shares = numbers.overflowed, numbers.flushed, numbers.not_finite
    return (*errors, *map(_share, shares))[:count]


def _share(value: float) -> str:
    return "" if not value else f"{value:.1%}" if value >= 0.001 else "<0.1%"
