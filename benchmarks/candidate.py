"""One peer on one work, in a process of its own: compiled, checked, then timed round by round."""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.timing import time_call
from ampcompile.timing.trace import record
from benchmarks.architectures import build
from benchmarks.memory import forget_peak, peak_bytes
from benchmarks.numbers import relative_error
from benchmarks.peers import PEERS
from benchmarks.plans import CALL, Work


class Calls(NamedTuple):
    """How many calls come before the first round and each kind's, and how many are looked at after the last."""

    first: int = 8
    """CUDA graphs are recorded in the second to fourth."""
    before: int = 3
    profiled: int = 3
    on_host: int = 8


REHEARSED = Calls(5, 1, 1, 1)


class Steps(NamedTuple):
    """How a training step goes: AdamW on the same batch each time."""

    clip: bool = True
    scaled: bool = False
    """Scale the loss."""
    accumulate: int = 1
    """Forward and backward passes before the update."""
    by_torch: bool = False
    """With torch's optimizer step for every peer, not amp's own."""


KINDS = {
    "step": Steps(clip=False, by_torch=True),
    "clipped step": Steps(),
    "scaled step": Steps(scaled=True),
    "step of 8 batches": Steps(accumulate=8),
}


class TrainingStep:
    """Forward, backward and update. With our own scaler where `ours`: it takes the step also of an unscaled loss."""

    def __init__(self, model: nn.Module, forward: Callable[[], Tensor], steps: Steps, ours: bool, device: str) -> None:
        self.forward, self.steps, self.params = forward, steps, list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-4, fused=True)
        if ours and self.params[0].dtype == torch.bfloat16:
            ampcompile.keep_masters(self.optimizer, "remainder8", states="8bit")
        kind: Any = ampcompile.GradScaler if ours and not steps.by_torch else torch.amp.GradScaler
        self.scaler = kind(device, enabled=steps.scaled)

    def __call__(self) -> Tensor:
        for _ in range(self.steps.accumulate):
            loss = self.forward()
            self.backward(loss)
        self.update()
        return loss.detach()

    def backward(self, loss: Tensor) -> None:
        """Add up gradients."""
        self.scaler.scale(loss / self.steps.accumulate).backward()

    def update(self) -> None:
        """Clip, update the weights and the scale."""
        if self.steps.clip and isinstance(self.scaler, ampcompile.GradScaler):
            self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        elif self.steps.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.params, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class Candidate:
    """A peer and its own copy of the model: `prepare` comes first, then for each kind `begin`, rounds and `end`."""

    def __init__(self, work: Work, peer: str, device: str) -> None:
        self.work, self.peer, self.device = work, PEERS[peer], device
        self.dtype: torch.dtype = getattr(torch, work.dtype)
        self.calls = REHEARSED if work.rehearsed else Calls()
        if device == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32, as users who want speed have it

    def prepare(self) -> dict[str, Any]:
        """Compile. Returns the seconds that took and, of a call, the error against eager float32; of training, the
        losses of the first steps.
        """
        model, inputs = build(self.work.model, self.work.batch, self.work.length, self.work.training)
        model, inputs = model.to(self.device), tuple(x.to(self.device) for x in inputs)
        if self.work.channels_last:
            last: Any = {"memory_format": torch.channels_last}
            model, inputs = model.to(**last), tuple(x.contiguous(**last) if x.dim() == 4 else x for x in inputs)
        with torch.no_grad():
            exact = [] if self.work.training else [model(*inputs)]
        start = perf_counter()
        run = self.peer.compile(model, self.dtype)
        convert = self.peer.precision == "converted"
        self.inputs = tuple(x.to(self.dtype) if convert and x.is_floating_point() else x for x in inputs)
        self.model, self.run = model, run
        figures: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
        self._start(self.work.kinds[0])
        if exact:
            figures["error"] = relative_error([self.call()], exact)
        # Read at once: a CUDA graph writes its next result in the same place.
        results = [float(self.call().sum()) for _ in range(self.calls.first)]
        if self.work.training:
            figures["losses"] = results
        figures["compile_seconds"] = perf_counter() - start
        forget_peak(self.device)  # peers that share a GPU need the memory
        return figures

    def begin(self, kind: str) -> float:
        """Warm up, start the peak of memory anew; returns the seconds of one call."""
        self._start(kind)
        self.round(self.calls.before)
        forget_peak(self.device)
        return self.round(1)

    def round(self, calls: int) -> float:
        """Seconds a call, over so many calls."""
        return time_call(self.device, self.call, calls)

    def end(self) -> dict[str, Any]:
        """The figures that are taken once, after the last round."""
        figures: dict[str, Any] = {"peak_bytes": peak_bytes(self.device)}
        if self.device == "cuda":
            trace = record(self.call, self.calls.profiled)
            figures |= {"gpu_seconds": trace.total, "launches": trace.launches, "busy_seconds": trace.busy}
            figures["shares"] = {kind: seconds / trace.total for kind, seconds in trace.seconds.items()}
        figures["host_seconds"] = self._time_host(self.calls.on_host)
        return figures

    def _start(self, kind: str) -> None:
        ours = self.peer.compiler == "amp"
        self.call: Callable[[], Tensor] = self._infer
        if kind != CALL:
            step = TrainingStep(self.model, self._forward, KINDS[kind], ours, self.device)
            self.call = ampcompile.capture_step(step, step.optimizer) if self.peer.whole else step

    def _forward(self) -> Tensor:
        if self.peer.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with self.peer.open_context(self.device, self.dtype):
            return self.run(*self.inputs)

    def _infer(self) -> Tensor:
        with torch.no_grad():
            return self._forward()

    def _time_host(self, calls: int) -> list[float]:
        """Seconds for which the host is busy with forward, backward and update by themselves, or with a call; the
        device's work is waited for in between. Medians of some.
        """
        parts: list[list[float]] = []
        for _ in range(calls):
            if isinstance(self.call, TrainingStep):
                step, losses = self.call, list[Tensor]()
                acts = [lambda: losses.append(step.forward()), lambda: step.backward(losses[0]), step.update]  # noqa: B023
                parts.append([self._time(act) for act in acts])
            else:
                parts.append([self._time(self.call)])
        return [median(part) for part in zip(*parts, strict=True)]

    def _time(self, act: Callable[[], object]) -> float:
        self._wait()
        start = perf_counter()
        act()
        return perf_counter() - start

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
