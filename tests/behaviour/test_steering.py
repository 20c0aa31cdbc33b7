"""Every form of steering changes the ops it names, and no other."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile import keep_fp32, precision
from ampcompile.insight.report import Report
from examples.steering.imported_pooling import RoIPool
from tests import pages
from tests.models import Net

LOW, HIGH, HALF = torch.bfloat16, torch.float32, torch.float16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.linear(self.norm(x)), -1)


class Model(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.breaks = Block(), Block(), breaks
        self.square = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        x = self.second(x)
        return torch.ops.steered.twice((x @ self.square) * 2)


@pytest.fixture(autouse=True)
def custom_op() -> Iterator[None]:
    with torch.library._scoped_library("steered", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("twice", torch.empty_like, "Meta")
        yield


def dtypes(report: Report) -> dict[tuple[str, str, int], torch.dtype | None]:
    """The dtype of every op, conversions of inputs apart, by module, name and how many there were before it."""
    found: dict[tuple[str, str, int], torch.dtype | None] = {}
    for op in report.ops:
        if op.op != "aten.to":
            found[op.module, op.op, sum((op.module, op.op) == key[:2] for key in found)] = op.dtype
    return found


def explained(model: Callable[..., Any], dynamic: bool = False, **options: Any) -> Report:
    x = torch.randn(3, 4)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        return ampcompile.explain(model, **options)(x)


# What a policy changes. Ops without a rule of their own follow what reaches them: they are listed too.
POLICIES = {
    "op layer_norm=low, op steered::*=fp32": {("first.norm", "aten.layer_norm", LOW), ("", "steered.twice", HIGH)},
    "op *matmul*=fp32": {("", op, HIGH) for op in ("aten.matmul", "aten.mul", "steered.twice")},
    "module *.linear=fp16": {
        *((f"{block}.linear", "aten.linear", HALF) for block in ("first", "second")),
        *((block, "aten.softmax", HALF) for block in ("first", "second")),
        ("second.norm", "aten.layer_norm", HALF),
    },
}


@pytest.mark.parametrize(("breaks", "dynamic"), [(False, True), (True, False)])
def test_policies(breaks: bool, dynamic: bool) -> None:
    model = Model(breaks)
    plain = dtypes(explained(model, dynamic))
    for policy, expected in POLICIES.items():
        report = explained(model, dynamic, policy=policy)
        assert len(report.graphs) == 1 + breaks
        assert any(isinstance(cast.shape[0], str) for cast in report.casts) is dynamic
        steered = dtypes(report)
        assert plain.keys() == steered.keys()
        changed = {(*key[:2], dtype) for key, dtype in steered.items() if dtype != plain[key]}
        assert changed == expected
        assert any(f"policy: {policy.split()[0]}" in op.because for op in report.ops)


# Decorated parts, with dynamic sizes, across a graph break; tests/test_precision.py has them in one graph.


class Inner(nn.Module):
    """Products, between which the graph breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x @ x.mT @ x


class Subclassed(Inner):
    forward = keep_fp32(Inner.forward)


@keep_fp32
class Decorated(Inner):
    pass


@keep_fp32
def by_function(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def by_block(module: nn.Module, x: Tensor) -> Tensor:
    with precision(torch.float32):
        return module(x)


FORMS: dict[str, Callable[[], nn.Module]] = {
    "a class": Decorated,
    "an imported class, wrapped": keep_fp32(Inner),
    "an imported class, subclassed": Subclassed,
    "an object": lambda: keep_fp32(Inner()),
    "a function": lambda: Net(lambda m, x: by_function(m.inner, x), inner=Inner()),
    "a block": lambda: Net(lambda m, x: by_block(m.inner, x), inner=Inner()),
}


@pytest.mark.parametrize("form", FORMS)
def test_float32_inside_and_nowhere_else(form: str) -> None:
    before, target, after = nn.Linear(4, 4), FORMS[form](), nn.Linear(4, 4)
    report = explained(lambda x: after(target(before(x))), dynamic=True)
    products = [op.dtype for op in report.ops if op.op in ("aten.linear", "aten.matmul")]
    assert products == [LOW, HIGH, HIGH, HIGH, LOW] and len(report.graphs) > 1
    sizes = [c.shape[0] for c in report.casts if c.of not in ("weight", "bias") and c.op != "output"]
    assert all(isinstance(size, str) for size in sizes)


def test_a_loop_in_which_the_graph_breaks_is_explained() -> None:
    layers = [Inner(), Inner()]
    report = explained(lambda x: [layer(x) for layer in layers])  # Dynamo's code for it has a constant without a hash
    assert {op.dtype for op in report.ops} == {LOW}


def test_registered_rules() -> None:
    @torch.library.custom_op("steered::mine", mutates_args=())
    def mine(x: Tensor, mask: Tensor) -> Tensor:
        return x * mask

    mine.register_fake(lambda x, mask: torch.empty_like(x))

    def f(x: Tensor) -> Tensor:
        return mine(x @ x.mT, torch.ones(3, 3, dtype=torch.int32))

    assert explained(f).unknown_ops == ["steered.mine"]
    for rule, dtype in (("fp32", HIGH), ("lower_precision_fp", LOW)):
        ampcompile.register_op("steered::mine", rule)
        report = explained(f)
        assert report.unknown_ops == []
        (op,) = [op for op in report.ops if op.op == "steered.mine"]
        assert (op.dtype, op.because) == (dtype, f"registered as {rule} with ampcompile.register_op")
    (op,) = [op for op in explained(f, policy="op steered::*=fp32").ops if op.op == "steered.mine"]
    assert op.dtype == HIGH, "a policy beats it"


class Raised(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x @ torch.ones(4, 4)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # Dynamo does
@pytest.mark.parametrize("ambient", [False, True])
def test_custom_functions_that_cast_their_inputs(ambient: bool) -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)

    def f(x: Tensor) -> Tensor:
        return Raised.apply(model(x))

    compiled = torch.compile(f, backend="amp", options={"lower": "aot_eager"})
    with torch.autocast("cpu", enabled=True) if ambient else torch.enable_grad():
        assert {op.op: op.dtype for op in explained(f).ops}["aten.matmul"] == HIGH
        out = compiled(x)
    with torch.autocast("cpu"):
        eager = f(x)
    assert out.dtype == eager.dtype == HIGH
    torch.testing.assert_close(out, eager)


def test_the_page_of_options_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    vision, ops = ModuleType("torchvision"), ModuleType("torchvision.ops")
    ops.RoIPool = RoIPool
    monkeypatch.setitem(sys.modules, "torchvision", vision)
    monkeypatch.setitem(sys.modules, "torchvision.ops", ops)
    with torch.library._scoped_library("mylib", "FRAGMENT") as library:
        library.define("attention(Tensor x) -> Tensor")
        library.impl("attention", torch.clone, "CompositeExplicitAutograd")
        library.impl("attention", torch.empty_like, "Meta")
        found = pages.run("docs/options.md", ampcompile=ampcompile)
    policy, model, x = found["policy"], found["model"], found["x"]
    assert ampcompile.Policy.parse(str(policy)) == policy
    with torch.autocast("cpu"):
        assert [layer(x).dtype for layer in model] == [HIGH, HALF, LOW]
        assert found["distance"](x, x).dtype == found["Energy"]()(x).dtype == HIGH
        rois = torch.tensor([[0, 0, 0, 2, 2]])
        for pool in (found["RoIPool32"], found["MyRoIPool"]):
            assert pool(2, 1.0)(torch.randn(1, 3, 4, 4, dtype=torch.float16), rois).dtype == HIGH
    assert found["y"].dtype == HIGH
