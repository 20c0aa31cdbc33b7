"""Find few modules to keep in float32: those that are predicted to do, verified by audits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ampcompile.errors import AuditError
from ampcompile.policy import Policy

from .sensitivities import enclosing, give_up_one_by_one

if TYPE_CHECKING:
    from .result import Audit

VERIFIED = 2
"""Audits of sets that are predicted to meet the tolerance; then the search goes on by bisection."""
MARGIN = 0.95
"""Share of the tolerance that is used up by what is predicted."""


def suggest(audit: Audit, tolerance: float, trials: int, progress: Callable[[str], None]) -> Policy:
    """See `Audit.suggest`."""
    if not (isinstance(tolerance, int | float) and 0 < tolerance < math.inf and trials >= 1):
        raise AuditError(
            f"found suggest(tolerance={tolerance!r}, trials={trials!r}); expected a relative error above 0, such as "
            "1e-2, and at least one trial."
        )
    if math.isnan(audit.error):
        raise AuditError(
            "found outputs or gradients in which no number is finite in both runs; expected some to compare. "
            "audit.not_finite and audit.first_not_finite say where that begins: mend the model or its inputs there."
        )
    if audit.error <= tolerance:
        return audit.policy
    search = _Search(audit, tolerance, trials, progress)
    search.run()
    return search.policy()


class _Search:
    """A search along a row of sets of modules, each inside the one before, for the last that meets the tolerance.

    Where the errors predicted for them prove right it takes one audit or two, else it goes on by bisection.
    """

    def __init__(self, audit: Audit, tolerance: float, trials: int, progress: Callable[[str], None]) -> None:
        self.audit, self.tolerance, self.trials, self.progress = audit, tolerance, trials, progress
        sensitivities = audit.sensitivities()
        self.modules = {op.module for op in audit.ops} | {r.place.module for r in sensitivities.roundings}
        self.sets = list(give_up_one_by_one(sensitivities.roundings, self.modules))
        self.predicted = [sensitivities.error(kept) for kept in self.sets]
        self.meets, self.fails = 0, len(self.sets) - 1  # the last that meets the tolerance, and the first that doesn't
        self.measured = {self.fails: audit.error}

    def run(self) -> None:
        """Move `meets` and `fails` towards each other. Raises AuditError if nothing meets the tolerance."""
        while True:
            tried = len(self.measured) - 1
            if self.meets in self.measured and (self.fails - self.meets == 1 or tried in (VERIFIED, self.trials)):
                return
            place = self._predict() if tried < VERIFIED else (self.meets + self.fails) // 2
            if tried + 1 == self.trials and self.meets not in self.measured:
                place = 0
            error = self.measured[place] = self._measure(place)
            if error <= self.tolerance:
                self.meets = place
            elif place == 0:
                raise AuditError(
                    f"found a relative error of {error:.2g} with everything in float32; expected at most "
                    f"{self.tolerance:.2g}. Ask for a tolerance above that: no choice of modules is better."
                )
            else:
                self.fails = place

    def _predict(self) -> int:
        """Return the last place at which the tolerance should be met, as predictions have proved right so far."""
        limit = (MARGIN * self.tolerance) ** 2
        (low, at_low), (high, at_high) = (
            (self.predicted[i] ** 2, self.measured.get(i, 0.0) ** 2) for i in (self.meets, self.fails)
        )
        if at_low < min(limit, at_high) and at_high < math.inf and low < high < math.inf:  # squares add up
            limit = low + (high - low) * (limit - at_low) / (at_high - at_low)
        first = self.meets + (self.meets in self.measured)
        return next((i for i in range(self.fails - 1, first, -1) if self.predicted[i] ** 2 <= limit), first)

    def _measure(self, place: int) -> float:
        assert self.audit.call is not None
        error = self.audit.call.with_policy(self.policy(place)).audit(local=False).error
        kept = len(self.sets[place])
        self.progress(f"{kept} module{'s' * (kept != 1)} in float32: error {error:.2g}")
        return math.inf if math.isnan(error) else error

    def policy(self, place: int | None = None) -> Policy:
        """Return the audit's policy with a set of modules in float32; default: the one that was found."""
        kept = self.sets[self.meets if place is None else place]
        paths = ["*"] if "" in kept or kept == self.modules else _with_parents(sorted(kept), self.modules - {""})
        overrides = tuple((path, "fp32") for path in paths)
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
