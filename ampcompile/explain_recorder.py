"""Run a call with a backend that records every graph, and lower nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from . import compat_explain
from .backend import Rewritten, rewrite
from .config import Options
from .dtypes import short_name
from .lower import lower
from .passes.graph import placeholders
from .report import Report
from .report_records import GraphRecord
from .report_watch import Watcher
from .untouched import untouched


def recorded(f: Any, options: dict[str, Any], mode: str | None, dynamic: bool | None) -> Callable[..., Report]:
    """What `ampcompile.explain` returns; its arguments are checked here and now."""
    compiled = compat_explain.how_compiled(f)
    chosen = Options.parse(options, mode)
    if compiled is not None:
        f, dynamic = compiled.original, compiled.dynamic if dynamic is None else dynamic
        chosen = _beside(_options_of(compiled), chosen, set(options))

    def explained(*args: Any, **kwargs: Any) -> Report:
        graphs: list[GraphRecord] = []
        backend = _recorder(chosen, graphs)
        with compat_explain.dynamo_as_it_was(backend), untouched(f, args, kwargs), _plain(f):
            torch.compile(f, backend=backend, dynamic=dynamic)(*args, **kwargs)
        return Report(graphs)

    return explained


def _options_of(compiled: compat_explain.Compiled) -> Options:
    backend = compiled.backend
    read = getattr(getattr(backend, "compiler_fn", backend), "amp_options", None)
    return read(**getattr(backend, "kwargs", {})) if read is not None else Options()


def _beside(kept: Options, given: Options, names: set[str]) -> Options:
    """The options a callable was compiled with, with those given by name instead."""
    ours = {f.name: getattr(given, f.name) for f in fields(Options) if f.name in names}
    return replace(kept, **ours, inductor=tuple({**dict(kept.inductor), **dict(given.inductor)}.items()))


@contextlib.contextmanager
def _plain(f: Any) -> Iterator[None]:
    """Without what `f.compile()` put in a module's way."""
    if not isinstance(f, torch.nn.Module) or f._compiled_call_impl is None:
        yield
        return
    kept, f._compiled_call_impl = f._compiled_call_impl, None
    try:
        yield
    finally:
        f._compiled_call_impl = kept


def _recorder(options: Options, graphs: list[GraphRecord]) -> Callable[..., Any]:
    """A backend that records every graph as `options` would have it, and runs it with torch's own kernels."""
    run_as = replace(options, lower="eager" if options.lower == "eager" else "aot_eager")

    def record(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        watcher = Watcher(lambda graph: _weights(graph, example_inputs))
        rewritten = rewrite(gm, example_inputs, options, watcher.watch)
        graphs.append(_record_of(rewritten, watcher, _precision(example_inputs)))
        return lower(rewrite(gm, example_inputs, run_as).graph, example_inputs, run_as)

    record.amp_options = lambda **_: options  # type: ignore[attr-defined]
    return record


def _weights(gm: GraphModule, example_inputs: Sequence[Any]) -> set[Node]:
    return {
        node
        for node, value in zip(placeholders(gm), example_inputs, strict=True)
        if isinstance(value, torch.nn.Parameter)
        or node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type") is not None
    }


def _record_of(rewritten: Rewritten, watcher: Watcher, precision: str) -> GraphRecord:
    reason = getattr(rewritten.original, "compile_subgraph_reason", None)
    return GraphRecord(
        precision=precision,
        reason=reason.reason if reason is not None and reason.graph_break else "",
        code=rewritten.graph.print_readable(print_output=False),
        casts=tuple(watcher.casts.values()),
        ops=watcher.ops,
        history=rewritten.history,
    )


def _precision(example_inputs: Sequence[Any]) -> str:
    devices = sorted({v.device.type for v in example_inputs if isinstance(v, torch.Tensor)}) or ["cpu"]
    return ", ".join(
        f"{device} in {short_name(torch.get_autocast_dtype(device))}"
        if torch.is_autocast_enabled(device)
        else f"{device} without autocast"
        for device in devices
        if torch.amp.is_autocast_available(device)
    )
