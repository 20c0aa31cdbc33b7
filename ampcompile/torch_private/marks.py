"""What is told of our functions: to Dynamo, not to trace them; to profiles and the structured trace; to `inspect`.

Dynamo's markers are set without importing it first, which takes seconds. A region in a profile takes 0.4 us a call
while no profiler runs.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._profiler import _RecordFunctionFast
from torch._logging import _internal

_Takes = ParamSpec("_Takes")
_Gives = TypeVar("_Gives")


def mark_constant(function: Any) -> None:
    """Mark a function as `torch.compiler.assume_constant_result` does, which loads Dynamo (torch 2.11 to 2.15)."""
    function._dynamo_marked_constant = True


run_untraced = torch._disable_dynamo  # `torch.compiler.disable`, but the first call loads Dynamo (2.11 to 2.15)


def pass_over(function: Any) -> None:
    """Exclude a function of ours from Dynamo's tracing, as torch's own are, but not the functions that it calls.

    Dynamo looks at each call in a compiled function after a graph break, also in a backward there, which calls what
    compiled autograd compiles. `dynamo.set_frame_callback(None)` stops that for a while, for the called
    functions too. This one loads Dynamo: call it when something was compiled.
    """
    from torch._dynamo import eval_frame

    eval_frame.skip_code(function.__code__)


profiling: Callable[[], bool] = torch.autograd._profiler_enabled
region = _RecordFunctionFast  # opens a region of a name, as `with region("amp: refresh"):`


def memory_events(profile: Any) -> Iterator[tuple[int, str, int, bool]]:
    """Yield what a profile with `profile_memory` has of memory: (nanosecond, "", bytes that come or go, on a GPU?).

    Spans of the host come as (nanosecond, name, their length, False).
    """
    for event in profile.profiler.kineto_results.events():
        on_gpu = event.device_type() == torch.autograd.DeviceType.CUDA
        if event.name() == "[memory]":
            yield event.start_ns(), "", event.nbytes(), on_gpu
        elif not on_gpu:
            yield event.start_ns(), event.name(), event.duration_ns(), False


def named(name: str) -> Callable[[Callable[_Takes, _Gives]], Callable[_Takes, _Gives]]:
    """Return a decorator: profiles show each call of the function as a region of this name."""

    def decorate(function: Callable[_Takes, _Gives]) -> Callable[_Takes, _Gives]:
        @functools.wraps(function)
        def in_region(*args: _Takes.args, **kwargs: _Takes.kwargs) -> _Gives:
            with region(name):
                return function(*args, **kwargs)

        return in_region

    return decorate


def traced() -> bool:
    """Return True if a structured trace is being written (`TORCH_TRACE`)."""
    return bool(_internal.trace_log.handlers)


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Add an artifact of the graph being compiled to the structured trace, if there is one."""
    _internal.trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload)


def tell_sources(package: str, folders: Iterable[str]) -> None:
    """Tell `inspect` the names of the modules that lie in a package's folders, and in those of its sub-packages.

    `torch.library` asks for the module of each op's definition, and `inspect` then looks at every module that is
    loaded: nearly half of the time that our backend takes to import.
    """
    known: dict[str, str] = getattr(inspect, "modulesbyfile", {})  # undocumented: without it, the search stays
    for folder in (Path(folder).absolute() for folder in folders):
        for path in folder.rglob("*.py"):
            if path.stem != "__init__":
                known[str(path)] = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
