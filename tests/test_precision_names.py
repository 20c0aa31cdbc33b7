"""Which functions compute: ops and functionals, in every spelling of an operator; not views, writers, questions."""

from collections.abc import Callable

import pytest
import torch

from ampcompile import precision
from ampcompile.precision_names import computes


@pytest.mark.parametrize(
    "name",
    [
        "exp",
        "linear",
        "conv2d",
        "softmax",
        "einsum",
        "cross_entropy",
        "matmul",
        "__matmul__",
        "__rmatmul__",
        "__add__",
        "__radd__",
        "__pow__",
        "__rpow__",
        "__rsub__",
        "__truediv__",
        "wrapped",
        "sum",
        "cat",
        "bmm",
        "where",
        "layer_norm",
    ],
)
def test_what_computes(name: str) -> None:
    assert computes(name)


@pytest.mark.parametrize(
    "name",
    [
        "view",
        "reshape_as",
        "transpose",
        "add_",
        "copy_",
        "relu_",
        "to",
        "float",
        "half",
        "type",
        "clone",
        "contiguous",
        "detach",
        "size",
        "dim",
        "is_floating_point",
        "__iadd__",
        "__imatmul__",
        "__len__",
        "__bool__",
        "__repr__",
        "__get__",
        "no_such_function",
        "_softmax_backward",
    ],
)
def test_what_does_not(name: str) -> None:
    assert not computes(name)


def test_a_traced_call_asks_only_once() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if computes("exp") and not computes("view") else x - 1

    assert f(torch.zeros(1)).item() == 1


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: x / 3,
        lambda x: 3 / x,
        lambda x: x // 3,
        lambda x: 3 // x,
        lambda x: x % 3,
        lambda x: 3 % x,
        lambda x: x**2,
        lambda x: 2**x,
        lambda x: 2 - x,
        lambda x: x @ x,
        lambda x: -x,
        abs,
    ],
)
def test_every_operator_computes_in_a_block_as_the_op_does(operator: Callable[[torch.Tensor], torch.Tensor]) -> None:
    low = (torch.rand(3, 3) + 1).bfloat16()
    with precision(torch.float32):
        found = operator(low)
    assert found.dtype == torch.float32 and torch.equal(found, operator(low.float()))
