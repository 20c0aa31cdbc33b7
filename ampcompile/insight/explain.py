"""Run a call with a backend that records every graph, without lowering through Inductor."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ampcompile.compiler.backend import find_type_without_units, rewrite
from ampcompile.compiler.left_to_autocast import find_reason
from ampcompile.compiler.lower import lower
from ampcompile.compiler.module_names import named
from ampcompile.compiler.results import BECAUSE
from ampcompile.passes.analysis.products import WideProducts, advice_without_units
from ampcompile.records.graphs import CastRecord, GraphRecord
from ampcompile.records.recorder import Recorder, shape_of
from ampcompile.sharding.weight import gathers_of
from ampcompile.torch_private import compilations

from .call import Backend, Subject
from .report import Report


def explain_call(subject: Subject, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Report:
    """Run a call once, and report every cast in it."""
    graphs, results, lacking = list[GraphRecord](), list[CastRecord](), set[torch.dtype]()

    def cast(result: Tensor) -> Tensor:
        results.append(_cast_of_result(result, subject.f))
        return result.float()

    before, backend = compilations.count_attempts(), _recording_backend(subject, graphs, lacking)
    with subject.set_apart(args, kwargs, backend, cast) as compiled:
        compiled(*args, **kwargs)
    broken = map(compilations.in_short, compilations.reasons_since(before))
    return Report(
        graphs,
        results,
        breaks=[reason for reason in broken if not any(reason in graph.reason for graph in graphs)],
        about=f"{named(subject.f)}; ampcompile {version('ampcompile')}, torch {torch.__version__}; {date.today()}",
        gathers=gathers_of(subject.f),
        advice="; ".join(map(advice_without_units, sorted(lacking, key=str))),
    )


def _recording_backend(subject: Subject, graphs: list[GraphRecord], lacking: set[torch.dtype]) -> Backend:
    """Return a backend that records every graph and runs it with torch's own kernels."""
    options = subject.options
    run_as = replace(options, lower="eager" if options.lower == "eager" else "aot_eager")

    def record(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        recorder, reason = Recorder(example_inputs), find_reason(gm)
        rewritten = rewrite(gm, example_inputs, run_as, recorder.watch)
        if (low := find_type_without_units(rewritten, example_inputs)) is not None:
            lacking.add(low)
        recorder.finish(gm, rewritten.graph, rewritten.history, reason)
        wide = WideProducts.on_this_cpu(options)
        compiled = lower(rewritten.graph, example_inputs, run_as, recorder.watch_joint, wide)
        graphs.append(recorder.graph)
        return compiled

    return Backend(options, record, run_as)


def _cast_of_result(result: Tensor, f: Any) -> CastRecord:
    """The cast of a call's result outside of any graph; its line is that of the function, or of `forward`."""
    code = getattr(inspect.unwrap(getattr(f, "forward", f)), "__code__", None)
    return CastRecord(
        op="output",
        source=f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "",
        shape=shape_of(result),
        because=BECAUSE,
        dtype_from=result.dtype,
        dtype_to=torch.float32,
        bytes=result.numel() * (result.itemsize + torch.float32.itemsize),
        fate=("inserted",),
        of="activation",
    )
