"""Run a call with a backend that records every graph, without lowering through Inductor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from datetime import date
from importlib.metadata import version
from typing import Any

import torch
from torch.fx import GraphModule

from ampcompile.compiler.ambient import options_of
from ampcompile.compiler.backend import find_type_without_units, rewrite
from ampcompile.compiler.call_state import casting
from ampcompile.compiler.left_to_autocast import find_reason
from ampcompile.compiler.lower import lower
from ampcompile.compiler.results import BECAUSE
from ampcompile.compiler.unmatched import named
from ampcompile.config import Options
from ampcompile.passes.analysis.wide_products import WideProducts, advice_without_units
from ampcompile.records.casts import CastRecord, GraphRecord, cast_of_result
from ampcompile.records.totals import eager_totals
from ampcompile.records.watch import JointWatcher, Watcher
from ampcompile.sharding.weight import gathers_of
from ampcompile.torch_private import compiled_functions, dynamo_attempts, dynamo_caches
from ampcompile.torch_private.patches import uncompiled

from .eager_modules import ForwardTimes
from .preserve_state import preserve_state
from .report import Report


def make_explainer(f: Any, options: dict[str, Any], mode: str | None, dynamic: bool | None) -> Callable[..., Report]:
    """Return the callable behind `ampcompile.explain`; checks the options immediately."""
    f, chosen, dynamic = uncompile(f, options, mode, dynamic)

    def explained(*args: Any, **kwargs: Any) -> Report:
        graphs: list[GraphRecord] = []
        lacking: set[torch.dtype] = set()
        backend = _recorder(chosen, graphs, lacking)
        results: list[CastRecord] = []

        def cast(result: torch.Tensor) -> torch.Tensor:
            results.append(cast_of_result(result, BECAUSE, _definition(f)))
            return result.float()

        before, times = dynamo_attempts.count(), ForwardTimes(f)
        with dynamo_caches.dynamo_as_it_was(backend), preserve_state(f, args, kwargs), uncompiled(f), casting(cast):
            compiled = torch.compile(f, backend=backend, dynamic=dynamic)
            with times.measured():
                compiled(*args, **kwargs)
        eager = times.records({op.module for graph in graphs for op in graph.ops})
        broken = map(dynamo_attempts.in_short, dynamo_attempts.reasons_since(before))
        breaks = [reason for reason in broken if not any(reason in graph.reason for graph in graphs)]
        about = f"{named(f)}; ampcompile {version('ampcompile')}, torch {torch.__version__}; {date.today()}"
        advice = "; ".join(map(advice_without_units, sorted(lacking, key=str)))
        return Report(graphs, results, eager=eager, breaks=breaks, about=about, gathers=gathers_of(f), advice=advice)

    return explained


def uncompile(
    f: Any, options: dict[str, Any], mode: str | None, dynamic: bool | None
) -> tuple[Any, Options, bool | None]:
    """The original of a compiled callable, its options and `dynamic`; options given by name beat them."""
    compiled, given = dynamo_caches.how_compiled(f), Options.parse(options, mode)
    if compiled is None:
        return f, given, dynamic
    chosen = override(options_of(compiled.backend) or Options(), given, set(options))
    return compiled.original, chosen, compiled.dynamic if dynamic is None else dynamic


def override(kept: Options, given: Options, names: set[str]) -> Options:
    """The options that a callable was compiled with, updated by those given by name."""
    ours = {f.name: getattr(given, f.name) for f in fields(Options) if f.name in names}
    return replace(kept, **ours, inductor=tuple({**dict(kept.inductor), **dict(given.inductor)}.items()))


def _definition(f: Any) -> str:
    """`file:line` of a function, or of a module's `forward`."""
    code = getattr(inspect.unwrap(getattr(f, "forward", f)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def _recorder(options: Options, graphs: list[GraphRecord], lacking: set[torch.dtype]) -> Callable[..., Any]:
    """Return a backend that records every graph and runs it with torch's own kernels."""
    run_as = replace(options, lower="eager" if options.lower == "eager" else "aot_eager")

    def record(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if compiled_functions.is_backward(example_inputs):
            return lower(gm, example_inputs, run_as)
        watcher = Watcher(example_inputs)
        reason = find_reason(gm)
        if not reason:
            watcher.totals += eager_totals(gm, example_inputs)
        rewritten = rewrite(gm, example_inputs, run_as, watcher.watch)
        if (low := find_type_without_units(rewritten, example_inputs)) is not None:
            lacking.add(low)
        entry = watcher.record(gm, rewritten.graph, rewritten.history, reason)
        joint = JointWatcher()
        compiled = lower(rewritten.graph, example_inputs, run_as, joint.watch, WideProducts.on_this_cpu(options))
        totals = (*entry.totals, *joint.totals)
        graphs.append(
            replace(entry, totals=totals, joint_casts=joint.casts, products=joint.products, joint_code=joint.code)
        )
        return compiled

    record.amp_options = lambda **_: options  # type: ignore[attr-defined]
    return record
