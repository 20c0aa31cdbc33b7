"""One entry of the op tables: full names of ops, a known category, and a reason."""

from typing import get_args

from ampcompile.rules import accelerator, cpu, ours
from ampcompile.rules.group import ACCELERATORS, EVERY_DEVICE, GPU_LIKE, Category, Group


def test_ops_are_atens_unless_they_say_so() -> None:
    group = Group("fp32", ("cpu",), "why", "exp  norm.Scalar\n torchvision::nms")
    assert group.names() == ["aten::exp", "aten::norm.Scalar", "torchvision::nms"]


def test_every_group_gives_a_known_category_a_device_and_a_reason() -> None:
    assert set(GPU_LIKE) < set(ACCELERATORS) < set(EVERY_DEVICE) == {*ACCELERATORS, "cpu"}
    for group in (*cpu.GROUPS, *accelerator.GROUPS, *ours.GROUPS):
        assert group.category in get_args(Category)
        assert group.devices and set(group.devices) <= set(EVERY_DEVICE)
        assert group.names() and group.because
