"""Load the user's own model, and time it in float32, under autocast, eagerly and through Inductor, and under amp."""

import importlib
import inspect
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from ampcompile.compiler.ambient import device_type_of
from ampcompile.compiler.backend import warn_of_missing_units
from ampcompile.compiler.module_names import modules_of
from ampcompile.config import Options
from ampcompile.dtypes import short_name
from ampcompile.errors import OptionError, first_line
from ampcompile.insight.call import preserve_state
from ampcompile.insight.show import render_table
from ampcompile.timing import calls_in_a_round, step_profile, take_turns, time_call
from ampcompile.timing.step_profile import StepProfile
from ampcompile.torch_private import pytree
from ampcompile.weights import invalidate

ROUNDS = 5  # at least
ROUND = 0.05  # seconds that the fastest candidate's share of a round lasts, at least
FLOAT32, STOCK, AMP = "Inductor in float32", "Inductor with autocast", "amp"
HOW = {
    "eager float32": "use the model as it is",
    "eager autocast": "use torch.autocast alone",
    FLOAT32: 'leave out backend="amp"',
    STOCK: "use torch.compile(model) under torch.autocast",
}
"""The advice where another candidate is the fastest."""
_RETURNED = "(model, args) or (model, args, kwargs), where args is a tuple or list and kwargs a dict"
_EXPECTED = f"expected {_RETURNED}"


@dataclass(frozen=True)
class Target:
    """A module or function, and the arguments of the call to examine."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: Callable[[Callable[[], Any]], Any] = lambda run: run()
    """Calls a function from a frame that stands where the factory is defined: warnings then name the user's file."""


@dataclass
class Times:
    """Times of one candidate, `seconds` of one call for each round; or the error that it raised."""

    name: str
    first_call: float = 0.0
    seconds: list[float] = field(default_factory=list)
    failed: str = ""
    profile: StepProfile | None = None

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
        candidates = [
            {**asdict(c), "median": c.median, "profile": None if c.profile is None else c.profile.as_dict()}
            for c in self.candidates
        ]
        return {**asdict(self), "candidates": candidates, "advice": advice(self)}


def bench(
    target: Target,
    options: dict[str, Any],
    gradients: bool,
    seconds: float,
    say: Callable[[str], None],
    profile: bool = False,
) -> Results:
    """Time all candidates for about `seconds` in total, after compiling and warming up each; `say` gets each step.

    `profile`: then also look where the time of each goes, and try what may spare amp's the host.
    """
    modules = list(modules_of(target.f))
    parameters = [p for module in modules for p in module.parameters()]
    device = device_type_of(parameters[0] if parameters else None, target.args, target.kwargs)
    training = gradients and any(p.requires_grad for p in parameters) and all(m.training for m in modules)
    dtype = Options.parse(options).dtype or torch.get_autocast_dtype(device)
    autocast = torch.autocast(device, dtype)
    step = _training_step if training else _inference
    candidates = {
        "eager float32": step(target, target.f, nullcontext()),
        "eager autocast": step(target, target.f, autocast),
        FLOAT32: step(target, torch.compile(target.f), nullcontext()),
        STOCK: step(target, torch.compile(target.f), autocast),
        AMP: step(target, torch.compile(target.f, backend="amp", options=options), nullcontext()),
    }
    with preserve_state(target.f, target.args, target.kwargs):
        times = _measure(candidates, device, seconds, say)
        warn_of_missing_units()
        for timing in [timing for timing in times if profile and not timing.failed]:
            say(f"profiling: {timing.name}")
            timing.profile = step_profile.measure(candidates[timing.name], try_others=timing.name == AMP)
    return Results("training" if training else "inference", device, short_name(dtype), times)


def _inference(target: Target, f: Any, around: AbstractContextManager[Any]) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad(), around:
            return f(*target.args, **target.kwargs)

    return call


def _training_step(target: Target, f: Any, around: AbstractContextManager[Any]) -> Callable[[], None]:
    modules = list(modules_of(target.f))
    leaves = [*pytree.tensors_in(target.args, target.kwargs), *(t for module in modules for t in module.parameters())]

    def call() -> None:
        for module in modules:
            invalidate(module)
        with around:
            result = f(*target.args, **target.kwargs)
            tensors = [t for t in pytree.tensors_in(result) if t.requires_grad]
            scalar = next((t for t in tensors if t.numel() == 1), None)
            loss = scalar if scalar is not None else torch.stack([t.float().square().mean() for t in tensors]).sum()
        loss.backward()
        for leaf in leaves:
            leaf.grad = None

    return call


def _measure(
    candidates: dict[str, Callable[[], Any]], device: str, seconds: float, say: Callable[[str], None]
) -> tuple[Times, ...]:
    results = tuple(map(Times, candidates))
    for times in results:
        say(f"compiling: {times.name}")
        try:
            times.first_call = time_call(device, candidates[times.name])
            time_call(device, candidates[times.name], 2)
        except Exception as error:  # any error of a compiler is that candidate's result
            times.failed = f"{type(error).__name__}: {first_line(error)}"
    if running := {times.name: candidates[times.name] for times in results if not times.failed}:
        calls = calls_in_a_round({name: time_call(device, call) for name, call in running.items()}, ROUND)
        say(f"measuring for {seconds:g} s")
        timed = take_turns(lambda name: time_call(device, running[name], calls), running, ROUNDS, seconds)
        for times in results:
            times.seconds = timed.get(times.name, [])
    return results


def advice(results: Results) -> str:
    """A line on what to use: amp, or what was faster in three rounds of four; empty where amp or all others failed."""
    ran = {c.name: c for c in results.candidates if c.seconds}
    if (amp := ran.pop(AMP, None)) is None or not ran:
        return ""
    best = min(ran.values(), key=lambda candidate: candidate.median)
    low, _, high = statistics.quantiles([a / b for a, b in zip(best.seconds, amp.seconds, strict=True)], n=4)
    if high < 1:
        return f"{best.name} is the fastest here, {amp.median / best.median:.2f} times as fast as amp: {HOW[best.name]}"
    rivals = [ran[name] for name in (STOCK, FLOAT32) if name in ran] or [best]
    speeds = ", ".join(f"{rival.median / amp.median:.2f} times as fast as {rival.name}" for rival in rivals)
    if low > 1:
        return f"amp is the fastest here: {speeds}"
    return f"no difference between amp and {best.name} was shown: amp is {speeds}"


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
    headings = ("", "median of one call", "range", f"times as fast as {results.candidates[0].name}", "first call")
    about = "forward and backward, weights new in each call" if results.work == "training" else "inference"
    parts = [f"{about}, {results.device} in {results.dtype}", render_table(headings, rows) + failures, advice(results)]
    if profiles := {c.name: c.profile for c in results.candidates if c.profile is not None}:
        last = profiles[AMP].advice if AMP in profiles else ""
        parts += [f"where the time goes\n\n{step_profile.table(profiles)}", f"amp: {last}" if last else ""]
    return "\n\n".join(filter(None, parts))


def load(spelling: str) -> Target:
    """Call the factory, whose errors propagate, and its model once. Raises OptionError, also if that raises."""
    place, colon, name = spelling.rpartition(":")
    if not (place and colon and name):
        raise OptionError(
            f"found {spelling!r}; expected PACKAGE.MODULE:FACTORY or FILE.py:FACTORY, such as mymodels.gpt:small. "
            "Write the name of a function that takes no arguments after the colon."
        )
    folder, module_name = _of_file(Path(place)) if place.endswith(".py") else ("", place)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # "": modules of the folder that the command runs in
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise OptionError(
            f"found no module {error.name!r}; expected one that Python can import. Run the command in the folder that "
            f"holds {module_name.partition('.')[0]}, or set PYTHONPATH to it."
        ) from error
    factory = getattr(module, name, None)
    if isinstance(factory, torch.nn.Module):
        raise OptionError(
            f"{spelling} is a {type(factory).__name__}; expected a function without arguments that returns {_RETURNED}."
        )
    if not callable(factory):
        functions = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module_name]
        raise OptionError(
            f"{module_name} has no function {name!r}; expected one that it defines: {', '.join(functions) or 'none'}."
        )
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise OptionError(
            f"{spelling} can't be called without arguments ({error}); expected a function that takes none. Write one "
            "that calls it with the arguments you want."
        ) from error
    target = _check(factory(), spelling)
    _call_once(target, spelling)
    code = getattr(inspect.unwrap(factory), "__code__", None)
    origin: dict[str, Any] = {"co_filename": module.__file__ or ""}
    if code is not None:
        origin = {"co_filename": code.co_filename, "co_firstlineno": code.co_firstlineno}
    return replace(target, call=FunctionType(Target.call.__code__.replace(**origin), {}))


def _of_file(path: Path) -> tuple[str, str]:
    """The folder from which to import a file, and its module's name there, with the packages that contain it."""
    if not path.is_file():
        raise OptionError(f"found no file {path}; expected a Python file. Write its path from the current folder.")
    folder, names = path.resolve().parent, [path.stem]
    while (folder / "__init__.py").is_file():
        folder, names = folder.parent, [folder.name, *names]
    return str(folder), ".".join(names)


def _call_once(target: Target, spelling: str) -> None:
    """Call the model once without ampcompile, so that errors in the arguments are reported first."""
    try:
        with preserve_state(target.f, target.args, target.kwargs), torch.no_grad():
            target.f(*target.args, **target.kwargs)
    except Exception as error:  # a model may raise any error
        reason = first_line(error).rstrip(".")
        raise OptionError(
            f"{spelling} returned a model that raises {type(error).__name__} when it is called: {reason}. Expected one "
            "that takes the args and kwargs that come with it; call it in Python to see where it raises."
        ) from error


def _check(made: Any, spelling: str) -> Target:
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        size = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise OptionError(f"{spelling} returned a {type(made).__name__}{size}; {_EXPECTED}.")
    f, args, kwargs = (*made, {})[:3]
    for value, good, what in (
        (f, callable(f), "model"),
        (args, isinstance(args, tuple | list), "args"),
        (kwargs, isinstance(kwargs, dict), "kwargs"),
    ):
        if not good:
            raise OptionError(f"{spelling} returned a {type(value).__name__} as {what}; {_EXPECTED}.")
    return Target(f, tuple(args), kwargs)
