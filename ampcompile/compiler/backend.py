"""The backend function, which `torch.compile(model, backend="amp")` calls once per graph that Dynamo finds."""

import contextlib
import functools
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from ampcompile.config import Options
from ampcompile.passes.analysis.products import advice_without_units, is_emulated
from ampcompile.passes.base import Applied, Watch, run_passes
from ampcompile.passes.before.hoist_weights import find_copied_weights
from ampcompile.passes.before.insert_casts import InsertCasts
from ampcompile.passes.capture.capture import capture
from ampcompile.passes.graph import Regions, decision_of, graphs, name_modules, op_name
from ampcompile.passes.pipeline import pipeline
from ampcompile.policy import Policy
from ampcompile.records import logs
from ampcompile.torch_private import autocast, compiled_functions, dynamo, tracing
from ampcompile.torch_private.dispatcher import OpOverload

from . import ambient, current_call, left_to_autocast
from .left_to_autocast import LEFT_TO_AUTOCAST
from .lower import lower
from .module_names import CompiledNames, module_names

log = logging.getLogger("ampcompile")


@dataclass(frozen=True)
class Rewritten:
    """One graph as it is lowered; `history` has an entry for each pass, `capture` first.

    A graph that is left to autocast has no history, and is lowered as Dynamo gave it. `names`: of ops and modules.
    """

    graph: GraphModule
    history: tuple[Applied, ...]
    names: CompiledNames


def rewrite(gm: GraphModule, example_inputs: Sequence[Any], options: Options, watch: Watch | None = None) -> Rewritten:
    """Decide and insert every cast of one Dynamo graph, under the autocast state of the call."""
    if reason := left_to_autocast.find_reason(gm):
        return leave(gm, example_inputs, options, reason)
    names = module_names(current_call.callable)
    if options.policy.modules or options.saved.modules:
        dynamo.guard_modules_of_frame(gm, names)
    with name_modules(names), _collect_rarely():
        return _rewrite(gm, example_inputs, options, watch)


def leave(gm: GraphModule, example_inputs: Sequence[Any], options: Options, reason: str) -> Rewritten:
    """Leave a graph to autocast, and report it."""
    left_to_autocast.warn_of_policy(reason, options.policy)
    gm.meta[LEFT_TO_AUTOCAST] = reason
    if (logged := logs.recorder(example_inputs)) is not None:
        logs.log_graph(logged.finish(gm, gm, (), reason))
    names = CompiledNames(left=True)
    names.tell()
    return Rewritten(gm, (), names)


@contextlib.contextmanager
def _collect_rarely() -> Iterator[None]:
    """Run Python's garbage collector less often: walking Dynamo's whole heap takes a quarter of the passes' time."""
    young, *older = gc.get_threshold()
    gc.set_threshold(50 * young, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)


def _rewrite(gm: GraphModule, example_inputs: Sequence[Any], options: Options, watch: Watch | None) -> Rewritten:
    device_type = _device_type(example_inputs)
    fakes, mode = tracing.fake_inputs(example_inputs)
    with ambient.autocast_for(device_type, options):
        start = time.perf_counter()
        graph = capture(gm, fakes, mode, options.policy)
        names = CompiledNames.of(graph)
        captured = Applied("capture", len(graph.graph.nodes), time.perf_counter() - start)
        regions = Regions(autocast.autocast_states())
    weights = find_copied_weights(graph, example_inputs) if options.weights == "cached" else ()
    logged = logs.recorder(example_inputs) if watch is None else None
    watch = watch if logged is None else logged.watch
    history = [captured, *run_passes(pipeline(options, regions, *weights), graph, watch)]
    names.tell()
    if logged is not None:
        logs.log_graph(logged.finish(gm, graph, history))
    ops = [node for part in graphs(graph) for node in part.graph.nodes if isinstance(node.target, OpOverload)]
    if unknown := {op_name(node.target) for node in ops if not decision_of(node).known}:
        log.warning("unknown to the policy, run in what arrives: %s", ", ".join(sorted(unknown)))
    return Rewritten(graph, tuple(history), names)


def find_type_without_units(rewritten: Rewritten, example_inputs: Sequence[Any]) -> torch.dtype | None:
    """The 16-bit type that a graph got casts to, if this device has no units for it; else None."""
    device_type = _device_type(example_inputs)
    low = torch.get_autocast_dtype(device_type)
    casts = any(done.rewrites for done in rewritten.history if done.name == InsertCasts.name)
    return low if casts and is_emulated(device_type, low) else None


def _device_type(example_inputs: Sequence[Any]) -> str:
    devices = {v.device.type: None for v in example_inputs if isinstance(v, torch.Tensor)}
    return next((d for d in devices if d != "cpu" and autocast.is_available(d)), "cpu")


def warn_of_unscaled(device_type: str, example_inputs: Sequence[Any]) -> None:
    """Warn, once, that a graph about to be compiled trains in float16 while this process has no scaler."""
    if not torch.is_autocast_enabled(device_type) or torch.get_autocast_dtype(device_type) is not torch.float16:
        return
    if records_gradients(example_inputs):
        _look_for_a_scaler(device_type)


def records_gradients(example_inputs: Sequence[Any]) -> bool:
    """True if autograd would record a graph of these inputs."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)


def _has_instance(of: type) -> bool:
    # Not `isinstance`: it reads `__class__`, which makes lazy objects of some packages load modules.
    return any(issubclass(type(instance), of) for instance in gc.get_objects())


@functools.cache
def _look_for_a_scaler(device_type: str) -> None:
    if not _has_instance(torch.amp.GradScaler):
        log.warning(
            "ampcompile: a graph trains in float16 on %s, and no GradScaler has been made: small gradients become zero "
            "there. Scale the loss (see ampcompile.GradScaler), or compile with options={'dtype': torch.bfloat16}",
            device_type,
        )


_without_units: dict[torch.dtype, bool] = {}
"""16-bit types in which compiled graphs compute and for which this CPU has no units, and whether that has been said"""


def warn_of_missing_units() -> None:
    """Warn, where time counts, of 16-bit types of compiled graphs for which this CPU has no units; once of each."""
    for low, said in _without_units.items():
        if not said:
            _without_units[low] = True
            log.warning("ampcompile: %s", advice_without_units(low))


def amp(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Dynamo backend. `mode` and `options` are those of `torch.compile`; see `ampcompile.config.Options`."""
    options = Options.parse(**kwargs)
    if current_call.before_compiling is not None:
        current_call.before_compiling()
    warn_of_unscaled(_device_type(example_inputs), example_inputs)
    graph, names = gm, None
    if not compiled_functions.is_backward(example_inputs):
        rewritten = rewrite(gm, example_inputs, options)
        graph, names = rewritten.graph, rewritten.names
        names.add_products(graph)
        names.tell()  # again, now with products: not in `rewrite`, as a report tells of them itself
        if (low := find_type_without_units(rewritten, example_inputs)) is not None:
            said = _without_units.setdefault(low, False)
            if not said and records_gradients(example_inputs) and _has_instance(torch.optim.Optimizer):
                warn_of_missing_units()  # something is trained
    with _collect_rarely():
        run = lower(graph, example_inputs, options)
    return run if names is None or options.policy == Policy() else names.told_by(run)


amp.amp_options = lambda **kwargs: Options.parse(**kwargs)  # type: ignore[attr-defined]  # marks our backend for `ambient`
ambient.install()
