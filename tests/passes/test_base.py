"""The runner: history, logs, the watcher, and errors that name the pass and those before it."""

import logging

import pytest
import torch

from ampcompile.errors import BannedOpError, PassError
from ampcompile.passes import base
from ampcompile.passes.base import Applied, run_passes
from tests.passes.captured import captured, settled
from tests.passes.rewriting import Acts, fail, lie


def rename(gm):
    for node in gm.graph.find_nodes(op="placeholder"):
        node.target = node.name = "renamed"


def read_another_graph(gm):
    gm.graph.output_node().args = (torch.fx.Graph().placeholder("elsewhere"),)


def ban(gm):
    raise BannedOpError("no")


RENAMES, BREAKS, LIES = Acts("renames", rename), Acts("breaks", read_another_graph), Acts("lies", lie)


def graph():
    return settled(captured(torch.sin, torch.randn(3), dtype=None))


def test_each_pass_is_recorded_recompiled_and_watched(caplog):
    gm, seen = graph(), []
    with caplog.at_level(logging.DEBUG, "ampcompile"):
        history = run_passes([RENAMES, RENAMES], gm, lambda done, graph: seen.append((done, graph is gm)))
    assert [(a.name, a.rewrites) for a in history] == [("renames", 1)] * 2
    assert all(isinstance(a, Applied) and a.seconds >= 0 for a in history)
    assert seen == [(RENAMES, True)] * 2
    assert torch.equal(gm(renamed=torch.ones(1))[0], torch.ones(1).sin())
    assert "renames: 1 rewrites" in caplog.text


def test_an_error_names_the_pass_and_those_before_it():
    with pytest.raises(PassError, match=r"pass fails failed: KeyError: 'x'. Passes before it: renames \(1\)."):
        run_passes([RENAMES, Acts("fails", fail)], graph())
    with pytest.raises(PassError, match=r"Passes before it: none. .* torch.compile\(..., backend='inductor'\)"):
        run_passes([Acts("fails", fail)], graph())
    with pytest.raises(BannedOpError, match="no"):  # the user's own
        run_passes([Acts("bans", ban)], graph())


def test_a_broken_graph_is_found_after_the_pass_that_broke_it():
    with pytest.raises(PassError, match="pass breaks failed"):
        run_passes([RENAMES, BREAKS], graph())


def test_the_verifier_runs_between_passes_where_it_is_switched_on(monkeypatch):
    monkeypatch.setattr(base, "VERIFY", True)
    with pytest.raises(PassError, match=r"pass lies failed: AssertionError: .*claims torch.float64"):
        run_passes([LIES], graph())
    monkeypatch.setattr(base, "VERIFY", False)
    run_passes([LIES], graph())
