"""A patch's name leads to what it changes."""

import pytest
import torch

from ampcompile.torch_private.patch import Patch


def test_a_name_is_taken_apart() -> None:
    patch = Patch("torch.Tensor.set_", "made up")
    assert (patch.owner, patch.name, patch.place) == (torch.Tensor, "set_", "Tensor.set_")


@pytest.mark.parametrize("what", ["torch.no_such_module.act", "no_such_package.thing.act"])
def test_an_owner_that_isnt_there_is_an_error(what: str) -> None:
    with pytest.raises((AttributeError, ImportError)):
        _ = Patch(what, "made up").owner
