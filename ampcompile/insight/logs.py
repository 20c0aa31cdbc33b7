"""`TORCH_LOGS="ampcompile"` logs a line per graph, `"+ampcompile"` every decision and cast; `TORCH_TRACE` keeps both.

torch's logging accepts the name of any package, so nothing is registered. With `TORCH_TRACE` set, the rewritten graph
and its casts are artifacts of the structured trace, which `tlparse` shows beside Dynamo's and Inductor's.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ampcompile.passes.analysis.wide_products import advice_without_units
from ampcompile.torch_private import structured_trace

if TYPE_CHECKING:
    from .recorder import Recorder
    from .records import CastRecord, GraphRecord, OpRecord

log = logging.getLogger("ampcompile")


def recorder(example_inputs: Sequence[Any]) -> Recorder | None:
    """A recorder of a graph's passes if the graph will be logged or traced, else None."""
    if not (log.isEnabledFor(logging.INFO) or structured_trace.traced()):
        return None
    from .recorder import Recorder  # here: its records' classes take 10 ms to make

    return Recorder(example_inputs)


def warn_of_unscaled(device_type: str, example_inputs: Sequence[Any]) -> None:
    """Warn, once, that a graph about to be compiled trains in float16 while this process has no scaler."""
    if not torch.is_autocast_enabled(device_type) or torch.get_autocast_dtype(device_type) is not torch.float16:
        return
    trains = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)
    if trains:
        _look_for_a_scaler(device_type)


@functools.cache
def _look_for_a_scaler(device_type: str) -> None:
    # Not `isinstance`: it reads `__class__`, which makes lazy objects of some packages load modules.
    if not any(issubclass(type(instance), torch.amp.GradScaler) for instance in gc.get_objects()):
        log.warning(
            "ampcompile: a graph trains in float16 on %s, and no GradScaler has been made: small gradients become zero "
            "there. Scale the loss (see ampcompile.GradScaler), or compile with options={'dtype': torch.bfloat16}",
            device_type,
        )


@functools.cache
def warn_of_missing_units(low: torch.dtype) -> None:
    """Warn, once, that a graph computes in a 16-bit type for which this CPU has no units."""
    log.warning("ampcompile: %s", advice_without_units(low))


def log_graph(graph: GraphRecord) -> None:
    """Log one rewritten graph and add it to the structured trace."""
    from .records import plain

    hoisted, counts = sum("hoisted" in cast.fate for cast in graph.casts), ""
    if not graph.left:
        counts = f", {len(graph.ops)} ops, {len(graph.casts)} casts ({hoisted} hoisted), "
    log.info("%s%s%s", graph.precision, counts, ", ".join(f"{a.name} {1e3 * a.seconds:.1f} ms" for a in graph.history))
    if log.isEnabledFor(logging.DEBUG):
        for op in graph.ops:
            log.debug("%s", f"{op.op} in {op.in_dtype or '-'}: {op.because}{_where(op)}")
        for cast in graph.casts:
            what, fate = f"{cast.of} {cast.sizes} {cast.dtypes}", "+".join(cast.fate)
            log.debug("%s", f"cast of {what} for {cast.op}, {cast.bytes} bytes, {fate}{_where(cast)}")
    if unknown := sorted({op.op for op in graph.ops if not op.known}):
        log.warning("unknown to the policy, run in what arrives: %s", ", ".join(unknown))
    structured_trace.trace_artifact("ampcompile_graph", "string", lambda: graph.code)
    structured_trace.trace_artifact(
        "ampcompile_casts", "json", lambda: json.dumps([plain(c) for c in graph.casts], indent=1)
    )


def log_no_graph(name: str, why: str) -> None:
    """Log that Dynamo compiled nothing of a callable."""
    log.info(
        "Dynamo made no graph of %s, which runs eagerly under autocast: %s", name, why or "it has no tensor operation"
    )


def _where(record: OpRecord | CastRecord) -> str:
    return f" [{' '.join(filter(None, (record.module, record.source)))}]" if record.module or record.source else ""
