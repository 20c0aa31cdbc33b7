"""Records of ops, grouped by module in the order in which modules ran first."""

import torch

from ampcompile.auditing.numbers import Numbers
from ampcompile.auditing.records import OpNumbers, group_by_module


def op(module: str, local: float, backward: bool = False) -> OpNumbers:
    return OpNumbers("aten.mm", module, "model.py:3", backward, torch.bfloat16, Numbers(local, None, 1.0, 0.0, 0.5, 2))


def test_modules_stand_in_order_with_all_their_ops() -> None:
    ops = [op("b", 0.1), op("a", 0.2), op("", 0.3), op("b", 0.4, backward=True)]
    found = group_by_module(ops)
    assert [(module.module, module.ops, module.numbers.local) for module in found] == [
        ("b", 2, 0.4),
        ("a", 1, 0.2),
        ("", 1, 0.3),
    ]
    assert found[0].numbers.elements == 4 and group_by_module([]) == []
