"""One peer on one work: prepared, checked, then timed round by round."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks import counting
from benchmarks.architectures import build, checkpointed
from benchmarks.compile_time import our_seconds
from benchmarks.memory import forget_peak, peak_bytes
from benchmarks.numbers import chunks, relative_error
from benchmarks.peers import Peer
from benchmarks.steps import Around, TrainingStep, inference
from benchmarks.works import Work

FLOAT32_ERROR = 3e-5
"""A relative error below this means that nothing ran in a 16-bit type."""
WRONG_ERROR = 0.5
"""A relative error above this means that the numbers are wrong."""


class UnfairError(Exception):
    """The candidate doesn't do the work that the others do."""


class Candidate:
    """A peer and its own copy of the model; `prepare` comes first, then for each case `begin`, rounds and `end`."""

    def __init__(self, work: Work, peer: Peer, device: str) -> None:
        self.work, self.peer, self.device = work, peer, device
        self.dtype: torch.dtype = getattr(torch, work.dtype)
        self.cases = dict(work.cases())
        model, inputs = build(work.model, work.batch, work.length, bool(work.training))
        self.model = (checkpointed(model) if work.checkpoint else model).to(device)
        self.inputs = tuple(value.to(device) for value in inputs)
        self.call: Callable[[], Tensor]

    def prepare(self) -> dict[str, Any]:
        """Compile, and compare with eager float32: the output in inference, the gradients in training."""
        expected = self._result(self.model, nullcontext)
        if self.peer.precision == "converted":
            self.model.to(self.dtype)
            self.inputs = tuple(v.to(self.dtype) if v.is_floating_point() else v for v in self.inputs)
        unfrozen = self._casts_unfrozen() if self.peer.freezing else 0
        self.run = self.peer.compiled(self.model, self.dtype)
        figures = self._first_calls()
        if self.peer.freezing and not figures["casts"] < unfrozen:
            raise UnfairError(f"nothing was frozen: {figures['casts']} casts, and {unfrozen} without freezing")
        self.graphs = counting.graphs_compiled()
        found = self._result(self.run, self._around)
        error = relative_error(found, expected)
        check_fairness(self.peer.low, error, found)
        output = str(found[0].dtype).removeprefix("torch.")
        del expected, found  # peers that are prepared later need the memory
        forget_peak(self.device)
        weights = sum(p.numel() for p in self.model.parameters())
        if not self.work.training:
            figures |= {"output": output}
            figures |= {"bytes": weights * (self.dtype.itemsize if self.peer.low else 4)}
        return {"parameters": weights, "error": error, **figures}

    def _first_calls(self) -> dict[str, Any]:
        """Compile; what can be seen of it depends on who compiles."""
        if self.peer.compiler == "eager":
            with counting.CastsRun() as mode:
                self._result(self.run, self._around)
            return {"casts": mode.casts.count, "cast_bytes": mode.casts.bytes}
        with counting.casts_compiled() as casts, our_seconds() as ours:
            gc.collect()  # a full collection takes 0.2 s: whether one falls due must not depend on earlier imports
            first = self._seconds()
        figures = {"compile_seconds": first - self._seconds()}
        if self.peer.compiler == "thunder":
            return figures
        return figures | {
            "graphs": counting.graphs_compiled(),
            "casts": casts.count,
            "cast_bytes": casts.bytes,
            "our_passes_seconds": sum(ours),
        }

    def _casts_unfrozen(self) -> int:
        """How many casts the same graphs hold without freezing; nothing of it stays compiled."""
        with counting.nothing_from_caches(), counting.casts_compiled() as casts:
            self._result(replace(self.peer, freezing=False).compiled(self.model, self.dtype), self._around)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        return casts.count

    def begin(self, case: str) -> float:
        """Warm up, start the peak of memory anew; returns the seconds of one call."""
        steps = self.cases[case]
        if steps is None:
            self.call = inference(self.run, self.inputs, self._around)
        else:
            ours = self.peer.compiler == "amp"
            self.call = TrainingStep(self.model, self.run, self.inputs, self._around, steps, ours)
        self.round(2)
        forget_peak(self.device)
        return self.round(1)

    def round(self, calls: int) -> float:
        """Seconds a call, over so many calls."""
        start = perf_counter()
        for _ in range(calls):
            self.call()
        self._wait()
        return (perf_counter() - start) / calls

    def end(self) -> dict[str, Any]:
        """Return the figures that are taken once, after the last round."""
        figures: dict[str, Any] = {"peak_bytes": peak_bytes(self.device)}
        if isinstance(self.call, TrainingStep):
            figures["losses"] = self.call.history()
        figures["host_syncs"] = counting.host_syncs(self.call, self.device)
        if self.device == "cuda":
            figures["launches"] = counting.kernel_launches(self.call)
            figures["device_seconds"] = counting.device_seconds(self.call)
            figures["host_seconds"] = self.host_seconds()
        figures["recompiled"] = counting.graphs_compiled() - self.graphs
        del self.call  # the next case's optimizer needs the memory of this one's
        return figures

    def host_seconds(self, calls: int = 5) -> float:
        """Seconds until the host is through with a call, whatever the device has still to do; the median of some."""
        times = []
        for _ in range(calls):
            self._wait()
            start = perf_counter()
            self.call()
            times.append(perf_counter() - start)
        return median(times)

    def _around(self) -> Any:
        return self.peer.around(self.device, self.dtype)

    def _result(self, run: Callable[..., Tensor], around: Around) -> list[Tensor]:
        if not self.work.training:
            return [inference(run, self.inputs, around)()]
        with around():
            loss = run(*self.inputs)
        loss.backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad()
        return grads

    def _seconds(self) -> float:
        start = perf_counter()
        self._result(self.run, self._around)
        self._wait()
        return perf_counter() - start

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def check_fairness(low: bool, error: float, found: list[Tensor]) -> None:
    """Raises UnfairError unless `found` are right numbers, computed in low precision if they should be."""
    if not error < WRONG_ERROR:
        raise UnfairError(f"wrong numbers: relative error {error:.2g} against eager float32")
    if low and error < FLOAT32_ERROR:
        raise UnfairError(f"ran in float32: relative error {error:.2g} against eager float32")
    parts = [chunk for f in found for chunk in chunks(f)]
    nonzero = sum(int(chunk.count_nonzero()) for chunk in parts)
    denormal = sum(int(((c != 0) & (c.abs() < torch.finfo(torch.float32).tiny)).sum()) for c in parts)
    if denormal > nonzero / 100:
        raise UnfairError(f"{denormal} of {nonzero} numbers are denormal: arithmetic on them is many times slower")
