"""`TORCH_LOGS="ampcompile"` logs a line per graph, `"+ampcompile"` every decision and cast; `TORCH_TRACE` keeps both.

torch's logging accepts the name of any package, so nothing is registered. With `TORCH_TRACE` set, the rewritten graph
and its casts are artifacts of the structured trace, which `tlparse` shows beside Dynamo's and Inductor's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ampcompile.torch_private import marks

if TYPE_CHECKING:
    from .graphs import CastRecord, GraphRecord, OpRecord
    from .recorder import Recorder

log = logging.getLogger("ampcompile")


def recorder(example_inputs: Sequence[Any]) -> Recorder | None:
    """A recorder of a graph's passes if the graph will be logged or traced, else None."""
    if not (log.isEnabledFor(logging.INFO) or marks.traced()):
        return None
    from .recorder import Recorder  # here: its records' classes take 10 ms to make

    return Recorder(example_inputs)


def log_graph(graph: GraphRecord) -> None:
    """Log one rewritten graph and add it to the structured trace."""
    from .graphs import plain

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
    marks.trace_artifact("ampcompile_graph", "string", lambda: graph.code)
    marks.trace_artifact("ampcompile_casts", "json", lambda: json.dumps([plain(c) for c in graph.casts], indent=1))


def _where(record: OpRecord | CastRecord) -> str:
    return f" [{' '.join(filter(None, (record.module, record.source)))}]" if record.module or record.source else ""
