"""Time the user's own model under eager autocast, Inductor with autocast, and amp, in turn; medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ampcompile.compiler.ambient import device_of_arguments
from ampcompile.compiler.module_names import modules_of
from ampcompile.config import Options
from ampcompile.dtypes import short_name
from ampcompile.explaining.preserve_state import preserve_state
from ampcompile.explaining.text import render_table
from ampcompile.passes.analysis.product_cost import time_call
from ampcompile.torch_private import pytree
from ampcompile.weights import invalidate

from .progress import lines
from .target import Target

ROUNDS = 5  # at least
ROUND = 0.05  # seconds that the fastest candidate's share of a round lasts, at least


@dataclass
class Times:
    """Times of one candidate: `seconds` of one call, one for each round; or the error that it raised."""

    name: str
    first_call: float = 0.0
    seconds: list[float] = field(default_factory=list)
    failed: str = ""

    @property
    def median(self) -> float:
        """Seconds of one call."""
        return statistics.median(self.seconds) if self.seconds else 0.0


@dataclass(frozen=True)
class Results:
    """The results of a benchmark. "training" is forward and backward, with weights changed since the last call."""

    work: str
    device: str
    dtype: str
    candidates: tuple[Times, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "candidates": [{**asdict(c), "median": c.median} for c in self.candidates]}


class _Candidate:
    def __init__(self, times: Times, call: Callable[[], Any], device: str) -> None:
        self.times, self.call, self.device = times, call, device

    def seconds(self, calls: int = 1) -> float:
        def repeat() -> None:
            for _ in range(calls):
                self.call()

        return time_call(self.device, repeat) / calls


def bench(
    target: Target, options: dict[str, Any], gradients: bool, seconds: float, console: Console | None = None
) -> Results:
    """Time all candidates for about `seconds` in total, after compiling and warming up each."""
    modules = list(modules_of(target.f))
    parameters = [p for module in modules for p in module.parameters()]
    device = parameters[0].device.type if parameters else device_of_arguments(target.args, target.kwargs)
    training = gradients and any(p.requires_grad for p in parameters) and all(m.training for m in modules)
    dtype = Options.parse(options).dtype or torch.get_autocast_dtype(device)
    autocast = lambda: torch.autocast(device, dtype)  # noqa: E731
    amp = torch.compile(target.f, backend="amp", options=options)
    ways: tuple[tuple[str, Any, Callable[[], AbstractContextManager[Any]]], ...] = (
        ("eager autocast", target.f, autocast),
        ("Inductor with autocast", torch.compile(target.f), autocast),
        ("amp", amp, nullcontext),
    )
    step = _training_step if training else _inference

    def changed() -> None:
        for module in modules if training else ():
            invalidate(module)

    candidates = [_Candidate(Times(name), step(target, f, around, changed), device) for name, f, around in ways]
    with preserve_state(target.f, target.args, target.kwargs), _progress(console) as progress:
        _measure(candidates, seconds, progress)
    work = "training" if training else "inference"
    return Results(work, device, short_name(dtype), tuple(c.times for c in candidates))


def _inference(target: Target, f: Any, around: Any, changed: Any) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad(), around():
            return f(*target.args, **target.kwargs)

    return call


def _training_step(target: Target, f: Any, around: Any, changed: Callable[[], Any]) -> Callable[[], None]:
    leaves: list[torch.Tensor] = [t for m in modules_of(target.f) for t in m.parameters()]
    leaves += [t for t in pytree.arg_tree_leaves(*target.args, **target.kwargs) if isinstance(t, torch.Tensor)]

    def call() -> None:
        changed()
        with around():
            result = f(*target.args, **target.kwargs)
            tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
            scalar = next((t for t in tensors if t.numel() == 1), None)
            loss = scalar if scalar is not None else torch.stack([t.float().square().mean() for t in tensors]).sum()
        loss.backward()
        for leaf in leaves:
            leaf.grad = None

    return call


def _measure(candidates: list[_Candidate], seconds: float, progress: Progress) -> None:
    running = list(candidates)
    task = progress.add_task("compiling", total=len(candidates))

    def say(words: str) -> None:
        progress.update(task, description=words)
        if not progress.disable and not progress.console.is_terminal:
            lines(progress.console)(words)

    for candidate in candidates:
        say(f"compiling: {candidate.times.name}")
        try:
            candidate.times.first_call = candidate.seconds()
            candidate.seconds(2)
        except Exception as error:  # any error of a compiler is that candidate's result
            candidate.times.failed = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            running.remove(candidate)
        progress.advance(task)
    if not running:
        return
    calls = max(1, round(ROUND / min(candidate.seconds() for candidate in running)))
    say(f"measuring for {seconds:g} s")
    progress.update(task, total=seconds, completed=0)
    start, rounds = time.perf_counter(), 0
    while rounds < ROUNDS or time.perf_counter() - start < seconds:
        for candidate in running[:: -1 if rounds % 2 else 1]:
            candidate.times.seconds.append(candidate.seconds(calls))
        rounds += 1
        progress.update(task, completed=time.perf_counter() - start)


def _progress(console: Console | None) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn())
    return Progress(*columns, console=console, transient=True, disable=console is None)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def table(results: Results) -> str:
    """The results as text."""
    baseline = results.candidates[0].median
    rows = [
        (
            c.name,
            f"{_ms(c.median)} ms",
            f"{_ms(min(c.seconds))} to {_ms(max(c.seconds))}",
            f"{baseline / c.median:.2f}" if baseline else "",
            f"{c.first_call:.1f} s",
        )
        for c in results.candidates
        if not c.failed
    ]
    failures = "".join(f"\n{c.name} failed: {c.failed}" for c in results.candidates if c.failed)
    headings = ("", "median of one call", "range", "times as fast as eager", "first call")
    about = "forward and backward, weights new in each call" if results.work == "training" else "inference"
    return f"{about}, {results.device} in {results.dtype}\n\n{render_table(headings, rows)}{failures}"
