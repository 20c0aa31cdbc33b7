"""Whose options an explained call has, and that what was compiled is as before."""

from typing import Any

import pytest
import torch
from torch import nn

from ampcompile.compiler.ambient import options_of
from ampcompile.config import Options
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
