"""Every model in every mode and type; the sample takes training in one type, and another mode in the other."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from statistics import median

from ampcompile.dtypes import LOW
from benchmarks.tables import table
from proof.models import generating, hub, judge, packages, plain
from proof.models.missing_ops import stand_in
from proof.models.subject import MODES, Case
from proof.ops.judge import FAILS, RAISES, STOCK_FAILS
from proof.part import Part
from proof.results import Verdict
from proof.show import share_held

CASES: dict[str, Case] = {**plain.CASES, **hub.CASES, **packages.CASES}
TYPES = {str(low).removeprefix("torch."): low for low in LOW}
INDUCTOR = ("llama", "gpt2", "bert", "t5", "vit", "resnet")
MISSING, SAME_TOKENS, TIE = "not installed", generating.SAME, generating.TIE
HELD = ("same bits", "as near", SAME_TOKENS, TIE)
COLUMNS = (*HELD, STOCK_FAILS, FAILS, RAISES, MISSING)


def groups(everything: bool) -> list[str]:
    """Six of each model, or two of them; some by Inductor, some that generate."""
    found = []
    for n, name in enumerate(CASES):
        one, other = sorted(TYPES, reverse=n % 2 == 1)
        taken = [f"{name}, {one}, train", f"{name}, {other}, {MODES[1 + n // 2 % 2]}"]
        found += [f"{name}, {low}, {mode}" for low in TYPES for mode in MODES] if everything else taken
    types = list(TYPES) if everything else ["bfloat16"]
    found += [f"{name}, {low}, {cache}" for name in generating.DECODERS for low in types for cache in generating.CACHES]
    return found + [f"{name}, bfloat16, train, inductor" for name in INDUCTOR]


def run(group: str) -> Verdict:
    """Of one model in one setting."""
    name, low, mode, *lower = group.split(", ")
    case = CASES[name]
    if importlib.util.find_spec(case.package) is None:
        return Verdict(group, {MISSING: 1})
    stand_in()
    if mode in generating.CACHES:
        return generating.judge(group, case, TYPES[low], mode)
    return judge.judge(group, case, mode, TYPES[low], *lower or ["aot_eager"])


def tabulate(verdicts: Sequence[Verdict]) -> str:
    """Outcomes by family, the share that holds, and which architectures were tried."""
    families = {name: case.family for name, case in CASES.items()}
    tried: dict[str, list[Verdict]] = {family: [] for family in families.values()}
    for verdict in verdicts:
        tried[families[_name(verdict)]].append(verdict)
    tried = {family: found for family, found in tried.items() if found}
    total = _counts(verdicts)
    used = [name for name in COLUMNS if total[name]]
    lines = [
        (family, str(len({_name(v) for v in found})), *(str(_counts(found)[each]) for each in used), _times(found))
        for family, found in (tried | {"together": list(verdicts)}).items()
    ]
    held = sum(total[name] for name in HELD)
    names = [
        f"- {family}: {', '.join(sorted({_name(v).removeprefix(f'{family} ') for v in found}))}"
        for family, found in tried.items()
    ]
    return (
        table(["", "architectures", *used, "compile time, of stock's"], lines)
        + f"\n{share_held(held, total[FAILS])} Compile times are medians. The architectures:\n\n"
        + "\n".join(names)
        + "\n"
    )


def _name(verdict: Verdict) -> str:
    return verdict.group.split(", ")[0]


def _counts(verdicts: Sequence[Verdict]) -> Counter[str]:
    return sum((Counter(verdict.counts) for verdict in verdicts), Counter())


def _times(verdicts: Sequence[Verdict]) -> str:
    both = [(*v.figures["compile"], *v.figures["stock"]) for v in verdicts if v.figures]
    found = [ours / stock for ours, stock in both if stock]
    return f"{median(found):.2f}" if found else ""


PART = Part(
    "Models",
    """Small configurations with random weights: two layers, width 32, no dropout. A case is an architecture in
training, in evaluation, or without gradients, under one 16-bit type, lowered by `aot_eager` unless it says `inductor`;
the sample takes two cases of each. A case holds if

- outputs, gradients of all weights, and buffers have eager autocast's dtypes and shapes, or are missing as its are;
- their relative errors against float64, summed over tensors, are at most 1.1 times eager autocast's plus one ulp for
  each tensor, in the geometric mean of two inputs; where these say otherwise, 6 and then 18 decide, and each counts for
  a factor of at most 2;
- the same is true after an optimizer's step changed all weights, and after writes through `.data`, on new inputs;
- Dynamo makes no more graphs of it than for stock `aot_eager` under autocast, and the backend refuses none.

Greedy generation, with a static and with a dynamic cache, gives the tokens that eager autocast gives with a dynamic
one; the other it refuses. Where a token differs, the two are a tie: in float64 their logits are no further apart than
twice eager autocast's largest error. What doesn't hold is tried on stock too. Of a package that isn't installed nothing
is said. Compile times are of one core, and judged by nobody. Not tried are torchvision's R-CNNs: without its C++, which
the wheel beside a CPU build of torch doesn't load, their RoI pooling is compiled by Inductor in eager mode too.
""",
    groups,
    run,
    tabulate,
)
