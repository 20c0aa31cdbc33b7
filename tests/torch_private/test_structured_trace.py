"""Artifacts that are offered to the structured trace are collected meanwhile, and only meanwhile."""

from ampcompile.torch_private.structured_trace import artifacts_of_this_compile, trace_artifact, traced


def test_artifacts_are_collected_while_they_are_wanted() -> None:
    trace_artifact("before", "string", lambda: "text of before")  # the first has torch look whether one is wanted
    before = traced()
    with artifacts_of_this_compile() as found:
        assert traced()
        trace_artifact("meanwhile", "string", lambda: "text of meanwhile")
    trace_artifact("after", "string", lambda: "text of after")
    assert found == [("meanwhile", "text of meanwhile")] and traced() == before
