"""Artifacts go to the structured trace while somebody writes one."""

import logging

from torch._logging._internal import trace_log

from ampcompile.torch_private.profiling import trace_artifact, traced


def test_artifacts_go_to_the_trace_while_there_is_one() -> None:
    trace_artifact("before", "string", lambda: "text of before")  # the first has torch look whether one is wanted
    before, found = traced(), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    trace_log.addHandler(handler)
    try:
        assert traced()
        trace_artifact("meanwhile", "string", lambda: "text of meanwhile")
    finally:
        trace_log.removeHandler(handler)
    artifacts = [(r.metadata["artifact"]["name"], r.payload) for r in found if "artifact" in r.metadata]
    assert artifacts == [("meanwhile", "text of meanwhile")]
    assert traced() == before
