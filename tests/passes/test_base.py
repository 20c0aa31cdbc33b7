"""The runner: history, logs, the watcher, and errors that name the pass and those before it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.fx import GraphModule

from ampcompile.errors import BannedOpError, PassError
from ampcompile.passes import base
from ampcompile.passes.base import Applied, run_passes
from tests.passes.captured import captured, settled


@dataclass(frozen=True)
class Acts:
    """A pass that does `act` to a graph."""

    name: str
    act: Callable[[GraphModule], None]
    exact: bool = True
    fate: str = ""

    def apply(self, gm):
        self.act(gm)
        return 1


def rename(gm):
    for node in gm.graph.find_nodes(op="placeholder"):
        node.target = node.name = "renamed"


def read_another_graph(gm):
    gm.graph.output_node().args = (torch.fx.Graph().placeholder("elsewhere"),)


def lie(gm):
    node = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)[0]
    node.meta["val"] = node.meta["val"].double()


def failing(error):
    def fail(gm):
        raise error

    return Acts("fails", fail)


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
        run_passes([RENAMES, failing(KeyError("x"))], graph())
    with pytest.raises(PassError, match=r"Passes before it: none. .* torch.compile\(..., backend='inductor'\)"):
        run_passes([failing(ValueError())], graph())


def test_the_users_own_errors_go_through():
    with pytest.raises(BannedOpError, match="no"):
        run_passes([failing(BannedOpError("no"))], graph())


def test_a_broken_graph_is_found_after_the_pass_that_broke_it():
    with pytest.raises(PassError, match="pass breaks failed"):
        run_passes([RENAMES, BREAKS], graph())


def test_the_verifier_runs_between_passes_where_it_is_switched_on(monkeypatch):
    monkeypatch.setattr(base, "VERIFY", True)
    with pytest.raises(PassError, match=r"pass lies failed: AssertionError: .*claims torch.float64"):
        run_passes([LIES], graph())
    monkeypatch.setattr(base, "VERIFY", False)
    run_passes([LIES], graph())
