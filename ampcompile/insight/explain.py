"""Run a call with a backend that records every graph, without lowering through Inductor."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ampcompile.about import VERSION
from ampcompile.compiler import current_call
from ampcompile.compiler.backend import find_type_without_units, records_gradients, rewrite
from ampcompile.compiler.double_backward import copy_with_bodies
from ampcompile.compiler.left_to_autocast import find_reason
from ampcompile.compiler.lower import lower
from ampcompile.compiler.module_names import module_names, named
from ampcompile.compiler.results import BECAUSE
from ampcompile.passes.analysis.products import WideProducts, advice_without_units
from ampcompile.records.graphs import CastRecord
from ampcompile.records.recorder import Recorder, shape_of
from ampcompile.sharding.weight import gathers_of
from ampcompile.torch_private import compilations, pytree
from ampcompile.torch_private.cuts import OnCut

from .call import Backend, Subject, kinds_of_inputs, modules_in
from .report import Report
from .saved import bytes_of_caller
from .saved_by_autograd import SavedByAutograd

BUDGETS = (0.1, 0.3, 1.0)
"""Those whose peaks are counted beside that of a smaller one."""


def explain_call(subject: Subject, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Report:
    """Run a call once, and report every cast in it."""
    recorders, results, lacking = list[Recorder](), list[CastRecord](), set[torch.dtype]()
    theirs = pytree.tensors_in(args, kwargs)
    for module in modules_in(subject.f, args, kwargs):
        theirs += [*module.parameters(), *module.buffers()]

    def cast(result: Tensor) -> Tensor:
        results.append(_cast_of_result(result, subject.f))
        return result.float()

    before, backend = compilations.count_attempts(), _recording_backend(subject, recorders, lacking)
    with subject.set_apart(args, kwargs, backend, cast) as compiled:
        returned = pytree.tensors_in(compiled(*args, **kwargs))
    graphs = [recorder.graph for recorder in recorders]
    saved = [record for graph in graphs for record in graph.saved]
    of_caller = bytes_of_caller(returned, theirs, results, saved)
    broken = map(compilations.in_short, compilations.reasons_since(before))
    return Report(
        graphs,
        results,
        of_caller=of_caller,
        breaks=[reason for reason in broken if not any(reason in graph.reason for graph in graphs)],
        about=f"{named(subject.f)}; ampcompile {VERSION}, torch {torch.__version__}; {date.today()}",
        gathers=gathers_of(subject.f),
        advice="; ".join(map(advice_without_units, sorted(lacking, key=str))),
    )


def _recording_backend(subject: Subject, recorders: list[Recorder], lacking: set[torch.dtype]) -> Backend:
    """Return a backend that records every graph and runs it with torch's own kernels."""
    options = subject.options
    run_as = replace(options, lower="eager" if options.lower == "eager" else "aot_eager")

    def record(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        recorder, reason = Recorder(example_inputs), find_reason(gm)
        rewritten = rewrite(gm, example_inputs, run_as, recorder.watch)
        if (low := find_type_without_units(rewritten, example_inputs)) is not None:
            lacking.add(low)
        recorder.finish(gm, rewritten.graph, rewritten.history, reason)
        recorders.append(recorder)
        wide, paths = WideProducts.on_this_cpu(options), module_names(current_call.callable or subject.f)
        kinds = kinds_of_inputs(rewritten.graph, example_inputs)
        watch_cut: OnCut | None = partial(recorder.watch_cut, kinds, paths)
        if options.lower == "eager":
            rewritten.graph.forward = SavedByAutograd(rewritten.graph, kinds, recorder.watch_saved).run
        elif records_gradients(example_inputs):
            given, by_inductor = options.activation_memory_budget, options.lower == "inductor"
            budgets = [] if given is None else [given, *(larger for larger in BUDGETS if larger > given)]
            looks: list[Any] = [(budget, partial(recorder.watch_peak, budget, by_inductor)) for budget in budgets]
            if by_inductor:
                looks, watch_cut = [(given, watch_cut), *looks], None
            for budget, look in looks:
                as_asked = replace(options, watch=False, activation_memory_budget=budget)
                lower(copy_with_bodies(rewritten.graph), example_inputs, as_asked, None, wide, look)
        return lower(rewritten.graph, example_inputs, run_as, recorder.watch_joint, wide, watch_cut)

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
