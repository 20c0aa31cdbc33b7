"""Methods of a compiled module that run eagerly and compute something warn, once each; all else is silent."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.errors import AmpWarning
from tests.compiling import same_bits

OPTIONS = {"lower": "eager"}


def make_class() -> type[nn.Module]:
    """One of its own for each test, since each class warns once."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = nn.Linear(4, 4), None

        def decode(self, x: Tensor) -> Tensor:
            return self.layer(x)

        def act(self, x: Tensor) -> dict[str, Tensor]:
            return {"action": self(x).argmax(-1)}

        def size(self, x: Tensor) -> int:
            return x.numel()

        def weight_of(self, x: Tensor) -> Tensor:
            return self.layer.weight

        def state_dict(self, *args, **kwargs):
            return super().state_dict(*args, **kwargs)

        @torch.compile(backend="amp", options=OPTIONS)
        def compiled_by_its_class(self, x: Tensor) -> Tensor:
            return self.layer(x)

        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return self.decode(x)

    return Model


@pytest.mark.parametrize("name", ["decode", "act"])
def test_a_method_that_computes_warns_once(name: str) -> None:
    kind, x = make_class(), torch.randn(2, 4)
    for first in (True, False):
        model = kind()
        compiled = torch.compile(model, backend="amp", options=OPTIONS)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = [getattr(compiled, name)(x), getattr(compiled, name)(x)]
        assert [entry.category for entry in caught] == [AmpWarning] * first
        if first:
            assert f"found a call of Model.{name} on a compiled module, expected one of forward" in str(
                caught[0].message
            )
            assert f"compile_methods(module, {name!r})" in str(caught[0].message) and caught[0].filename == __file__
        assert same_bits(results, [getattr(model, name)(x)] * 2)


def test_what_computes_nothing_or_is_compiled_is_silent() -> None:
    model, x = make_class()(), torch.randn(2, 4)
    compiled = torch.compile(model, backend="amp", options=OPTIONS)
    compiled.size(x), compiled.weight_of(x), compiled.compiled_by_its_class(x)
    compiled.state_dict(), compiled.train(), list(compiled.parameters()), copy.deepcopy(model)
    compiled(x), model.decode(x), torch.compile(model, backend="eager").decode(x)
    assert hasattr(compiled, "decode") and compiled.decode.__self__ is model and compiled.decode.__name__ == "decode"
    ampcompile.compile_methods(model, "decode")
    compiled.decode(x)
    del model.decode
    model.compile(backend="amp", options=OPTIONS)
    compiled.act(x), compiled.decode(x)


def test_inside_what_is_compiled_it_is_part_of_the_graph() -> None:
    compiled, x = torch.compile(make_class()(), backend="amp", options=OPTIONS), torch.randn(2, 4)

    @torch.compile(backend="amp", options=OPTIONS)
    def outer(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return compiled.decode(x)

    assert outer(x).dtype == torch.float32
