"""Explaining shows every cast and op, why code wasn't compiled, and leaves everything else as it was."""

import copy
import random
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import ampcompile
from ampcompile.errors import OptionError
from tests.models import Block, Net


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Softmax(-1))


def test_every_op_is_listed_with_its_dtype_and_every_cast_with_what_it_casts() -> None:
    model, x = three_layers(), torch.randn(2, 8)
    report = ampcompile.explain(model)(x)
    with torch.autocast("cpu"):
        eager = model(x).dtype
    assert [(op.module, op.op, op.dtype) for op in report.ops] == [
        ("0", "aten.linear", torch.bfloat16),
        ("1", "aten.linear", torch.bfloat16),
        ("2", "aten.softmax", eager),
    ]
    assert "lower_precision_fp list (CPU)" in report.ops[0].because and report.ops[2].because
    listed = [(c.op, c.module, c.of, c.shape, c.dtype_from, c.dtype_to, c.bytes, c.fate) for c in report.casts]
    low, high = torch.bfloat16, torch.float32
    kept = ("inserted", "hoisted")
    assert listed == [
        ("aten.linear", "0", "input", (2, 8), high, low, 2 * 8 * 6, ("inserted",)),
        ("aten.linear", "0", "weight", (8, 8), high, low, 8 * 8 * 6, kept),
        ("aten.linear", "0", "bias", (8,), high, low, 8 * 6, kept),
        ("aten.linear", "1", "weight", (8, 8), high, low, 8 * 8 * 6, kept),
        ("aten.linear", "1", "bias", (8,), high, low, 8 * 6, kept),
        ("output", "", "activation", (2, 8), low, high, 2 * 8 * 6, ("inserted",)),
    ]
    assert report.casts[-1].because == "leaves the compiled call in float32: no autocast is open around it"
    with torch.autocast("cpu", low):
        assert [c.op for c in ampcompile.explain(model)(x).casts] == ["aten.linear"] * 5


def test_code_after_differentiation() -> None:
    model, x = three_layers(), torch.randn(2, 8)
    report = ampcompile.explain(model)(x)
    assert "bf16[2, 8]" in report.code and "aten.linear" in report.code and "aten.linear" not in report.joint_code
    assert report.joint_code.count("def forward") == 1 and "tangents_1" in report.joint_code
    (graph,) = report.graphs
    assert {cast.when for cast in graph.backward_casts} == {"backward"}
    assert 0 < len(graph.backward_casts) < report.totals[-1].casts
    assert {("aten.mm", "0"), ("aten.mm", "1")} <= {(cast.of, cast.module) for cast in graph.backward_casts}
    assert "bf16[2, 8]" in report.joint_code
    with torch.no_grad():
        report = ampcompile.explain(model)(x)
    assert report.joint_code.count("def forward") == 1 and "tangents" not in report.joint_code
    assert ampcompile.explain(model, lower="eager")(x).joint_code == ""


def test_what_becomes_of_casts() -> None:
    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        both = m.q(x) + m.k(x)  # x is cast once for both
        wide = both.float()  # the product reads what it was made from, which is low already
        return torch.exp(both) + (wide @ y)

    model = Net(forward, **{name: nn.Linear(8, 8, bias=False) for name in "qk"})

    with torch.no_grad():
        report = ampcompile.explain(model, policy="op exp=fp32", outputs="autocast")(
            torch.randn(4, 8), torch.randn(8, 8)
        )
    (graph,) = report.graphs
    assert graph.casts == tuple(report.casts)
    fates = [cast.fate for cast in report.casts]
    assert {fate[0] for fate in fates} == {"inserted"}
    assert sorted(fate[1:] for fate in fates) == [(), (), (), ("folded",), ("hoisted",), ("hoisted",), ("shared",)]
    stages = {total.stage: total.casts for total in report.totals}
    assert stages["insert_casts"] > stages["fold_casts"] > stages["hoist_weights"] > stages["share_casts"]
    assert not [stage for stage in stages if stage in str(report) and "_" in stage], "passes are nothing to a user"


def test_the_options_of_a_compiled_function_are_used_and_keywords_beat_them() -> None:
    model = three_layers()
    compiled = torch.compile(
        model, backend="amp", options={"dtype": torch.float16, "weights": "every_call", "outputs": "autocast"}
    )
    casts = ampcompile.explain(compiled)(torch.randn(2, 8)).casts
    assert {c.dtype_to for c in casts} == {torch.float16}
    assert {c.fate for c in casts} == {("inserted",)}
    assert torch.bfloat16 in {
        c.dtype_to for c in ampcompile.explain(compiled, dtype=torch.bfloat16)(torch.randn(2, 8)).casts
    }
    model = Net(lambda m, x: m.inner(x), inner=model)  # Dynamo steps over modules of torch's own classes
    model.compile(backend="amp", options={"dtype": torch.float16, "outputs": "autocast"})
    assert {c.dtype_to for c in ampcompile.explain(model)(torch.randn(2, 8)).casts} == {torch.float16}
    assert model._compiled_call_impl is not None, "as it was compiled"
    function = torch.compile(lambda x: x @ x, backend="amp", options={"dtype": torch.float16})
    assert ampcompile.explain(function)(torch.randn(4, 4)).ops[0].dtype == torch.float16
    audit = ampcompile.audit(function)(torch.randn(4, 4))
    assert {op.dtype for op in audit.ops if op.op == "aten.mm"} == {torch.float16}
    again = ampcompile.audit(function, policy="op matmul=fp32")(torch.randn(4, 4))
    assert {op.dtype for op in again.ops} == {torch.float32} and again.error < 1e-6
    with pytest.raises(OptionError, match="Did you mean 'dtype'"):
        ampcompile.explain(model, dtyp=torch.float16)


def test_symbolic_sizes_are_strings_and_count_as_traced() -> None:
    cast = ampcompile.explain(three_layers(), dynamic=True)(torch.randn(5, 8)).casts[0]
    assert isinstance(cast.shape[0], str) and cast.shape[1] == 8 and cast.bytes == 5 * 8 * 6


def test_the_table_fits_the_terminal_and_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    report = ampcompile.explain(nn.Sequential(*(Block() for _ in range(3))))(torch.randn(2, 5, 8))
    for columns in (70, 100, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = str(report)
        assert max(map(len, text.splitlines())) <= columns
        assert f"{len(report.casts)} casts" in text
        assert "*.up" in text.replace("\n", "")


@pytest.mark.parametrize("products", ["torch", "float32"])
def test_the_first_table_adds_up_to_the_rows_below_it(products: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a row is one line
    model = nn.Sequential(three_layers(), nn.Softmax(-1))
    report = ampcompile.explain(lambda x: model(x).double(), products=products)(torch.randn(2, 8))
    balance = {total.stage.removeprefix("amp, "): total.casts for total in report.balance}
    assert balance.pop("written in your code") == 1
    eager = [balance.pop(f"eager autocast, {side}") for side in ("forward", "backward")]
    counted = dict.fromkeys(balance, 0)
    for line in str(report).split("graph 0")[1].splitlines():
        for when in counted:
            if f" {when} " in line and "bf16" in line:
                counted[when] += int(line.partition(f" {when} ")[2].split()[0])
    assert counted == balance and balance["once per update"] == 4
    removed = sum(eager) - balance["every call"] - balance["backward"] - 1
    assert str(report).startswith(f"amp removes {removed} of eager autocast's {sum(eager)} casts a step")
    assert ("run in f32 on rounded operands" in str(report)) is (products == "float32")


@pytest.mark.parametrize(("seen", "fails"), [("closed over", True), ("argument", False), ("keyword", True)])
def test_nothing_is_left_behind(seen: str, fails: bool) -> None:
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    model = nn.Sequential(nn.Sequential(*layers), nn.Dropout(0.5))
    x = torch.randn(4, 3, 6, 6, requires_grad=True)
    weight = model[0][0].weight
    weight.grad = given = torch.ones_like(weight)

    def step(x: Tensor, models: list[nn.Module]) -> Tensor:
        loss = models[0](x).sum() + torch.rand(())
        loss.backward()
        if fails:
            raise KeyError("mine")
        return loss

    state = {name: value.clone() for name, value in model.state_dict().items()}
    f, args, kwargs = {
        "closed over": (lambda x: step(x, [model]), (x,), {}),
        "argument": (step, (x, [model]), {}),
        "keyword": (step, (x,), {"models": [model]}),
    }[seen]
    explained = ampcompile.explain(f, lower="eager")  # may import a module that draws a number, the first time
    rng, python = torch.get_rng_state(), random.getstate()
    sys.setprofile(profiler := lambda *_: None)
    try:
        with pytest.raises(KeyError, match="mine") if fails else nullcontext():
            assert explained(*args, **kwargs).ops
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert torch.equal(torch.get_rng_state(), rng) and random.getstate() == python
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert weight.grad is given and torch.equal(given, torch.ones_like(weight))
    assert model[0][-1].weight.grad is None and x.grad is None


@pytest.mark.parametrize("before", [True, False], ids=["compiled before", "compiled after"])
def test_what_is_compiled_stays_so_and_nothing_counts_as_a_recompilation(before: bool) -> None:
    def f(x: Tensor) -> Tensor:
        y = x @ x.t()
        torch._dynamo.graph_break()
        return y.sum()

    def compiles(rows: int) -> int:
        graphs = counters["stats"]["unique_graphs"]
        compiled(torch.randn(rows, 4))
        return counters["stats"]["unique_graphs"] - graphs

    compiled = torch.compile(f, backend="amp", options={"lower": "eager"})
    assert not before or compiles(3) == 2
    with torch._dynamo.config.patch(recompile_limit=3):
        for rows in range(4, 9):  # more than the recompilations Dynamo allows
            assert len(ampcompile.explain(compiled)(torch.randn(rows, 4)).graphs) == 2
    assert compiles(3) == (0 if before else 2)
    assert compiles(7) == 2
    assert compiles(8) == 0, "sizes are dynamic from the second on, as they would be without explaining"


@pytest.mark.parametrize("name", ["explain", "audit", "record"])
def test_what_cant_be_called_and_arguments_of_the_call_are_refused(name: str) -> None:
    look = getattr(ampcompile, name)
    with pytest.raises(OptionError, match=rf"ampcompile\.{name} got 3, expected a module or function"):
        look(3)
    with pytest.raises(OptionError):
        look(nn.Linear(2, 2), dtype="int8")
    with pytest.raises(OptionError, match=rf"got 2 arguments, .*: ampcompile\.{name}\(model\)\(x\), or "):
        look(nn.Linear(2, 2), torch.randn(1, 2))


def test_before_the_call_it_says_what_to_do() -> None:
    expected = (
        "<ampcompile.{0}(Linear) waits for a call of Linear: ampcompile.{0}(Linear)(*args, **kwargs) gives the result>"
    )
    assert str(ampcompile.explain(nn.Linear(2, 2))) == expected.format("explain")
    assert repr(ampcompile.audit(nn.Linear(2, 2))) == expected.format("audit")
    assert "ampcompile.explain(sin)(*args" in str(ampcompile.explain(torch.sin))
    with pytest.raises(AttributeError, match=r"gives the result>; it has no 'suggest' before that"):
        ampcompile.audit(nn.Linear(2, 2)).suggest(0.1)
    assert copy.copy(waiting := ampcompile.explain(abs)) == waiting


def test_a_transform_lists_the_functions_that_it_calls() -> None:
    weights = torch.randn(3, 4, 8, requires_grad=True)

    def ensemble(x: Tensor) -> Tensor:
        return torch.func.vmap(lambda w: F.linear(x, w).relu())(weights)

    report = ampcompile.explain(ensemble, lower="eager")(torch.randn(2, 8))
    assert [op.op for op in report.ops if op.dtype is None] == ["linear", "relu"]
    assert not report.unknown_ops


class Lookup(nn.Sequential):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def broken(m: Any, x: Tensor) -> Tensor:
    x = m.lookup(m.first(x))
    if x.sum() > 1e9:
        x = x + 1
    return m.last(x)


def test_what_is_not_compiled_has_its_reason_and_its_line() -> None:
    model = Net(broken, first=nn.Linear(8, 8), lookup=Lookup(nn.Linear(8, 8)), last=nn.Linear(8, 8))
    report = ampcompile.explain(model, lower="eager")(torch.randn(2, 8))
    first, second, last = (graph.reason for graph in report.graphs)
    assert "torch.compiler.disable" in first and first.endswith("x = m.lookup(m.first(x))")
    assert second.startswith("Python branches on the value of a tensor") and second.endswith("if x.sum() > 1e9:")
    assert not last and not report.breaks


def test_nothing_compiled_says_why() -> None:
    report = ampcompile.explain(nn.GRU(8, 8), lower="eager")(torch.randn(2, 3, 8))
    assert not report.graphs
    assert "RNN" in str(report) and report.breaks
