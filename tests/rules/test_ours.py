"""What no list of ATen's autocast states: entries that exist, beside the device's own lists."""

import pytest
import torch

from ampcompile.rules.ours import GROUPS, MIXED
from ampcompile.rules.table import rule_for

ALL_OPS = frozenset(torch._C._dispatch_get_all_op_names())
aten = torch.ops.aten


def test_our_own_aten_entries_exist() -> None:
    ours = {op for group in GROUPS for op in group.names() if op.startswith("aten::")}
    assert ours <= ALL_OPS


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "mps", "mtia", "maia"])
def test_ops_that_follow_their_destination_write_it_and_those_that_promote_write_nothing(device: str) -> None:
    for group in (group for group in GROUPS if device in group.devices and MIXED in group.because):
        for name in group.names():
            packet, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(aten, packet), overload or "default")
            assert op._schema.is_mutable == (group.category == "follow_destination"), name


def test_the_devices_own_list_comes_first() -> None:
    on_cpu, on_cuda = (rule_for(aten.cross_entropy_loss.default, device) for device in ("cpu", "cuda"))
    assert on_cpu is not None and on_cpu.because.startswith("on autocast's fp32 list (CPU)")
    assert on_cuda is not None and on_cuda.category == "fp32" and "one kernel" in on_cuda.because
