"""Each form of decorating changes exactly the ops inside it, across graph breaks and with dynamic sizes."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile import keep_fp32, precision
from ampcompile.explaining.report import Report

LOW, HIGH, HALF = torch.bfloat16, torch.float32, torch.float16
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Inner(nn.Module):
    """Two products, between which the graph may break."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.linear, self.breaks = nn.Linear(4, 4), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return x @ x.mT @ x


class Subclassed(Inner):
    forward = keep_fp32(Inner.forward)


@keep_fp32
class Decorated(Inner):
    pass


class Calling(nn.Module):
    """A module whose inside is reached through a function or a block."""

    def __init__(self, inner: nn.Module, how: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.inner, x)


@keep_fp32
def by_function(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def by_block(module: nn.Module, x: Tensor) -> Tensor:
    with precision(torch.float32):
        return module(x)


class Model(nn.Module):
    def __init__(self, target: nn.Module) -> None:
        super().__init__()
        self.before, self.target, self.after = nn.Linear(4, 4), target, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.target(self.before(x)))


FORMS: dict[str, Callable[[bool], nn.Module]] = {
    "a class": Decorated,
    "an imported class, wrapped": keep_fp32(Inner),
    "an imported class, subclassed": Subclassed,
    "an object": lambda breaks: keep_fp32(Inner(breaks)),
    "a function": lambda breaks: Calling(Inner(breaks), by_function),
    "a block": lambda breaks: Calling(Inner(breaks), by_block),
}
both = pytest.mark.parametrize(
    ("dynamic", "breaks"),
    [
        pytest.param(False, False, id="static, one graph"),
        pytest.param(True, True, id="dynamic, graph break"),
        pytest.param(True, False, id="dynamic, one graph", marks=pytest.mark.ci),
        pytest.param(False, True, id="static, graph break", marks=pytest.mark.ci),
    ],
)


def explained(f: Callable[..., Any], dynamic: bool, **options: Any) -> Report:
    x = torch.randn(3, 4)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        return ampcompile.explain(f, **options)(x)


def products(report: Report) -> list[torch.dtype | None]:
    return [op.dtype for op in report.ops if op.op in ("aten.linear", "aten.matmul")]


@both
@pytest.mark.parametrize("form", FORMS)
def test_float32_inside_and_nowhere_else(form: str, breaks: bool, dynamic: bool) -> None:
    report = explained(Model(FORMS[form](breaks)), dynamic)
    assert products(report) == [LOW, HIGH, HIGH, HIGH, LOW]
    assert len(report.graphs) > 1 if breaks else len(report.graphs) == 1
    sizes = {cast.shape[0] for cast in report.casts if cast.of != "weight"}
    assert all(isinstance(size, str) for size in sizes) if dynamic else sizes == {3}


@both
@pytest.mark.parametrize("dtype", [LOW, HALF])
def test_low_precision_inside_and_nowhere_else(dtype: torch.dtype, breaks: bool, dynamic: bool) -> None:
    model = Model(precision(dtype)(Inner(breaks)))
    report = explained(model, dynamic, policy="module before=fp32, module after=fp32")
    assert products(report) == [HIGH, dtype, dtype, dtype, HIGH]


@both
def test_float32_inside_and_low_precision_out(breaks: bool, dynamic: bool) -> None:
    def f(x: Tensor) -> Tensor:
        x = model[1](model[0](x))
        if breaks:
            torch._dynamo.graph_break()
        return torch.relu(x)

    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    report = explained(f, dynamic, policy="op layer_norm=fp32_inside")
    assert [op.dtype for op in report.ops] == [LOW, HIGH, LOW]


numbers = itertools.count()


@pytest.fixture
def custom_op() -> Iterator[Any]:
    """One for each test: what is registered stays so."""
    name = f"mine{next(numbers)}"
    with torch.library._scoped_library("decorated", "FRAGMENT") as library:
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl(name, torch.empty_like, "Meta")
        yield getattr(torch.ops.decorated, name).default


@both
def test_registered_rules_and_policies_for_custom_ops(custom_op: Any, breaks: bool, dynamic: bool) -> None:
    def f(x: Tensor) -> Tensor:
        x = custom_op(x @ x.mT)
        if breaks:
            torch._dynamo.graph_break()
        return custom_op(x @ x)

    def dtypes(**options: Any) -> list[torch.dtype | None]:
        report = explained(f, dynamic, **options)
        assert products(report) == [LOW, LOW]
        return [op.dtype for op in report.ops if op.op.startswith("decorated.")]

    assert dtypes() == [LOW, LOW]
    assert dtypes(policy=f"op {custom_op.name()}=fp32") == [HIGH, HIGH]
    ampcompile.register_op(custom_op, "fp32")
    assert dtypes() == [HIGH, HIGH]
    assert dtypes(policy="op decorated::*=low") == [LOW, LOW], "a policy beats it"
