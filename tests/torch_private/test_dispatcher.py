"""Ops that may return their argument, fakes in the dtypes of real results, and ops defined where there is no Triton."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor

from ampcompile.torch_private import dispatcher

aten = torch.ops.aten


def test_composite_ops_and_those_that_may_return_their_argument() -> None:
    assert dispatcher.is_composite(aten.linear.default) and not dispatcher.is_composite(aten.mm.default)
    assert dispatcher.may_return_argument(aten.to.dtype) and dispatcher.may_return_argument(aten.alias.default)
    assert not dispatcher.may_return_argument(aten.mm.default)
    assert not dispatcher.may_return_argument(aten.add_.Tensor), "it writes"


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


DEFINES = """
import sys
sys.modules["triton"] = None
import torch
from ampcompile.torch_private.dispatcher import triton_op

def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

print(triton_op("ampcompile_tests::twice")(twice)(torch.ones(1)).item())
torch.library.triton_op("ampcompile_tests::again", twice, mutates_args=())
"""


def test_an_op_is_defined_without_triton_in_silence() -> None:
    """But for torch's own, of which torch still complains."""
    run = subprocess.run([sys.executable, "-P", "-c", DEFINES], capture_output=True, text=True, timeout=300, check=True)
    assert run.stdout == "2.0\n" and run.stderr.count("Triton not available") == 1
