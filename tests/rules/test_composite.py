"""What composite ops are made of: names that exist, each of which matters somewhere."""

import torch

from ampcompile.rules.composite import CONTENTS
from ampcompile.rules.table import composite_needs_decomposition
from ampcompile.torch_private.dispatcher import op_named

ALL_OPS = frozenset(torch._C._dispatch_get_all_op_names())
DEVICES = ["cpu", "cuda", "xpu", "mps", "mtia", "maia"]


def test_what_composites_hide_names_ops_that_exist() -> None:
    assert {op for outer, inner in CONTENTS.items() for op in (outer, *inner)} <= ALL_OPS


def test_what_composites_hide_matters_on_some_device() -> None:
    used = {op for op in CONTENTS for d in DEVICES if composite_needs_decomposition(op_named(op), d)}
    used |= {inner for op in used for inner in CONTENTS[op]}
    assert CONTENTS.keys() <= used


def test_lines_of_one_op_are_read_together_and_no_op_is_said_twice() -> None:
    assert CONTENTS["aten::pad"] == CONTENTS["aten::_pad_enum"]
    assert len(CONTENTS["aten::pad"]) == 5 and CONTENTS["aten::einsum"] == ("aten::bmm", "aten::sum.dim_IntList")
    assert all(len(set(inner)) == len(inner) and outer not in inner for outer, inner in CONTENTS.items())
