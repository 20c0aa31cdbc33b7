"""Whose options an explained call has, and that what was compiled is as before."""

from typing import Any

import pytest
import torch
from torch import nn

import ampcompile
from ampcompile.compiler.ambient import options_of
from ampcompile.config import Options
from ampcompile.errors import OptionError
from ampcompile.explaining.recorder import override, uncompiled
from ampcompile.torch_private import dynamo_caches

HALF = torch.float16


def how_compiled(**settings: Any) -> dynamo_caches.Compiled:
    found = dynamo_caches.how_compiled(torch.compile(lambda x: x @ x, **settings))
    assert found is not None
    return found


def test_options_are_read_of_what_was_compiled_for_us_only() -> None:
    ours = how_compiled(backend="amp", options={"dtype": HALF, "epilogue_fusion": True})
    assert options_of(ours.backend) == Options.parse({"dtype": HALF, "epilogue_fusion": True})
    assert options_of(how_compiled(backend="aot_eager").backend) is None


def test_only_what_was_given_by_name_beats_what_it_was_compiled_with() -> None:
    kept = Options.parse({"dtype": HALF, "weights": "every_call", "epilogue_fusion": True, "max_autotune": True})
    given = Options.parse({"weights": "cached", "epilogue_fusion": False})
    found = override(kept, given, {"weights", "epilogue_fusion"})
    assert (found.dtype, found.weights) == (HALF, "cached")
    assert dict(found.inductor) == {"epilogue_fusion": False, "max_autotune": True}
    assert override(kept, Options(), set()) == kept


class Own(nn.Module):
    """What torch.nn's own classes do isn't compiled in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_a_module_is_uncompiled_for_a_while_errors_or_not() -> None:
    model = Own()
    with uncompiled(model), uncompiled(abs):
        assert model._compiled_call_impl is None
    model.compile(backend="amp")
    compiled = model._compiled_call_impl
    with pytest.raises(KeyError), uncompiled(model):
        assert model._compiled_call_impl is None
        raise KeyError
    assert model._compiled_call_impl is compiled is not None


def test_wrong_options_are_refused_before_the_call() -> None:
    with pytest.raises(OptionError):
        ampcompile.explain(abs, weights="sometimes")


@pytest.mark.parametrize(("lower", "joint"), [("eager", False), ("aot_eager", True), ("inductor", True)])
def test_what_is_lowered_through_eager_has_no_graph_after_differentiation(lower: str, joint: bool) -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="amp", options={"lower": lower})
    report = ampcompile.explain(compiled)(torch.randn(1, 2))
    assert bool(report.joint_code) == joint and report.final_code
