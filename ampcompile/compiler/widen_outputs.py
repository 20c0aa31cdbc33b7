"""Return low-precision results of the outermost compiled callable in float32 if no autocast is open around the call.

The caller can then pass them to anything: a loss, an eager layer, NumPy. Low precision stays between graphs of one
call, as in eager autocast, between nested compiled callables, and between stages of a pipeline.

The cast is part of the graph that computes the result: at the end of a frame Dynamo knows the frame's results, and
guards separate calls that widen from those that don't. If a graph finds, when it runs, that another frame than the
outermost callable gets its results, it casts back, without loss. `widen_nested` casts the results that no graph has
cast, and those that share memory, since it sees all of them together.
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
from ampcompile.passes.graph import Cast, note
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
    """Call `compiled` under autocast of type `low`; if `widening`, return its low-precision results in float32.

    `module`: the module whose method it is, if any.
    """
    outer = current_call.low_dtype, current_call.widens
    widening = widening and not _is_sent_on()
    try:
        current_call.low_dtype, current_call.widens, current_call.widened = low, widening, False
        # Tensors that the call puts into its arguments are results; only those from before it are the caller's.
        early = pytree.arg_tree_leaves(*args, **kwargs) if widening and _may_change((*args, *kwargs.values())) else None
        result = [compiled(*args, **kwargs)]
        if not widening or current_call.widened or (isinstance(result[0], torch.Tensor) and result[0].dtype != low):
            return result[0]
        existing = pytree.arg_tree_leaves(*args, **kwargs) if early is None else early
        return Widening(low, lambda: (*existing, *_state(module))).of(result)
    finally:
        current_call.low_dtype, current_call.widens = outer


def _may_change(arguments: Iterable[Any]) -> bool:
    """True if the call may put tensors into one of its arguments."""
    return any(
        type(argument) not in HOLD_NO_TENSORS and (isinstance(argument, _CHANGEABLE) or is_dataclass(argument))
        for argument in arguments
    )


def _is_sent_on() -> bool:
    """True if the caller is a stage of `torch.distributed.pipelining`, except the last: stages send results on."""
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
    """Marker for an output cast in Dynamo's graph."""
    return tensor.to(torch.float32)


def widen_returns(frame: frame_returns.Frame) -> None:
    """At the end of a frame of the outermost callable, widen results computed in the call's low type to float32."""
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
    """True if no other result of the call needs widening, provided the results have the dtypes that Dynamo saw."""
    seen: tuple[torch.dtype | None, ...]
    """Those dtypes; None for results that aren't tensors."""


def find_leaving(original: GraphModule, captured: GraphModule) -> LeavingResults | None:
    """The results that leave a graph widened, or None; marks the captured graph's casts as ours."""
    results = original.graph.output_node().args[0]
    indices = [i for i, result in enumerate(results) if getattr(result, "target", None) is widen]
    if not indices:
        return None
    captured_results = captured.graph.output_node().args[0]
    for cast in {captured_results[i]: None for i in indices}:
        note(cast, cast=Cast("output", BECAUSE))
    low = _value(captured_results[indices[0]].args[0]).dtype
    return LeavingResults(tuple(indices), low, results[indices[0]].meta["amp_note"], _dtypes(captured))


def _dtypes(gm: GraphModule) -> tuple[torch.dtype | None, ...]:
    values = map(_value, gm.graph.output_node().args[0])
    return tuple(value.dtype if isinstance(value, torch.Tensor) else None for value in values)


def _value(node: Any) -> Any:
    """The fake value of a captured node, or of a node of Dynamo's."""
    meta = getattr(node, "meta", {})
    return meta.get("val", meta.get("example_value"))


def find_still_leaving(gm: GraphModule) -> LeavingResults | None:
    """The results of a rewritten graph that leave the call widened; passes may have changed dtypes of others."""
    leaving: LeavingResults | None = gm.meta.get(LEAVING)
    return None if leaving is None else replace(leaving, all=leaving.all and leaving.seen == _dtypes(gm))


def is_outermost(frame: FrameType | None, code: CodeType | None = None) -> bool:
    """True if `call`, in which a frame runs, returns the frame's result; `code`: that of a frame not yet running.

    It does if each frame between the two returns its callee's result, as those of this package and of torch do (layers
    excepted), and those that end by calling the code after a graph break.
    """
    while frame is not None and (caller := frame.f_code) is not call.__code__:
        if not _HANDS_ON[caller.co_filename] and caller is not code and id(caller) not in _CALLS_OF_MODULES:
            if code is not None and not _resumes(code, caller):
                return False
            code = caller
        frame = frame.f_back
    return frame is not None


class _HandsOn(dict[str, bool]):
    """Cached test if functions of a file return their callee's result: ours and torch's do, except layers."""

    def __missing__(self, filename: str) -> bool:
        ours, torchs = (str(Path(module.__file__ or "").parent) + "/" for module in (dtypes, torch))
        layers = filename.startswith(f"{torchs}nn/modules/")
        self[filename] = not layers and filename.startswith((ours, torchs, "<eval_with_key>"))
        return self[filename]


_HANDS_ON = _HandsOn()
# They return their callee's result if there are no hooks: hooks run in an inner function.
_CALLS_OF_MODULES = {id(f.__code__) for f in frame_returns.CALLS_OF_MODULES}


def _resumes(code: CodeType, caller: CodeType) -> bool:
    """True if `code` is the function that Dynamo made of the code after a graph break in `caller`."""
    if not code.co_name.startswith(RESUMED) or code.co_filename != caller.co_filename:
        return False
    return _function_of(code.co_name) == _function_of(caller.co_name)


def _function_of(name: str) -> str:
    """The name of the function from which Dynamo took a frame's code."""
    return name.removeprefix(RESUMED).rpartition("_at_")[0] if name.startswith(RESUMED) else name
