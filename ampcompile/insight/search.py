"""The search of `Audit.suggest`: few modules in float32, many in fp8, by audits of one policy after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from glob import escape
from typing import Any

from ampcompile.errors import AuditError
from ampcompile.policy import Policy, and_ancestors
from ampcompile.records.graphs import Numbers

Modules = frozenset[str]


Run = Callable[[Policy, bool], tuple[float, Sequence[Any]]]
"""Audits a call under a policy, each op also alone if the bool asks for it; returns the error of the whole run, and
records: of the ops or, where the policy is the option `saved`, of what is kept for backward."""


@dataclass
class Trials:
    """Audits of one call under one policy after another, at most `most`; `errors` has those that are known."""

    run: Run
    errors: dict[Policy, float]
    tolerance: float
    most: int
    progress: Callable[[str], None]

    @property
    def are_left(self) -> bool:
        return len(self.errors) <= self.most

    def measure(self, policy: Policy, words: str) -> float:
        """Return the error under a policy, infinite if it is NaN; `words` say what is tried."""
        if policy not in self.errors:
            self.note(policy, self.run(policy, False)[0], words)
        return self.errors[policy]

    def note(self, policy: Policy, error: float, words: str) -> None:
        """Count an audit."""
        self.progress(f"{words}: error {error:.2g}")
        self.errors[policy] = math.inf if math.isnan(error) else error

    def shrink(self, kept: Modules, candidates: Iterable[str], choice: Choice) -> Modules:
        """Drop the candidates that aren't needed: all at once, halves, quarters, at last single ones."""
        candidates = list(candidates)
        size = len(candidates)
        while size:
            start = 0
            while start < len(candidates):
                fewer = kept.difference(candidates[start : start + size])
                policy, words = choice(fewer)
                known = policy in self.errors or self.are_left
                if known and self.measure(policy, words) <= self.tolerance:
                    kept = fewer
                    del candidates[start : start + size]
                else:
                    start += size
            size //= 2
        return kept


Choice = Callable[[Modules], tuple[Policy, str]]  # the policy that spares some modules, and words about it


def _in_float32(policy: Policy, modules: Modules, kept: Modules) -> tuple[Policy, str]:
    """The policy with some modules in float32, a path standing for all inside it; `modules`: all that compute."""
    outer = [m for m in sorted(kept) if not any(m.startswith(f"{other}.") for other in kept)]
    globs = ["*"] if "" in kept or kept == modules else map(escape, outer)
    overrides = tuple((glob, "fp32") for glob in globs)
    return replace(policy, modules=policy.modules + overrides), f"{_count(len(kept))} in float32"


def keep_in_float32(trials: Trials, policy: Policy, numbers: Mapping[str, Numbers]) -> Policy:
    """Find few modules to keep in float32. Raises AuditError if all that have `numbers` miss the tolerance."""
    modules = frozenset(numbers)
    choice = partial(_in_float32, policy, modules)
    error = trials.measure(*choice(modules))
    if error > trials.tolerance:
        raise AuditError(
            f"found a relative error of {error:.2g} with everything in float32; expected at most "
            f"{trials.tolerance:.2g}. Ask for a tolerance above that: no choice of modules is better."
        )
    # An outer module stands for all inside it: first see which of those are needed for ops of their own.
    outer = {m for m in modules if any(not m or other.startswith(f"{m}.") for other in modules - {m})}
    kept = modules - outer
    if outer and not (kept and trials.measure(*choice(kept)) <= trials.tolerance):
        kept = modules
        for depth in sorted({_depth(module) for module in outer}):
            kept = trials.shrink(kept, sorted(m for m in outer if _depth(m) == depth), choice)
    if "" not in kept:
        kept = trials.shrink(kept, sorted(kept - outer, key=lambda m: (numbers[m].badness, m)), choice)
    return choice(kept)[0]


def _in_fp8(policy: Policy, recipe: str, quantized: Modules, kept: Modules) -> tuple[Policy, str]:
    """The policy with modules in fp8, but for some; what the policy itself says of modules beats that.

    `recipe`: a value of a policy; `quantized`: all modules whose products can be. A path stands for all inside it, if
    none there is spared.
    """
    chosen, spared = quantized - kept, {a for m in quantized & kept for a in and_ancestors(m)}
    outer = {next((a for a in reversed(and_ancestors(m)) if a not in spared), m) for m in chosen}
    overrides = [(escape(m), recipe) for m in sorted(outer)]
    overrides += [(escape(m), "default") for m in sorted(kept) if not outer.isdisjoint(and_ancestors(m))]
    return replace(policy, modules=(*overrides, *policy.modules)), f"{_count(len(chosen))} in {recipe}"


def quantize(trials: Trials, policy: Policy, recipe: str) -> Policy:
    """From a policy that meets the tolerance, run as many modules in fp8 as still meet it; heads aren't tried."""
    if not trials.are_left:
        return policy
    everything = replace(policy, ops=(("*", recipe), *policy.ops))
    error, ops = trials.run(everything, True)
    weights: dict[str, int] = {}
    for op in ops:
        if op.op == "ampcompile.quantize_weight":
            weights[op.module] = weights.get(op.module, 0) + op.numbers.elements
    weights.pop("", 0)  # no path names products outside of modules
    trials.note(everything, error, f"{_count(len(weights))} in {recipe}")
    choice = partial(_in_fp8, policy, recipe, frozenset(weights))
    return choice(trials.shrink(frozenset(weights), sorted(weights, key=lambda m: -weights[m]), choice))[0]


def save_in_8_bits(trials: Trials) -> Policy:
    """Let the values of as many modules be kept in 8 bits as meet the tolerance, those with most bytes first.

    Values outside of modules are kept so only where all are. Raises AuditError if the tolerance isn't met without any
    in 8 bits, and if no value is one that may be.
    """
    error = trials.measure(Policy(), "nothing kept in 8 bits")
    if error > trials.tolerance:
        raise AuditError(
            f"found a relative error of {error:.2g} with nothing kept in 8 bits; expected at most "
            f"{trials.tolerance:.2g}. Ask for a tolerance above that, or first for a policy that meets it."
        )
    everything = Policy(modules=(("*", "fp8"),))
    error, records = trials.run(everything, False)
    low = [record for record in records if record.kept_as != record.dtype]
    if not low:
        raise AuditError(
            "found no value that may be kept in 8 bits; expected some. Audit a call with gradients, of the size that "
            "you train with: small values stay as they are. ampcompile.explain says of each why."
        )
    trials.note(everything, error, "everything kept in 8 bits")
    if error <= trials.tolerance:
        return everything
    kept: dict[str, int] = {}
    for record in low:
        if record.module:
            kept[record.module] = kept.get(record.module, 0) + record.bytes
    choice = partial(_in_fp8, Policy(), "fp8", frozenset(kept))
    return choice(trials.shrink(frozenset(kept), sorted(kept, key=lambda m: -kept[m]), choice))[0]


def _depth(module: str) -> int:
    return len(module.split(".")) if module else 0


def _count(modules: int) -> str:
    return f"{modules} module{'s' * (modules != 1)}"
