"""Policy patterns that match nothing warn with the nearest names; those that match are silent."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.errors import AmpWarning


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        torch._dynamo.graph_break()
        return self.head(x).softmax(-1)


def by_compiling(policy: str, model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="amp", options={"policy": policy, "lower": "aot_eager"})


def by_explaining(policy: str, model: nn.Module) -> Callable[..., Any]:
    return ampcompile.explain(model, policy=policy)


BAD = {  # entries of a policy, and what is said of them, with the nearest names
    "op sofmax=fp32": "pattern 'sofmax' matches no op of the first call. Did you mean 'softmax",
    "module encodr.*=fp32": "pattern 'encodr.*' matches no module .* Did you mean 'encoder'",
    "module Linear=fp32": "'Linear' matches no module .* Did you mean 'encoder' or 'head'",
    "op addmm=fp32": "'addmm' matches no op .* Did you mean 'linear'",
    "op conv2d=fp32": "pattern 'conv2d' matches no op",
    "module zzzz=fp32": r"'zzzz' matches no module of the first call\. ampcompile\.explain",
}


@pytest.mark.parametrize("way", [by_compiling, by_explaining])
def test_bad_patterns(way: Callable[..., Any]) -> None:
    call = way(", ".join(BAD), Model())
    with pytest.warns(AmpWarning) as found:
        call(torch.randn(2, 4))
    told = [w for w in found if issubclass(w.category, AmpWarning)]
    assert len(told) == len(BAD) and {w.filename for w in told} == {__file__}
    for message in BAD.values():
        assert any(re.search(message, str(w.message)) for w in told), message


@pytest.mark.parametrize("way", [by_compiling, by_explaining])
def test_good_patterns_are_silent_whatever_graph_they_match_in(way: Callable[..., Any]) -> None:
    policy = "op softmax=fp32, op aten::linear=low, module head=fp32, module enc*=fp32"
    with warnings.catch_warnings(record=True) as found:
        way(policy, Model())(torch.randn(2, 4))
    assert not [w for w in found if issubclass(w.category, AmpWarning)]


def test_one_warning_and_only_after_something_was_compiled() -> None:
    class Another(Model):
        """What no other test has compiled."""

    compiled = by_compiling("op sofmax=fp32", Another())
    with torch.compiler.set_stance("force_eager"), pytest.warns(AmpWarning, match="Another runs in part eagerly"):
        compiled(torch.randn(2, 4))
    with pytest.warns(AmpWarning) as found:
        for rows in (2, 2, 3):
            compiled(torch.randn(rows, 4))
    assert len([w for w in found if issubclass(w.category, AmpWarning)]) == 1
    for again in (model := Another(), model, Another()):  # though Dynamo compiles nothing anew
        with pytest.warns(AmpWarning, match="'sofmax' matches no op"):
            by_compiling("op sofmax=fp32", again)(torch.randn(2, 4))


class Either(Model):
    """With a layer whose name, and an op, that another model of the class may lack; the blocks share a graph."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        x = getattr(self, self.name)(x)
        return x.exp() if self.name == "first" else x


@pytest.mark.parametrize("lower", ["aot_eager", "eager"])
@pytest.mark.parametrize("policy", ["module first=fp32", "op exp=fp32", "op exp@first=fp32, op softmax=fp32"])
def test_a_pattern_is_matched_with_the_model_that_is_called_and_not_with_another_of_its_class(
    policy: str, lower: str
) -> None:
    for name in ("first", "second", "first", "second"):  # the last two run what was compiled for the others
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.compile(Either(name), backend="amp", options={"policy": policy, "lower": lower})(torch.randn(2, 4))
        told = [str(w.message) for w in found if issubclass(w.category, AmpWarning)]
        assert len(told) == (name == "second") and all("first" in each or "exp" in each for each in told), (name, told)
