"""`profile_step`: where the time of a step goes, what limits it, and what was found faster by trying it."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ampcompile.errors import OptionError, first_line
from ampcompile.insight.ask import DeferredCall, check_arguments
from ampcompile.torch_private import compilations, marks

from . import time_call
from .trace import KINDS, Memory, Trace, record, record_memory

WAYS = {'mode="reduce-overhead"': {"triton.cudagraphs": True}, "cpp_wrapper=True": {"cpp_wrapper": True}}
"""Arguments and options of torch.compile that may spare the host, with the settings of Inductor that they stand for"""
BUSY = 0.9  # the share of the wall for which a GPU works, from which on it limits the step
FASTER = 0.95  # the share of a step's time above which another way isn't worth a change
NEXT = {
    "products": "python -m ampcompile doctor says which types are fast on this machine",
    "casts": "ampcompile.explain names them",
    "step": "an optimizer of ampcompile.optim has a fused step",
    "rest": "compile what isn't yet, such as the loss",
}
"""One thing to try where most of a step's time is of that kind"""
LESS = {
    "weights": 'parameters of bfloat16 with masters="remainder8" take 3 bytes for 4',
    "gradients": "zero_grad() frees them; those of bfloat16 parameters take half",
    "states": 'states="8bit" of ampcompile.optim takes 1 byte for 4',
    "copies": 'options={"weights": "every_call"} keeps none, and is slower',
    "others": "torch.cuda.memory_snapshot() has them",
    "kept": 'ampcompile.explain lists what is kept for backward; options={"saved": "fp8"} keeps most of it in half',
}
"""One way to less memory, by the kind that most of it is"""
WARM_UP, ROUNDS = 4, 3
"""Calls before the clock starts (CUDA graphs are recorded in the second and third), and medians of rounds"""


@dataclass(frozen=True)
class Tried:
    """Another way to run the step: `seconds` of one by the wall, or the reason that it can't run."""

    seconds: float = 0.0
    failed: str = ""
    skipped: str = ""
    """Why Inductor leaves a graph out of CUDA graphs; the others are in them"""


@dataclass(frozen=True)
class StepProfile:
    """Times of one step in seconds; `str` is a table, and a sentence that says what limits the step.

    `wall`: by the clock, without a profiler. `trace`: the GPU's time and launches, what it is spent on. `tried`: other
    ways, by name; empty where none can help. `memory`: where the step needs most of it, and what that is.
    """

    wall: float
    trace: Trace
    tried: Mapping[str, Tried] = field(default_factory=dict)
    memory: Memory | None = None

    @property
    def busy(self) -> float:
        """The share of the wall in which the GPU works; 0 without one."""
        return min(1.0, self.trace.busy / self.wall)

    @property
    def host_limits(self) -> bool:
        """True if a GPU waits for the host."""
        return 0 < self.busy < BUSY

    @property
    def advice(self) -> str:
        """A sentence: what limits the step, and what to try or, where other ways were tried, what was faster."""
        kind = max(KINDS, key=lambda kind: self.trace.seconds[kind])
        share = self.trace.seconds[kind] / (self.trace.total or 1.0)
        if not self.host_limits:
            of = f"the GPU limits this step (busy {self.busy:.0%}), " if self.busy else ""
            verb = "take" if kind.endswith("s") else "takes"
            return f"{of}{'the ' * (kind == 'rest')}{kind} {verb} {share:.0%} of its time; next: {NEXT[kind]}"
        outcomes = []
        for name, tried in self.tried.items():
            because = f" (it skips graphs: {tried.skipped})" if tried.skipped else ""
            if tried.failed:
                outcomes.append(f"{name} fails: {tried.failed}")
            elif tried.seconds < FASTER * self.wall:
                outcomes.append(f"{name} runs it in {_ms(tried.seconds)} instead of {_ms(self.wall)}{because}")
                break
            else:
                outcomes.append(f"{name} is no faster, {_ms(tried.seconds)} instead of {_ms(self.wall)}{because}")
        said = "; ".join(outcomes) or "nothing was tried; next: ampcompile.capture_step"
        return f"the host limits this step (GPU busy {self.busy:.0%}): {said}"

    @property
    def memory_advice(self) -> str:
        """Sentences: in which phase the peak is, where its bytes are, what takes less there, and of most of them."""
        if (memory := self.memory) is None:
            return ""
        kinds = memory.held | {"kept": memory.kept}
        parts = ", ".join(f"{name} {_mb(size)}" for name, size in memory.held.items())
        most = max(kinds, key=lambda kind: kinds[kind])
        less = ", ".join(f"{option} {_mb(size)}" for option, size in memory.less.items())
        return (
            f"memory: {_mb(memory.total)} at the peak, in {'the ' * (memory.phase == 'step')}{memory.phase}: {parts}, "
            f"made by the step {_mb(memory.made)} ({_mb(memory.kept)} where backward begins); "
            f"{'less there, counted: ' * bool(less)}{less}{'; ' * bool(less)}next: {LESS[most]}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "advice": self.advice}

    def __str__(self) -> str:
        return "\n\n".join(filter(None, (table({"": self}), self.advice, self.memory_advice)))


def table(profiles: Mapping[str, StepProfile]) -> str:
    """A line for each profile, by name; a GPU's columns where there is one."""
    from ampcompile.insight.show import render_table  # it imports rich, which a GPU's machine may lack

    gpu = any(profile.busy for profile in profiles.values())
    headings = ["", "wall", *(["on the GPU", "idle", "launches"] if gpu else []), *KINDS]
    rows = []
    for name, profile in profiles.items():
        trace, total = profile.trace, profile.trace.total or 1.0
        idle = max(0.0, profile.wall - trace.busy)
        device = [_ms(trace.total), _ms(idle), f"{trace.launches:.0f}"] if gpu else []
        shares = [f"{trace.seconds[kind] / total:.0%}" for kind in KINDS]
        rows.append([name, _ms(profile.wall), *device, *shares])
    return render_table(headings, rows)


def _mb(size: int) -> str:
    return f"{size / 1e6:.3g} MB"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


@marks.run_untraced
def profile_step(
    step: Callable[..., Any], *arguments: Any, steps: int = 5, try_others: bool = True
) -> Callable[..., StepProfile]:
    """Time a step: `profile_step(step)(*args, **kwargs)` runs yours some 30 times, and returns a `StepProfile`.

    `step` is a function that does all of one training step, or calls a model; what is compiled in it is run as it is.
    Each run is a real one: weights and the scaler change as in as many steps. `steps`: in each round by the clock.
    `try_others`: if the host limits the step on a GPU, everything compiled in the process is compiled again, with CUDA
    graphs and, if these don't help, with Inductor's C++ wrapper, to see what that gives; afterwards, at its next call,
    as it was. On a CPU there are no GPU columns, `casts` are those that no kernel of Inductor took in, and nothing is
    tried. Last comes memory: a run more says in which phase it is most, and of what; parameters and optimizers of the
    whole process count. Raises OptionError, and the errors of `step`.

    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    >>> def step(x):
    ...     compiled(x).square().mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> found = ampcompile.profile_step(step)(x)
    >>> print(found)
        wall      products  casts  step  rest
        ... ms    ...%      ...%   ...%  ...%
    <BLANKLINE>
    ... of its time; next: ...
    <BLANKLINE>
    memory: ... MB at the peak, in ...; next: ...
    """
    check_arguments("ampcompile.profile_step", step, arguments, "steps=3")
    if steps < 1:
        raise OptionError(f"ampcompile.profile_step got steps={steps}, expected a number above 0.")

    def answer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepProfile:
        return measure(lambda: step(*args, **kwargs), steps, try_others)

    return DeferredCall(step, answer, "ampcompile.profile_step")


def measure(call: Callable[[], object], steps: int = 5, try_others: bool = True) -> StepProfile:
    """The profile of a call: see `profile_step`."""
    from ampcompile.compiler.backend import warn_of_missing_units  # here: it imports Dynamo

    wall = _wall(call, steps)
    warn_of_missing_units()
    trace, tried = record(call), dict[str, Tried]()
    if try_others and StepProfile(wall, trace).host_limits:
        for name, settings in WAYS.items():
            tried[name] = _try(call, settings, steps)
            if not tried[name].failed and tried[name].seconds < FASTER * wall:
                break
    return StepProfile(wall, trace, tried, record_memory(call))


def _try(call: Callable[[], object], settings: Mapping[str, Any], steps: int) -> Tried:
    def marked() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        call()

    with compilations.compiled_anew(settings) as reasons:
        try:
            seconds = _wall(marked, steps)
        except Exception as error:  # whatever a compiler or a graph raises is the answer
            return Tried(failed=f"{type(error).__name__}: {first_line(error)}")
    return Tried(seconds, skipped=reasons[0].splitlines()[0] if reasons else "")


def _wall(call: Callable[[], object], steps: int) -> float:
    """Seconds of one call, the median of some rounds; what it needs to warm up isn't counted."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for _ in range(WARM_UP):
        call()
    return statistics.median(time_call(device, call, steps) for _ in range(ROUNDS))
