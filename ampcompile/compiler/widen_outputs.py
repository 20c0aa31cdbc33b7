"""Low-precision results leave the outermost compiled callable in float32 where no autocast is open around the call.

What follows the call may then be anything: a loss, an eager layer, NumPy. Pieces between graph breaks hand each other
low precision, as in eager autocast; so do compiled callables inside others, and stages of a pipeline.

The cast is part of the graph that computes what is returned: at the end of a frame Dynamo tells what it returns, and
guards tell calls that widen from those that don't. Where a graph finds, when it runs, that something else than the
outermost callable gets its results, it casts back, which loses nothing. What no graph has cast, `widen_nested` does; so
it does with results that share memory, since it sees all of them together.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.fx import GraphModule

from ampcompile import dtypes
from ampcompile.passes.graph import Cast
from ampcompile.torch_private import frame_returns, pytree
from ampcompile.torch_private.frame_returns import RESUMED

from . import call_state
from .call_state import current_call
from .unmatched import is_inside
from .widen_nested import HOLD_NO_TENSORS, Widening

LEAVING = "amp_leaving"  # in `gm.meta`, a graph's `LeavingResults`
BECAUSE = "leaves the compiled call in float32: no autocast is open around it"
_CHANGEABLE = (list, MutableMapping, deque, set)


def call(compiled: Callable[..., Any], args: Any, kwargs: Any, low: torch.dtype, widening: bool, module: Any) -> Any:
    """Call what was compiled under autocast of type `low`; if `widening`, what it returns leaves it in float32.

    `module`: the one it is of, if any.
    """
    outer = current_call.low_dtype, current_call.widens
    widening = widening and not _is_sent_on()
    try:
        current_call.low_dtype, current_call.widens, current_call.widened = low, widening, False
        there = pytree.arg_tree_leaves(*args, **kwargs) if widening and _may_change((*args, *kwargs.values())) else None
        result = [compiled(*args, **kwargs)]
        if not widening or current_call.widened or (isinstance(result[0], torch.Tensor) and result[0].dtype != low):
            return result[0]
        given = pytree.arg_tree_leaves(*args, **kwargs) if there is None else there
        return Widening(low, lambda: (*given, *_state(module))).of(result)
    finally:
        current_call.low_dtype, current_call.widens = outer


def _may_change(arguments: Iterable[Any]) -> bool:
    """Whether the call may put tensors into one of its arguments."""
    return any(
        type(argument) not in HOLD_NO_TENSORS and (isinstance(argument, _CHANGEABLE) or is_dataclass(argument))
        for argument in arguments
    )


def _is_sent_on() -> bool:
    """Whether the caller is a stage of `torch.distributed.pipelining` but the last: it sends what it gets on."""
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    if stages is None:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None and is_inside(frame.f_code.co_filename):
        if frame.f_code.co_filename == stages.__file__:
            return not getattr(frame.f_locals.get("self"), "is_last", True)
        frame = frame.f_back
    return False


def _state(module: Any) -> Iterable[torch.Tensor]:
    return (*module.parameters(), *module.buffers()) if isinstance(module, torch.nn.Module) else ()


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """What stands for the cast in Dynamo's graph."""
    return tensor.to(torch.float32)


def widen_returns(frame: frame_returns.Frame) -> None:
    """At the end of a frame of the outermost callable: what it computes in the call's low type leaves in float32."""
    if current_call.low_dtype is None or not is_outermost(sys._getframe(), frame.f_code):
        return
    tensors, are_all = frame_returns.computed_and_returned(frame, current_call.low_dtype)
    if tensors:
        frame_returns.guard_on(frame, call_state.__name__, "current_call", "widens")
        if current_call.widens:
            frame_returns.replace(frame, tensors, widen, are_all)


@dataclass(frozen=True)
class LeavingResults:
    """The results of a graph, by index, that leave the call widened from `dtype`."""

    indices: tuple[int, ...]
    dtype: torch.dtype
    all: bool
    """Nothing else that the call returns is to be widened, if the results have the dtypes that Dynamo saw."""
    seen: tuple[torch.dtype | None, ...]
    """Those dtypes; None for what is no tensor."""


def find_leaving(original: GraphModule, captured: GraphModule) -> LeavingResults | None:
    """What leaves a graph of Dynamo's widened, None if nothing does; in the captured graph the casts become ours."""
    results = original.graph.output_node().args[0]
    indices = [i for i, result in enumerate(results) if getattr(result, "target", None) is widen]
    if not indices:
        return None
    made = captured.graph.output_node().args[0]
    for cast in {made[i]: None for i in indices}:
        cast.meta["amp_cast"] = Cast("output", BECAUSE)
    low = _value(made[indices[0]].args[0]).dtype
    return LeavingResults(tuple(indices), low, results[indices[0]].meta["amp_note"], _dtypes(captured))


def _dtypes(gm: GraphModule) -> tuple[torch.dtype | None, ...]:
    values = map(_value, gm.graph.output_node().args[0])
    return tuple(value.dtype if isinstance(value, torch.Tensor) else None for value in values)


def _value(node: Any) -> Any:
    """The fake value of a captured node, or of one of Dynamo's."""
    meta = getattr(node, "meta", {})
    return meta.get("val", meta.get("example_value"))


def find_still_leaving(gm: GraphModule) -> LeavingResults | None:
    """The results of a rewritten graph that leave the call; its passes may have changed the dtypes of others."""
    leaving: LeavingResults | None = gm.meta.get(LEAVING)
    return None if leaving is None else replace(leaving, all=leaving.all and leaving.seen == _dtypes(gm))


def is_outermost(frame: FrameType | None, code: CodeType | None = None) -> bool:
    """Whether what a frame returns is what the call of ours that it is in returns; `code`: of a frame not there yet.

    So it is if between them are only frames of torch, and frames that end by calling what follows a graph break.
    """
    while frame is not None and (caller := frame.f_code) is not call.__code__:
        if not _HANDS_ON[caller.co_filename] and caller is not code and id(caller) not in _CALLS_OF_MODULES:
            if code is not None and not _resumes(code, caller):
                return False
            code = caller
        frame = frame.f_back
    return frame is not None


class _HandsOn(dict[str, bool]):
    """Whether functions of a file return what the function that they call returns: torch's but layers, and ours."""

    def __missing__(self, filename: str) -> bool:
        ours, torchs = (str(Path(module.__file__ or "").parent) + "/" for module in (dtypes, torch))
        layers = filename.startswith(f"{torchs}nn/modules/")
        self[filename] = not layers and filename.startswith((ours, torchs, "<eval_with_key>"))
        return self[filename]


_HANDS_ON = _HandsOn()
# They do so without hooks: those run in a function inside.
_CALLS_OF_MODULES = {id(f.__code__) for f in frame_returns.CALLS_OF_MODULES}


def _resumes(code: CodeType, caller: CodeType) -> bool:
    """Whether Dynamo made `code` of what follows a graph break in `caller`."""
    if not code.co_name.startswith(RESUMED) or code.co_filename != caller.co_filename:
        return False
    return _function_of(code.co_name) == _function_of(caller.co_name)


def _function_of(name: str) -> str:
    """The function that Dynamo took a frame's code from."""
    return name.removeprefix(RESUMED).rpartition("_at_")[0] if name.startswith(RESUMED) else name
