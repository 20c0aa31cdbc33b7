"""Autocast's state is read for all devices, switched off for a while, and put back, errors or not."""

import pytest
import torch

from ampcompile.torch_private.autocast import (
    any_autocast_enabled,
    autocast_disabled,
    autocast_nesting,
    autocast_states,
    lowering_without_autocast,
    takes,
)
from tests.injecting import raised_at


@pytest.mark.parametrize("device", ["cpu", "mps", "maia"])
def test_the_state_of_every_device_is_told(device: str) -> None:
    assert not any_autocast_enabled() and not autocast_states()[device][0]
    torch.set_autocast_enabled(device, True)
    try:
        assert any_autocast_enabled()
        assert [name for name, (enabled, _) in autocast_states().items() if enabled] == [device]
    finally:
        torch.set_autocast_enabled(device, False)
    with torch.autocast("cpu", torch.float16):
        assert autocast_states()["cpu"] == (True, torch.float16)


def test_a_region_inside_acts_where_autocast_is_disabled_and_some_is_on_while_lowering() -> None:
    """Without, AOTAutograd would not exclude the keys at run time."""
    with autocast_disabled(), torch.autocast("cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with lowering_without_autocast():
        assert torch._C._is_any_autocast_enabled()
    assert not torch._C._is_any_autocast_enabled()


def test_an_interrupt_leaves_the_number_of_regions_as_it_was() -> None:
    at, before = 1, autocast_nesting()
    while raised_at(at, KeyboardInterrupt, autocast_nesting):
        assert autocast_nesting() == before
        at += 1
    assert at > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8])
def test_autocast_says_once_which_types_it_takes(dtype: torch.dtype) -> None:
    takes.cache_clear()
    if dtype == torch.int8:
        with pytest.warns(UserWarning, match="target dtype is not supported"):
            assert not takes("cpu", dtype)
    assert takes("cpu", dtype) is (dtype != torch.int8)
