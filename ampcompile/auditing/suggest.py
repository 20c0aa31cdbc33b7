"""Find the fewest modules to keep in float32: bisect modules, ordered by the errors they add, then drop some."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ampcompile.errors import AuditError
from ampcompile.policy import Policy

from .numbers import error_or_zero
from .records import group_by_module

if TYPE_CHECKING:
    from .result import Audit


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
    everything = search.policy(["*"])
    if not search.meets(["*"]):
        raise AuditError(
            f"found a relative error of {search.errors[everything]:.2g} with everything in float32; expected at most "
            f"{tolerance:.2g}. Ask for a tolerance above that: no choice of modules is better."
        )
    chosen = _shrink(_prefix(_suspects(audit), search.meets), search.meets)
    if chosen is None:  # ops outside of modules decide
        return everything
    spelled = _with_parents(chosen, {op.module for op in audit.ops if op.module})
    return search.policy(spelled if search.meets(spelled) else chosen)


class _Search:
    """Audits under policies, each once, and no more than `trials`."""

    def __init__(self, audit: Audit, tolerance: float, trials: int, progress: Callable[[str], None]) -> None:
        self.audit, self.tolerance, self.trials, self.progress = audit, tolerance, trials, progress
        self.errors: dict[Policy, float] = {}

    def policy(self, paths: Sequence[str]) -> Policy:
        """Return the audit's policy with these modules in float32."""
        overrides = tuple((path, "fp32") for path in sorted(paths))
        return replace(self.audit.policy, modules=self.audit.policy.modules + overrides)

    def meets(self, paths: Sequence[str]) -> bool:
        """Return True if the error is error_or_zero to be within the tolerance with these modules in float32."""
        policy = self.policy(paths)
        if policy not in self.errors:
            if len(self.errors) >= self.trials:
                return False
            assert self.audit.with_policy is not None
            error = self.audit.with_policy(policy, False).error
            self.errors[policy] = math.inf if math.isnan(error) else error
            self.progress(f"{len(paths)} module{'s' * (len(paths) != 1)} in float32: error {error:.2g}")
        return self.errors[policy] <= self.tolerance


def _suspects(audit: Audit) -> list[str]:
    """Modules that call ops, the worst first, by the sum of the squares of their ops' own relative errors."""

    def added(module: str) -> float:
        return sum(error_or_zero(op.numbers.local) ** 2 for op in audit.ops if op.module == module)

    return sorted((m.module for m in group_by_module(audit.ops) if m.module), key=added, reverse=True)


def _prefix(suspects: list[str], meets: Callable[[Sequence[str]], bool]) -> list[str] | None:
    """Return the shortest prefix of a list that meets the tolerance, by bisection; None if the whole doesn't."""
    if not meets(suspects):
        return None
    low, high = 0, len(suspects)  # `high` of them meet it, `low` don't
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(suspects[:middle]) else (middle, high)
    return suspects[:high]


def _shrink(chosen: list[str] | None, meets: Callable[[Sequence[str]], bool]) -> list[str] | None:
    """Drop modules that `chosen` doesn't need: halves of it, then quarters, then single modules."""
    if chosen is None:
        return None
    size = len(chosen) // 2
    while size:
        start = 0
        while start < len(chosen):
            fewer = chosen[:start] + chosen[start + size :]
            if fewer and meets(fewer):
                chosen = fewer
            else:
                start += size
        size //= 2
    return chosen


def _with_parents(chosen: list[str], modules: set[str]) -> list[str]:
    """Return the same modules in fewer paths: if all inside a module were chosen, its path replaces theirs."""
    paths = set(chosen)
    parents = {path.rpartition(".")[0] for path in _ancestors(paths)} - {""}
    for parent in sorted(parents, key=lambda path: path.count("."), reverse=True):
        inside = {module for module in modules if module == parent or module.startswith(f"{parent}.")}
        if inside and all(any(m == p or m.startswith(f"{p}.") for p in paths) for m in inside):
            paths = {p for p in paths if not p.startswith(f"{parent}.")} | {parent}
    return sorted(paths)


def _ancestors(paths: set[str]) -> set[str]:
    return {".".join(parts[:n]) for path in paths for parts in [path.split(".")] for n in range(1, len(parts) + 1)}
