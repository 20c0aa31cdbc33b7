"""Modules keep their paths wherever Dynamo starts a graph."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.ModuleDict({"a b": nn.Sequential(nn.Linear(4, 4))})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        torch._dynamo.graph_break()
        return y, self.second["a b"](y)


class Outer(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Inner() for _ in range(layers))

    def forward(self, x: Tensor) -> list[Tensor]:
        outs = [x]
        for layer in self.layers:
            outs += layer(outs[-1])
        return outs[1:]


MODEL: Any = None
PATHS = ["layers.0.first", "layers.0.second.a b.0"]


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A global module, with numbers of the test's own seed."""
    monkeypatch.setitem(globals(), "MODEL", Outer(1))


def of_global(x: Tensor) -> Tensor:
    return MODEL(x)


def of_closure() -> Any:
    model = Outer(1)
    return lambda x: model(x)


class Training:
    def __init__(self) -> None:
        self.model = Outer(1)

    def step(self, x: Tensor) -> Tensor:
        return self.model(x)


def compiled_in_place() -> nn.Module:
    model = Outer(1)
    model.compile(backend="amp")
    return model


CALLED = {
    "a module": lambda: Outer(1),
    "a module compiled already": lambda: torch.compile(Outer(1), backend="amp"),
    "a module compiled in place": compiled_in_place,
    "a function that names a module": lambda: of_global,
    "a function that closes over one": of_closure,
    "a method of an object that has one": lambda: Training().step,
    "a module inside another": lambda: nn.Sequential(Outer(1)),
}


@pytest.mark.parametrize("called", CALLED)
def test_paths_across_graph_breaks(called: str) -> None:
    prefix = "0." if called == "a module inside another" else ""
    ops = ampcompile.explain(CALLED[called](), lower="eager")(torch.randn(2, 4)).ops
    assert [op.module for op in ops] == [prefix + path for path in PATHS]


def test_a_module_given_as_an_argument_is_spelled_as_dynamo_does() -> None:
    ops = ampcompile.explain(lambda model, x: model(x))(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)).ops
    assert [op.module for op in ops] == ["0"]


@torch._dynamo.config.patch(recompile_limit=3)  # fewer than the layers: modules are told apart
def test_a_policy_reaches_the_layer_it_names_and_no_other_across_graph_breaks() -> None:
    model = Outer(4)
    low, high = torch.bfloat16, torch.float32
    policy = ampcompile.Policy(modules=(("layers.1", "fp32"), ("layers.3.second", "fp32")))
    kept = {"layers.1.first", "layers.1.second.a b.0", "layers.3.second.a b.0"}
    paths = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    expected = [high if path in kept else low for path in paths]
    report = ampcompile.explain(model, policy=policy, lower="eager")(torch.randn(2, 4))
    assert [(op.module, op.dtype) for op in report.ops] == list(zip(paths, expected, strict=True))
    compiled = torch.compile(model, backend="amp", options={"policy": policy, "lower": "eager", "outputs": "autocast"})
    for _ in range(2):
        assert [out.dtype for out in compiled(torch.randn(2, 4))] == expected
