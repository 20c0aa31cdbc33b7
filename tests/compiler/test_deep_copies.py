"""Deep copies of what was compiled in place keep its precision; pickles say that they don't."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import ampcompile
from tests.compiling import LOW, eager, same_bits

OPTIONS = {"lower": "aot_eager", "outputs": "autocast"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Pickled(Model):
    """Of a class that nothing was said of yet."""


def in_place(model: nn.Module, **options: object) -> nn.Module:
    model.compile(backend="amp", options={**OPTIONS, **options})
    return model


def test_a_deep_copy_is_compiled_with_the_same_options_and_weights_of_its_own() -> None:
    model, x = in_place(Model(), dtype=torch.float16), torch.randn(4, 8)
    before = model(x)
    first = copy.deepcopy(model)
    second = copy.deepcopy(first)  # of a copy that was never called
    for copied in (second, first):
        assert same_bits(copied(x), eager(copied, x, dtype=torch.float16))
        with torch.no_grad():
            copied.first.weight.mul_(2)
        assert same_bits(copied(x), eager(copied, x, dtype=torch.float16)) and not same_bits(copied(x), before)
    assert same_bits(model(x), before)
    assert list(first.state_dict()) == list(model.state_dict()) == list(Model().state_dict())
    report = ampcompile.explain(second)(x)
    assert {cast.dtype_to for cast in report.casts if "hoisted" in cast.fate} == {torch.float16}


def test_blocks_and_averaged_models() -> None:
    model, x = nn.Sequential(*(in_place(Model()) for _ in range(2))), torch.randn(4, 8)
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    assert same_bits(averaged(x), eager(model, x)) and averaged(x).dtype == LOW
    inside = torch.compile(copy.deepcopy(model), backend="amp", options=OPTIONS)
    assert same_bits(inside(x), eager(model, x))


def test_a_deep_copy_of_what_torch_compile_returned() -> None:
    compiled, x = torch.compile(Model(), backend="amp", options=OPTIONS), torch.randn(4, 8)
    assert same_bits(copy.deepcopy(compiled)(x), eager(compiled._orig_mod, x))


@pytest.mark.parametrize("backend", [None, "eager"])
def test_what_is_compiled_otherwise_since_is_copied_as_torch_copies(backend: str | None) -> None:
    model, x = in_place(Model()), torch.randn(4, 8)
    if backend is None:
        model._compiled_call_impl = None
    else:
        model.compile(backend=backend)
    copied = copy.deepcopy(model)
    assert copied._compiled_call_impl is None and copied(x).dtype == torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pickle.dumps(model)


def test_a_part_of_a_modules_state_can_be_copied_alone() -> None:
    assert "_amp_compiled" in copy.deepcopy(vars(in_place(Model())))


def test_a_pickle_says_once_that_it_is_not_compiled_and_loads_without_ampcompile() -> None:
    model, x = in_place(Pickled()), torch.randn(4, 8)
    with pytest.warns(
        ampcompile.AmpWarning, match="found a pickle of Pickled, compiled in place; what is loaded of it"
    ):
        pickled = pickle.dumps(model)
    assert b"ampcompile" not in pickled
    loaded = pickle.loads(pickle.dumps(model))
    assert loaded(x).dtype == torch.float32
    assert same_bits(in_place(loaded)(x), model(x)) and same_bits(copy.deepcopy(loaded)(x), model(x))
