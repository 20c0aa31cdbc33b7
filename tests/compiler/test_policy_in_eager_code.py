"""A policy is followed, or a warning names the module or op that it isn't followed for: drawn programs and policies."""

import random
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from ampcompile import AmpWarning


class Head(nn.Module):
    """Ends in a layer; `through` says by what code it is called. The rest has the same bits in every precision."""

    def __init__(self, through: Callable[[nn.Module, Tensor], Tensor], deep: bool) -> None:
        super().__init__()
        self.through, self.inner = through, nn.ModuleDict({"head": nn.Linear(8, 8)}) if deep else None
        self.head = None if deep else nn.Linear(8, 8)
        self.rnn = random.choice([nn.GRU, nn.LSTM, nn.RNN])(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.through(self, x)


def layer(model: Any) -> Any:
    return model.head or model.inner["head"]


def plain(model: Any, x: Tensor) -> Tensor:
    return layer(model)(x)


def recurrent(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        x = model.rnn(x)[0]
    return layer(model)(x)


def looping(model: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        x = layer(model)(x)
        torch._dynamo.graph_break()
    return x


def disabled(model: Any, x: Tensor) -> Tensor:
    return torch.compiler.disable(lambda v: layer(model)(v))(x.abs()).abs()


def caught(model: Any, x: Tensor) -> Tensor:
    try:
        x = layer(model)(x)
        torch._dynamo.graph_break()
    finally:
        x = x.abs()
    return x


def broken(model: Any, x: Tensor) -> Tensor:
    x = x.abs()
    torch._dynamo.graph_break()
    return layer(model)(x)


def mapped(model: Any, x: Tensor) -> Tensor:
    return vmap(layer(model))(x)


def mapped_with_weights(model: Any, x: Tensor) -> Tensor:
    return vmap(lambda v: functional_call(layer(model), dict(layer(model).named_parameters()), (v,)))(x)


def differentiated(model: Any, x: Tensor) -> Tensor:
    return grad(lambda v: layer(model)(v).square().sum())(x)


def pushed(model: Any, x: Tensor) -> Tensor:
    return jvp(layer(model), (x,), (x.cos(),))[1]


COMPILED = [plain, broken]
EAGER = [recurrent, looping, disabled, caught, mapped, mapped_with_weights, differentiated, pushed]
POLICIES = [
    "module {0}=fp32",
    "module *=fp32",
    "op linear=fp32",
    "op linear@*head=fp32",
    "op lin*=fp32, module rnn=low",
]
AROUND = {"a call": lambda f: f, "vmap": vmap, "the limit": lambda f: lambda x: (f(x[:2]), f(x))[1]}


@pytest.mark.parametrize("draw", range(8))
def test_a_policy_is_followed_or_a_warning_names_what_does_not_follow_it(draw: int) -> None:
    through, around = random.choice(COMPILED + 2 * EAGER), random.choice(["a call", "a call", *AROUND])
    around = "a call" if through is recurrent and around == "vmap" else around  # torch has no rule for it
    deep = random.choice([False, True])
    path = "inner.head" if deep else "head"
    policy = random.choice(POLICIES).format(path)
    model, x = Head(through, deep), torch.randn(3, 4, 8)
    with ExitStack() as stack:
        if around == "the limit":
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=False))
        if around != "vmap":
            stack.enter_context(torch.no_grad())
        said = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        run = torch.compile(model, backend="amp", options={"lower": "aot_eager", "products": "torch", "policy": policy})
        result, exact = AROUND[around](run)(x), AROUND[around](model)(x)
    follows = ((result - exact).norm() / exact.norm()).item() < 1e-6
    told = [str(w.message) for w in said if issubclass(w.category, AmpWarning)]
    program = f"{through.__name__}, {around}, {policy!r}: {told}"
    named = [each for each in told if "isn't followed" in each and (path in each or "lin" in each or "*" in each)]
    assert follows or named, program
    assert len(named) <= 2 and len(set(told)) == len(told), program
    if through in COMPILED and around == "a call":
        assert follows and not [each for each in named if "rnn" not in each], program


class Attending(nn.Module):
    """A layer of torch that reads the weights of its `out_proj` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.att, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.att(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("policy", ["module att.out_proj=fp32", "module att=fp32", "module *=fp32", "module head=fp32"])
def test_a_pattern_of_a_module_whose_forward_is_never_called_warns(policy: str) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = torch.compile(Attending(), backend="amp", options={"lower": "aot_eager", "policy": policy})
        for _ in range(2):
            run(torch.randn(2, 3, 8))
    told = [str(w.message) for w in said if issubclass(w.category, AmpWarning)]
    assert len(told) == ("out_proj" in policy)
    assert all("'att.out_proj' matches att.out_proj (NonDyn" in each and "isn't called" in each for each in told)
