"""The fewest modules to keep in float32: bisection over modules, ordered by the rounding they add, then dropping."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ampcompile.errors import AuditError
from ampcompile.policy import Policy

from .numbers import known
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
    if chosen is None:  # what counts stands outside of modules
        return everything
    spelled = _with_parents(chosen, {op.module for op in audit.ops if op.module})
    return search.policy(spelled if search.meets(spelled) else chosen)


class _Search:
    """Audits under policies, each once, and no more than `trials`."""

    def __init__(self, audit: Audit, tolerance: float, trials: int, progress: Callable[[str], None]) -> None:
        self.audit, self.tolerance, self.trials, self.progress = audit, tolerance, trials, progress
        self.errors: dict[Policy, float] = {}

    def policy(self, paths: Sequence[str]) -> Policy:
        """The audit's policy, and these modules in float32."""
        kept = tuple((path, "fp32") for path in sorted(paths))
        return replace(self.audit.policy, modules=self.audit.policy.modules + kept)

    def meets(self, paths: Sequence[str]) -> bool:
        """Whether the error is known to be within the tolerance with these modules in float32."""
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
    """Modules that call ops, those first that add most: the squares of their ops' own relative errors, summed."""

    def added(module: str) -> float:
        return sum(known(op.numbers.local) ** 2 for op in audit.ops if op.module == module)

    return sorted((m.module for m in group_by_module(audit.ops) if m.module), key=added, reverse=True)


def _prefix(suspects: list[str], meets: Callable[[Sequence[str]], bool]) -> list[str] | None:
    """The shortest beginning of a list that meets the tolerance, by bisection; None if the whole doesn't."""
    if not meets(suspects):
        return None
    low, high = 0, len(suspects)  # `high` of them meet it, `low` don't
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(suspects[:middle]) else (middle, high)
    return suspects[:high]


def _shrink(chosen: list[str] | None, meets: Callable[[Sequence[str]], bool]) -> list[str] | None:
    """`chosen` without what can be spared: halves are dropped, then quarters, then single modules."""
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
    """The same modules in fewer paths: where all inside a module were chosen, its path stands for them."""
    kept = set(chosen)
    parents = {path.rpartition(".")[0] for path in _ancestors(kept)} - {""}
    for parent in sorted(parents, key=lambda path: path.count("."), reverse=True):
        inside = {module for module in modules if module == parent or module.startswith(f"{parent}.")}
        if inside and all(any(m == k or m.startswith(f"{k}.") for k in kept) for m in inside):
            kept = {k for k in kept if not k.startswith(f"{parent}.")} | {parent}
    return sorted(kept)


def _ancestors(paths: set[str]) -> set[str]:
    return {".".join(parts[:n]) for path in paths for parts in [path.split(".")] for n in range(1, len(parts) + 1)}
