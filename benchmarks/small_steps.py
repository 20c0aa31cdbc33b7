"""Training steps and calls of small models, with the optimizers that users write: peers in turn, step by step."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks import counting
from benchmarks.apart import apart
from benchmarks.candidate import UnfairError, check_fairness
from benchmarks.numbers import relative_error
from benchmarks.peers import AMP, BASELINE, PEERS
from benchmarks.race import Caches, Race
from benchmarks.records import Row
from benchmarks.small_models import MODELS, Small

NAMES = ("eager fp32", "eager autocast", "Inductor fp32", BASELINE, AMP)
STEP, CALL = "step", "call without gradients"
FEWEST = 50
"""Steps of a round, at least."""
STARTS = 3
"""How often every peer is started: where its process's heap lies costs or saves some per cent until it ends."""


class SmallCandidate:
    """A peer and its own copy of a small model, to be trained or called."""

    def __init__(self, model: str, what: str, peer: str) -> None:
        self.model, self.training, self.peer = model, what == STEP, PEERS[peer]
        self.graphs = 0

    def prepare(self) -> dict[str, Any]:
        """Compile, and compare with eager float32: the result, or all gradients.

        Raises UnfairError if numbers are wrong, or no product runs in 16 bits that should.
        """
        expected = self._results(self._build(lambda model: model), nullcontext)
        self.small = self._build(lambda model: self.peer.compiled(model, torch.bfloat16))
        before, no_fallback = counting.graphs_compiled(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
        with counting.nothing_from_caches(), counting.casts_compiled() as casts, no_fallback:
            if self.peer.compiler == "eager":
                with counting.CastsRun() as mode:
                    found = self._results(self.small, self._around)
                casts = mode.casts
            else:
                found = self._results(self.small, self._around)
        error = relative_error(found, expected)
        check_fairness(self.peer.low, error, found)
        figures = {"error": error, "casts": casts.count, "cast_bytes": casts.bytes}
        if self.peer.compiler == "eager":
            return figures
        if bool(casts.products) != self.peer.low:
            raise UnfairError(f"found {casts.products} products in 16 bits among those compiled")
        return figures | {"graphs": counting.graphs_compiled() - before, "low_products": casts.products}

    def begin(self, case: str) -> float:
        """Warm up; returns the seconds of one step or call."""
        self.round(5)
        self.graphs = counting.graphs_compiled()
        return self.round(5)

    def round(self, times: int) -> float:
        """Median seconds of so many steps or calls, each timed by itself."""
        run, seconds = self._step if self.training else self._call, []
        for _ in range(times):
            start = perf_counter()
            run()
            seconds.append(perf_counter() - start)
        return median(seconds)

    def end(self) -> dict[str, Any]:
        """Graphs compiled in this process since `begin`."""
        return {"recompiled": counting.graphs_compiled() - self.graphs}

    def parameters(self) -> list[Tensor]:
        """All that its optimizers update."""
        return [p for optimizer, _ in self.small.updates for group in optimizer.param_groups for p in group["params"]]

    def _build(self, compiled: Callable[..., Any]) -> Small:
        torch.manual_seed(0)
        return MODELS[self.model](compiled)

    def _around(self) -> AbstractContextManager:
        return self.peer.around("cpu", torch.bfloat16)

    def _step(self) -> None:
        for optimizer, loss in self.small.updates:
            optimizer.zero_grad()
            with self._around():
                value = loss()
            value.backward()
            optimizer.step()

    def _call(self) -> Tensor:
        with torch.no_grad(), self._around():
            return self.small.call()

    def _results(self, small: Small, around: Callable[[], AbstractContextManager]) -> list[Tensor]:
        if not self.training:
            with torch.no_grad(), around():
                return [small.call()]
        grads = []
        for optimizer, loss in small.updates:
            optimizer.zero_grad()
            with around():
                value = loss()
            value.backward()
            grads += [p.grad.clone() for group in optimizer.param_groups for p in group["params"]]
        return grads


def measure(model: str, what: str, caches: Caches) -> list[Row]:
    """Rows of all peers, each in processes of its own: what one hooks or patches costs no other anything."""
    rows: dict[str, Row] = {}
    with ExitStack() as folders:
        kept = {name: folders.enter_context(caches()) for name in NAMES}
        for _ in range(STARTS):
            for row in _start(model, what, kept):
                rows.setdefault(row.peer, row)
                if rows[row.peer] is not row and not rows[row.peer].why:
                    rows[row.peer].figures["seconds"] += row.figures["seconds"]
    return list(rows.values())


def _start(model: str, what: str, caches: Mapping[str, Path]) -> list[Row]:
    contest = Race({}, FEWEST)
    with ExitStack() as processes:
        for name, folder in caches.items():
            contest.enter(name, processes.enter_context(apart(SmallCandidate, model, what, name, caches=folder)))
        return contest.rows([f"{model}: {what}"])
