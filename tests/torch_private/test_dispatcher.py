"""What the dispatcher says of ops: who has autocast kernels, who is composite, and what tracing calls first."""

from __future__ import annotations

import torch
from torch import Tensor

from ampcompile.torch_private import dispatcher

aten = torch.ops.aten


def test_a_functionalized_op_takes_its_arguments_by_name_and_returns_copies() -> None:
    def fill(x: Tensor, value: float) -> None:
        x.fill_(value)

    with torch.library._scoped_library("torch_private", "FRAGMENT") as library:
        library.define("fill(Tensor(a!) x, float value) -> ()")
        library.impl("fill", fill, "CompositeExplicitAutograd")
        x = torch.zeros(2)
        none, filled = dispatcher.AS_A_FUNCTION(torch.ops.torch_private.fill.default, x=x, value=3.0)
    assert none is None and filled.tolist() == [3, 3] and x.tolist() == [0, 0]


def test_fakes_of_a_wrong_dtype_get_that_of_the_kernel() -> None:
    """The first half says that torch's fake kernel still differs from its real one."""
    op, (position,) = aten.native_group_norm_backward.default, dispatcher.FAKES_OF_WRONG_DTYPE.values()
    x = torch.randn(2, 4, 3, dtype=torch.bfloat16)
    out, mean, rstd = aten.native_group_norm(x, torch.ones(4), torch.zeros(4), 2, 4, 3, 2, 1e-5)
    args = (torch.ones_like(out), x, mean, rstd, torch.ones(4), 2, 4, 3, 2, [True, True, True])
    assert args[position] is x
    real = [result.dtype for result in op(*args)]
    fakes = op(*(arg.to("meta") if isinstance(arg, Tensor) else arg for arg in args))
    assert [fake.dtype for fake in fakes] != real
    assert [fake.dtype for fake in dispatcher.as_computed(op, args, fakes)] == real
