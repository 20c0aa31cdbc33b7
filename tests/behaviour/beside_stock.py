"""A random module as amp compiles it, beside stock AOTAutograd or Inductor under autocast, and float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.numbers import same_bits
from tests.behaviour.programs import COLUMNS, Program

ROWS = 4, 4
"""Of the inputs of each call."""
OTHER_ROWS = 4, 6, 2
NEAR = 1.1
"""Times as far from float64."""
Calls = list[list[Tensor]]


@dataclass
class Outcome:
    """The results of calls, the state they left behind, and the tensors that share memory, in each call."""

    results: Calls = field(default_factory=list)
    left: Calls = field(default_factory=list)
    gradients: Calls = field(default_factory=list)
    shared: list[list[tuple[int, int]]] = field(default_factory=list)


def outcome(of: Program, run_as: Callable[[Any], Any], exact: bool = False, rows: Sequence[int] = ROWS) -> Outcome:
    """Call a program with inputs drawn afresh; `run_as(model)` is what is called."""
    model = of.model(exact)
    run = run_as(model)
    found = Outcome()
    draw = torch.Generator().manual_seed(of.seed)
    for count in rows:
        x, other = (torch.randn(count, COLUMNS, generator=draw) for _ in range(2))
        mask = torch.randn(count, COLUMNS, generator=draw) > 0
        index = torch.randperm(count, generator=draw)
        if exact:
            x, other = x.double(), other.double()
        model.zero_grad()
        x.requires_grad_(of.training)
        with torch.set_grad_enabled(of.training):
            results = run(x, other, mask, index)
        loss = sum(
            (r.to(torch.promote_types(r.dtype, torch.float32)).sin().sum() for r in results if r.requires_grad),
            x.new_zeros(()),
        )
        if loss.requires_grad:
            loss.backward()
        places = [t.untyped_storage().data_ptr() for t in (*results, x, other)]
        found.shared.append([(i, j) for i, p in enumerate(places) for j, q in enumerate(places) if i < j and p == q])
        found.results.append([r.detach().clone() for r in results])
        found.left.append([t.detach().clone() for t in (other, *model.buffers(), *model.parameters())])
        leaves = (x, *model.parameters())
        found.gradients.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in leaves])
    return found


def norm(calls: Calls) -> float:
    """Of all floating numbers together; what is not finite counts as 0, and is left to `overflows`."""
    flat = [t.double().flatten() for call in calls for t in call if t.is_floating_point()]
    return float(torch.cat(flat).nan_to_num(0.0, 0.0, 0.0).norm()) if flat else 0.0


def distance(found: Calls, exact: Calls) -> float:
    """Of all numbers of one kind from those of a run in float64."""
    return norm(
        [[f.double() - e.double() for f, e in zip(*calls, strict=True)] for calls in zip(found, exact, strict=True)]
    )


def overflows(found: Calls, *others: Calls) -> int:
    """How many floating numbers are infinite or NaN in one outcome and in no other."""
    count = 0
    for calls in zip(found, *others, strict=True):
        for value, *beside in zip(*calls, strict=True):
            finite = [b.isfinite() for b in beside]
            count += int((~value.isfinite() & torch.stack(finite).all(0)).sum())
    return count


def same(ours: Outcome, theirs: Outcome) -> bool:
    """True if all numbers have the same bits."""
    return all(same_bits(getattr(ours, kind), getattr(theirs, kind)) for kind in ("results", "left", "gradients"))


def differences(ours: Outcome, theirs: Outcome, exact: Outcome | None) -> list[tuple[str, str]]:
    """In what two outcomes differ, in a word and a sentence, but for what comes as near to float64.

    Where that can't be run, other numbers may differ by 1 %.
    """
    found = []
    if ours.shared != theirs.shared:
        found.append(("aliasing", f"memory shared: {ours.shared}, stock {theirs.shared}"))
    for kind in ("results", "left", "gradients"):
        a, b = getattr(ours, kind), getattr(theirs, kind)
        dtypes = [[[t.dtype for t in call] for call in calls] for calls in (a, b)]
        if dtypes[0] != dtypes[1]:
            found.append(("dtypes", f"dtypes of {kind}: {dtypes[0]}, stock {dtypes[1]}"))
        elif not same_bits(a, b):
            e = getattr(exact or theirs, kind)
            mine, stocks = distance(a, e), distance(b, e) if exact else 0.01 * norm(b)
            if lost := overflows(a, b, e):
                found.append(("values", f"{kind}: {lost} not finite where stock's and float64's are"))
            if mine > NEAR * stocks + 1e-6:
                found.append(("values", f"{kind}: {mine:.3g} from float64, stock {stocks:.3g}"))
    return found


class Setting(NamedTuple):
    """How modules are compiled. `dynamic`: for any number of rows, and called with several."""

    lower: str = "aot_eager"
    outputs: str = "autocast"
    dtype: torch.dtype = torch.bfloat16
    dynamic: bool | None = None

    def run(self, of: Program, run_as: Callable[[Any], Any], exact: bool = False) -> Outcome:
        """Return the outcome of its calls."""
        torch._dynamo.reset()
        return outcome(of, run_as, exact, OTHER_ROWS if self.dynamic else ROWS)

    def amp(self, model: Any) -> Any:
        """A model as amp compiles it."""
        options: dict[str, Any] = {"lower": self.lower, "outputs": self.outputs, "dtype": self.dtype}
        options["range_guards"] = (
            self.dtype != torch.float16
        )  # there they keep ops in float32 that eager autocast doesn't
        return torch.compile(model, backend="amp", dynamic=self.dynamic, options=options)

    def stock(self, model: Any) -> Any:
        """As torch does. A graph that amp runs as it is is held against eager autocast: what AOTAutograd drops unread
        may raise there. Results that leave in float32 are held against widened ones.
        """
        run = torch.compile(model, backend=self.lower, dynamic=self.dynamic) if self.lower != "eager" else model

        def under_autocast(*args: Any) -> Any:
            with torch.autocast("cpu", self.dtype, cache_enabled=False):
                results = run(*args)
            widen = self.outputs == "float32"
            return [r.float() if widen and r.dtype == self.dtype else r for r in results]

        return under_autocast

    def judge(self, of: Program) -> tuple[str, list[tuple[str, str]]]:
        """A program's verdict in one word, and the differences."""
        try:
            theirs = self.run(of, self.stock)
        except Exception:
            return "stock raises", []
        try:
            ours = self.run(of, self.amp)
        except Exception as error:
            return "fails", [("raises", f"{type(error).__name__}: {str(error).strip()[:300]}")]
        if self.outputs == "float32":
            ours.shared = theirs.shared  # what is widened shares memory with nothing
        try:
            exact = self.run(of, lambda model: model, exact=True)
        except Exception:
            exact = None
        found = differences(ours, theirs, exact)
        return "fails" if found else "same bits" if same(ours, theirs) else "as near", found
