"""The runner: history, logs, errors that name the pass; and the verifier, which names the op that lies."""

import logging
import re

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

from ampcompile.errors import PassError, UnsupportedError
from ampcompile.passes import base
from ampcompile.passes.base import Applied, run_passes, verify
from ampcompile.passes.graph import bodies
from tests.compiling import LOW
from tests.passes.captured import captured, settled
from tests.passes.rewriting import Acts, fail, lie


def rename(gm):
    for node in gm.graph.find_nodes(op="placeholder"):
        node.target = node.name = "renamed"


def read_another_graph(gm):
    gm.graph.output_node().args = (torch.fx.Graph().placeholder("elsewhere"),)


def ban(gm):
    raise UnsupportedError("no")


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
    with pytest.raises(UnsupportedError, match="no"):  # the user's own
        run_passes([Acts("bans", ban)], graph())


def fail_at_relu(gm):
    for node in gm.graph.nodes:
        if "relu" in str(node.target):
            raise KeyError(node.name)


def test_an_error_names_the_op_and_the_users_line():
    words = r"pass fails failed at aten.relu \(.*test_base.py:\d+\): KeyError: 'relu'. Passes before it: none."
    with pytest.raises(PassError, match=words):
        run_passes([Acts("fails", fail_at_relu)], product())


@pytest.mark.parametrize("way", ["register_fake", "a kernel for meta tensors"])
def test_an_error_in_the_function_of_a_custom_op_is_its_authors(way):
    """An op that its author's function lets compilers run in float32 alone, and a policy that runs it in 16 bits."""
    with torch.library._scoped_library("tests_base", "FRAGMENT") as library:
        library.define("scale(Tensor x) -> Tensor")
        library.impl("scale", lambda x: 2 * x, "CPU")

        def scale_fake(x):
            torch._check(x.dtype == torch.float32, lambda: f"no {x.dtype}")
            return torch.empty_like(x)

        if way == "register_fake":
            torch.library.register_fake("tests_base::scale", scale_fake, lib=library)
        else:
            library.impl("scale", scale_fake, "Meta")

        def f(x):
            return torch.ops.tests_base.scale(x.sin())

        with pytest.raises(BackendCompilerFailed) as caught:
            options = {"policy": "op tests_base::scale=low", "lower": "aot_eager"}
            torch.compile(f, backend="amp", options=options)(torch.randn(3))
    assert isinstance(caught.value.inner_exception, PassError)
    words = (
        rf"pass assign_precision failed at tests_base.scale \({__file__}:{f.__code__.co_firstlineno + 1}\): "
        rf"RuntimeError: no torch.bfloat16, raised in scale_fake at {__file__}:\d+, .* isn't ampcompile's; .* policy\."
    )
    assert re.search(words, str(caught.value)) and "fault of ampcompile" not in str(caught.value)


def test_a_broken_graph_is_found_after_the_pass_that_broke_it():
    with pytest.raises(PassError, match="pass breaks failed"):
        run_passes([RENAMES, BREAKS], graph())


def test_the_verifier_runs_between_passes_where_it_is_switched_on(monkeypatch):
    monkeypatch.setattr(base, "VERIFY", True)
    with pytest.raises(PassError, match=r"pass lies failed at aten.sin: AssertionError: .*claims torch.float64"):
        run_passes([LIES], graph())
    monkeypatch.setattr(base, "VERIFY", False)
    run_passes([LIES], graph())


def product():
    x, y = torch.randn(2, 3, 3)
    return settled(captured(lambda x, y: (x @ y.to(torch.float64).float()).relu().sum(), x, y, dtype=None))


def test_an_honest_graph_passes():
    verify(product())


def test_a_wrong_dtype_is_found_with_its_line():
    gm = product()
    (relu,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    relu.meta["val"] = relu.meta["val"].to(LOW)
    with pytest.raises(
        AssertionError, match=r"relu.* claims torch.bfloat16, gives torch.float32 \(.*test_base.py:\d+\)"
    ):
        verify(gm)


def test_an_operand_in_another_dtype_than_the_op_was_computed_with_is_found():
    gm = product()
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta["val"] = node.meta["val"].double()
    with pytest.raises(AssertionError, match=r"matmul.* claims torch.float32, gives torch.float64"):
        verify(gm)


def test_a_lie_in_a_body_is_found():
    gm = captured(lambda x: checkpoint(torch.sin, x, use_reentrant=False), torch.randn(3), dtype=None)
    verify(settled(gm))
    ((_, body),) = bodies(gm)
    (sin,) = body.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    sin.meta["val"] = sin.meta["val"].to(LOW)
    with pytest.raises(AssertionError, match=r"sin.* claims torch.bfloat16"):
        verify(gm)
