"""Find few modules to keep in float32: those that are predicted to do, verified by audits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from glob import escape
from typing import TYPE_CHECKING

from ampcompile.errors import AuditError
from ampcompile.policy import Policy

from .adjoints import Rounding
from .sensitivities import add_up, enclosing, give_up_one_by_one, worst

if TYPE_CHECKING:
    from .result import Audit

VERIFIED = 2
"""Audits of sets that are predicted to meet the tolerance; then the search goes on by bisection."""
MISLED = 1.25
"""If the first set, which should meet the tolerance, is so many times above it, predictions are wrong."""
MARGIN = 0.95
"""Share of the tolerance that is used up by what is predicted."""


def suggest(audit: Audit, tolerance: float, trials: int, progress: Callable[[str], None], by: str) -> Policy:
    """See `Audit.suggest`."""
    if not (isinstance(tolerance, int | float) and 0 < tolerance < math.inf and trials >= 1):
        raise AuditError(
            f"found suggest(tolerance={tolerance!r}, trials={trials!r}); expected a relative error above 0, such as "
            "1e-2, and at least one trial."
        )
    if by not in ("module", "op"):
        raise AuditError(f"found suggest(by={by!r}); expected 'module' or 'op'.")
    if math.isnan(audit.error):
        raise AuditError(
            "found outputs or gradients in which no number is finite in both runs; expected some to compare. "
            "audit.not_finite and audit.first_not_finite say where that begins: mend the model or its inputs there."
        )
    if audit.error <= tolerance:
        return audit.policy
    search = _Search(audit, tolerance, trials, progress)
    kept, policy = search.run()
    return (by == "op" and search.keep_ops_of(kept)) or policy


class _Search:
    """A search along a row of sets of modules, each inside the one before, for the last that meets the tolerance.

    Where the errors predicted for them prove right it takes one audit or two, else it goes on by bisection.
    """

    def __init__(self, audit: Audit, tolerance: float, trials: int, progress: Callable[[str], None]) -> None:
        self.audit, self.tolerance, self.trials, self.progress = audit, tolerance, trials, progress
        sensitivities = audit.sensitivities()
        self.roundings = sensitivities.roundings
        self.modules = {op.module for op in audit.ops} | {r.place.module for r in self.roundings}
        self.sets = list(give_up_one_by_one(self.roundings, self.modules))
        self.predicted = [sensitivities.error(kept) for kept in self.sets]
        self.errors = {frozenset[str](): audit.error}  # measured, by the modules kept
        self.meets, self.fails = 0, len(self.sets) - 1  # the last that meets the tolerance, and the first that doesn't

    def run(self) -> tuple[Collection[str], Policy]:
        """Return modules to keep, and the policy, that meet the tolerance. Raises AuditError if none do."""
        misled = False
        while True:
            tried = len(self.errors) - 1
            met = self.sets[self.meets] in self.errors
            if met and (self.fails - self.meets == 1 or tried in (VERIFIED, self.trials)):
                break
            place = self._predict() if tried < VERIFIED else (self.meets + self.fails) // 2
            if tried + 1 == self.trials and not met:
                place = 0
            error = self._measure(self.sets[place])
            if error <= self.tolerance:
                self.meets = place
            elif place == 0:
                raise AuditError(
                    f"found a relative error of {error:.2g} with everything in float32; expected at most "
                    f"{self.tolerance:.2g}. Ask for a tolerance above that: no choice of modules is better."
                )
            else:
                self.fails, misled = place, misled or (tried == 0 and error > MISLED * self.tolerance)
        kept = self.sets[self.meets]
        chosen = self._shrink(sorted(kept)) if misled and "" not in kept else kept
        return chosen, self._policy(chosen)

    def keep_ops_of(self, modules: Collection[str]) -> Policy | None:
        """Return a policy that keeps some kinds of ops of those that these modules keep, if that is measured to do.

        Those whose roundings add most, until the rest is predicted to do. A result that a product reads is rounded
        there if not before, so keeping its op takes nothing away.
        """
        kinds: dict[str, list[Rounding]] = {}
        for rounding in self.roundings:
            if rounding.called and not rounding.readers and not rounding.happens(frozenset(modules)):
                kinds.setdefault(f"{rounding.called}@{escape(rounding.place.module)}", []).append(rounding)
        ops: list[str] = []
        left = {id(rounding): rounding for rounding in self.roundings}
        for kind in sorted(kinds, key=lambda kind: worst(add_up(kinds[kind])), reverse=True):
            if worst(add_up(left.values())) <= MARGIN * self.tolerance:
                break
            ops.append(kind)
            for rounding in kinds[kind]:
                del left[id(rounding)]
        enough = worst(add_up(left.values())) <= MARGIN * self.tolerance
        if not ops or not enough or len(self.errors) > self.trials:
            return None
        policy = replace(self.audit.policy, ops=self.audit.policy.ops + tuple((op, "fp32") for op in ops))
        return policy if self._audit(policy, f"{', '.join(ops)} in float32") <= self.tolerance else None

    def _predict(self) -> int:
        """Return the last place at which the tolerance should be met, as predictions have proved right so far."""
        limit = (MARGIN * self.tolerance) ** 2
        (low, at_low), (high, at_high) = (
            (self.predicted[i] ** 2, self.errors.get(self.sets[i], 0.0) ** 2) for i in (self.meets, self.fails)
        )
        if at_low < min(limit, at_high) and at_high < math.inf and low < high < math.inf:  # squares add up
            limit = low + (high - low) * (limit - at_low) / (at_high - at_low)
        first = self.meets + (self.sets[self.meets] in self.errors)
        return next((i for i in range(self.fails - 1, first, -1) if self.predicted[i] ** 2 <= limit), first)

    def _shrink(self, chosen: list[str]) -> list[str]:
        """Drop modules that aren't needed, since predictions were wrong: halves, then quarters, then single modules."""
        size = len(chosen) // 2
        while size:
            start = 0
            while start < len(chosen):
                fewer = chosen[:start] + chosen[start + size :]
                if fewer and len(self.errors) <= self.trials and self._measure(frozenset(fewer)) <= self.tolerance:
                    chosen = fewer
                else:
                    start += size
            size //= 2
        return chosen

    def _measure(self, kept: frozenset[str]) -> float:
        if kept not in self.errors:
            words = f"{len(kept)} module{'s' * (len(kept) != 1)} in float32"
            self.errors[kept] = self._audit(self._policy(kept), words)
        return self.errors[kept]

    def _audit(self, policy: Policy, words: str) -> float:
        assert self.audit.call is not None
        error = self.audit.call.with_policy(policy).audit(local=False).error
        self.progress(f"{words}: error {error:.2g}")
        return math.inf if math.isnan(error) else error

    def _policy(self, kept: Collection[str]) -> Policy:
        """Return the audit's policy with these modules in float32."""
        everything = "" in kept or set(kept) == self.modules
        globs = ["*"] if everything else map(escape, _with_parents(sorted(kept), self.modules - {""}))
        overrides = tuple((glob, "fp32") for glob in globs)
        return replace(self.audit.policy, modules=self.audit.policy.modules + overrides)


def _with_parents(chosen: list[str], modules: set[str]) -> list[str]:
    """Return the same modules in fewer paths: if all inside a module were chosen, its path replaces theirs."""
    paths = set(chosen)
    parents = {outer for path in paths for outer in enclosing(path)} - {""}
    for parent in sorted(parents, key=lambda path: path.count("."), reverse=True):
        inside = {module for module in modules if module == parent or module.startswith(f"{parent}.")}
        if inside and all(any(m == p or m.startswith(f"{p}.") for p in paths) for m in inside):
            paths = {p for p in paths if not p.startswith(f"{parent}.")} | {parent}
    return sorted(paths)
