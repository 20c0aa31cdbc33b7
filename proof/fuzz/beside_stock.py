"""A random module as amp compiles it, beside stock AOTAutograd or Inductor under autocast, and float64."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from proof.fuzz.modules import Program, program
from proof.fuzz.outcomes import OTHER_ROWS, ROWS, Outcome, differences, outcome, same

REFUSED = "stock raises"


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
            return REFUSED, []
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

    def program(self, seed: int) -> Program:
        """That of a seed."""
        return program(seed)
