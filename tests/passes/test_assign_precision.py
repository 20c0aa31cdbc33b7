"""Decisions are written with their reasons, and nothing else is touched."""

from typing import Any

import torch
from torch import Tensor, nn

from ampcompile.backend import rewrite
from ampcompile.config import Options
from ampcompile.policy import Policy

LOW, HIGH = torch.bfloat16, torch.float32


def decided(f: Any, *args: Tensor, **options: Any) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Per op its decision, and the graph's text before and after the pass."""
    decisions: dict[str, Any] = {}
    texts: list[tuple[str, str]] = []
    parsed = Options.parse({"lower": "eager", **options})

    def watch(name: str, gm: torch.fx.GraphModule) -> None:
        texts.append((name, str(gm.graph)))
        if name == "assign_precision":
            decisions.update({str(n.target): n.meta["amp"] for n in gm.graph.nodes if n.op == "call_function"})

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        return rewrite(gm, example_inputs, parsed, watch).original

    backend.amp_options = lambda **_: parsed  # type: ignore[attr-defined]
    torch.compile(f, backend=backend, fullgraph=True)(*args)
    return decisions, texts


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).relu()
        return torch.nn.functional.cross_entropy(h, torch.zeros(2, dtype=torch.int64)) + h.sum()


def test_every_op_has_a_decision_with_a_reason() -> None:
    decisions, _ = decided(Head(), torch.randn(2, 4))
    linear, loss, relu = (
        decisions[name] for name in ("aten.linear.default", "aten.cross_entropy_loss.default", "aten.relu.default")
    )
    assert set(linear.operands.values()) == {LOW}
    assert len(linear.operands) == 3
    assert linear.result.dtype == LOW
    assert "lower_precision_fp list" in linear.because
    assert set(loss.operands.values()) == {HIGH}
    assert loss.result.dtype == HIGH
    assert relu.operands == {}
    assert relu.result.dtype == LOW
    assert "no rule" in relu.because


def test_a_policy_and_its_name_are_in_the_reason() -> None:
    policy = Policy(modules=(("linear", "fp32"),))
    decisions, _ = decided(Head(), torch.randn(2, 4), policy=policy)
    assert decisions["aten.linear.default"].operands == {}
    assert decisions["aten.linear.default"].result.dtype == HIGH
    assert "linear=fp32" in decisions["aten.linear.default"].because


def test_the_graph_is_only_read() -> None:
    _, texts = decided(Head(), torch.randn(2, 4))
    (assigned, inserted) = (
        next(text for name, text in texts if name == p) for p in ("assign_precision", "insert_casts")
    )
    assert "torch.bfloat16" not in assigned
    assert "torch.bfloat16" in inserted
