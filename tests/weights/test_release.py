"""Serving with 16-bit weights: the same bits, fewer bytes, no silent rounding, and the way back."""

import copy
import ctypes
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import ampcompile
from ampcompile.errors import UnsupportedError
from benchmarks.models import GPT, GPTConfig
from tests.compiling import gradients

BF16 = torch.bfloat16


def tied() -> tuple[nn.Module, Tensor]:
    return GPT(GPTConfig(layers=1, width=64, heads=2, vocab=96, context=16)), torch.randint(0, 96, (2, 8))


def convolutions() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(128, 64)]
    return nn.Sequential(*layers), torch.randn(2, 3, 8, 8)


MODELS = {"tied": tied, "convolutions": convolutions}
FLOAT32 = {  # what graphs read in float32
    "tied": {"tokens.weight", "positions.weight", "blocks.0.attention_norm.weight", "blocks.0.attention_norm.bias"}
    | {"blocks.0.mlp_norm.weight", "blocks.0.mlp_norm.bias", "norm.weight", "norm.bias"},
    "convolutions": {"1.weight", "1.bias"},
}


def amp(model: Any, lower: str = "eager", **options: Any) -> Any:
    return torch.compile(model, backend="amp", options={"lower": lower, **options})


def called(model: nn.Module, x: Tensor, lower: str = "eager", **options: Any) -> Any:
    """The model, compiled and called often enough that its weights are packed."""
    compiled = amp(model, lower, **options)
    for _ in range(4):
        run(compiled, x)
    return compiled


def run(compiled: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return compiled(x)


def saved(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


class Case:
    """A model that was called; `released` if its masters are to be."""

    def __init__(self, released: bool = True, **options: Any) -> None:
        self.model, self.x = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), torch.randn(4, 64)
        self.weight, self.checkpoint = self.model[0].weight, saved(self.model)
        self.compiled = called(self.model, self.x, **options)
        self.expected = run(self.compiled, self.x)
        if released:
            self.released = ampcompile.release_masters(self.compiled)

    def right(self) -> bool:
        """True if a call gives what it gave at first."""
        return torch.equal(run(self.compiled, self.x), self.expected)

    def whole(self) -> bool:
        """True if all is float32."""
        return all(param.dtype == torch.float32 for param in self.model.parameters())


@pytest.mark.parametrize("lower", ["aot_eager", pytest.param("inductor", marks=pytest.mark.ci)])
@pytest.mark.parametrize("name", MODELS)
def test_calls_keep_their_bits_and_weights_become_16_bit_parameters(name: str, lower: str) -> None:
    model, x = MODELS[name]()
    compiled = called(model.eval(), x, lower)
    expected = run(compiled, x)
    whole = sum(p.nbytes for p in model.parameters())
    released = ampcompile.release_masters(compiled)
    assert all(torch.equal(run(compiled, x), expected) for _ in range(4))
    assert released.kept.keys() == FLOAT32[name]
    assert {n for n, p in model.named_parameters() if p.dtype == torch.float32} == FLOAT32[name]
    in_float32 = sum(p.nbytes for n, p in model.named_parameters() if n in FLOAT32[name])
    assert released.bytes_freed == (whole - in_float32) / 2 and "bytes freed" in str(released)
    assert sum(p.nbytes for p in model.parameters()) == whole - released.bytes_freed
    casts = ampcompile.weight_stats().casts
    run(compiled, x)
    assert ampcompile.weight_stats().casts == casts


def step(weight: Tensor, kind: Any = torch.optim.AdamW, **options: Any) -> None:
    weight.grad = torch.ones_like(weight)
    kind([weight], **options).step()


ROUNDING: list[Callable[[Case], object]] = [
    lambda case: step(case.weight),
    lambda case: step(case.weight, fused=True),
    lambda case: case.model.load_state_dict(case.checkpoint),
    lambda case: case.model[0].load_state_dict({"weight": torch.ones(128, 64), "bias": torch.ones(128)}),
]


def test_what_would_round_silently_raises_and_changes_nothing() -> None:
    case = Case()
    for use in ROUNDING:
        with pytest.raises(UnsupportedError, match=r"found .* ampcompile.release_masters turned into .*; expected"):
            use(case)
        assert case.right()
        case.weight.grad = None
    case.released.restore(case.checkpoint)
    assert case.whole() and case.right()
    for use in ROUNDING:
        use(case)


def test_a_step_on_masters_of_released_weights_raises_also_where_it_was_warm() -> None:
    case = Case(released=False)
    warm = ampcompile.optim.SGD([case.weight], lr=0.0)
    for _ in range(2):
        case.weight.grad = torch.ones_like(case.weight)
        warm.step()
    warm.zero_grad()
    ampcompile.release_masters(case.compiled)
    for use in (warm.step, lambda: step(case.weight, ampcompile.optim.AdamW, masters="float32")):
        case.weight.grad = torch.ones_like(case.weight)
        with pytest.raises(UnsupportedError, match=r"found a step on a weight that ampcompile\.release_masters turned"):
            use()


def test_a_state_in_16_bits_loads_and_one_in_float32_may_be_assigned() -> None:
    case = Case()
    case.model.load_state_dict(saved(case.model))
    assert case.right()
    case.model.load_state_dict(case.checkpoint, assign=True)
    assert case.whole() and case.right()
    step(case.model[0].weight)


def test_after_restoring_all_works_as_before(tmp_path: Any) -> None:
    case = Case()
    twin = amp(copy.deepcopy(case.model))
    torch.save(case.checkpoint, tmp_path / "model.pt")
    case.released.restore(tmp_path / "model.pt")
    assert all(torch.equal(value, case.checkpoint[name]) for name, value in case.model.state_dict().items())
    assert torch.equal(run(twin, case.x), case.expected), "a deep copy is a model of its own"
    case.compiled(case.x).sum().backward()
    torch.optim.SGD(case.model.parameters(), lr=0.5).step()
    with torch.autocast("cpu", BF16):
        assert torch.equal(run(case.compiled, case.x), run(case.model, case.x))
    assert not case.right()


def test_another_checkpoint_is_loaded_as_a_whole_and_a_wrong_one_not_at_all() -> None:
    case = Case()
    other = {name: value + 1 for name, value in case.checkpoint.items()}
    for wrong, found in (({}, "nothing"), (other | {"0.weight": torch.ones(3)}, r"a tensor of \(3,\)")):
        with pytest.raises(UnsupportedError, match=f"found {found} under '0.weight' in the checkpoint, expected"):
            case.released.restore(wrong)
        assert case.right()
    case.released.restore({f"_orig_mod.{name}": value for name, value in other.items()})
    assert all(torch.equal(value, other[name]) for name, value in case.model.state_dict().items())


def test_a_second_call_gives_the_way_back_too_and_releases_the_rest() -> None:
    case = Case(released=False)
    first = ampcompile.release_masters(case.model, keep=["0.weight", "2"])
    assert first.kept == dict.fromkeys(("0.weight", "2.weight", "2.bias"), "asked for")
    assert "2.bias is kept in float32: asked for" in str(first)
    for name in ("head", "0.weigh"):
        with pytest.raises(UnsupportedError, match=f"found keep='{name}', expected the name of a weight or module"):
            ampcompile.release_masters(case.model, keep=name)
    assert case.right()
    second = ampcompile.release_masters(case.model)
    assert second.bytes_freed > first.bytes_freed and case.right()
    second.restore(case.checkpoint)
    assert case.whole() and case.right()


def with_gradient(case: Case) -> None:
    case.weight.grad = torch.zeros(128, 64)


def read_in_float32(case: Case) -> Any:
    case.weight.grad = None
    reader = amp(lambda x: x + case.weight[0])
    run(reader, torch.zeros(64))
    return reader


HOLDERS: list[tuple[Callable[[Case], object], str]] = [
    (lambda case: case.weight.detach()[0], "something else holds its memory"),
    (lambda case: case.weight.detach().numpy(), "something else holds its memory"),
    (with_gradient, "it has a gradient"),
    (read_in_float32, "a compiled graph reads it in float32"),
]


def test_what_is_read_otherwise_or_held_is_kept() -> None:
    case = Case(released=False)
    for hold, because in HOLDERS:
        held = hold(case)
        kept = ampcompile.release_masters(case.model).kept
        assert kept.keys() == {"0.weight"} and kept["0.weight"].startswith(because)
        assert case.right()
        del held


@pytest.mark.parametrize(
    ("other", "options"),
    [({"dtype": torch.float16}, {}), ({}, {"weights": "every_call"}), ({}, {"triton.cudagraphs": True})],
)
def test_graphs_that_read_two_types_or_need_the_weights_themselves_keep_them(
    other: dict[str, Any], options: dict[str, Any]
) -> None:
    case = Case(released=False, **options)
    twin = called(case.model, case.x, **other) if other else None
    with pytest.raises(UnsupportedError, match="found no weight of Sequential"):
        ampcompile.release_masters(case.model)
    assert case.right()
    del twin


def test_arguments_that_are_refused() -> None:
    case = Case(released=False)
    with pytest.raises(UnsupportedError, match="found 'list', expected"):
        ampcompile.release_masters([case.weight])
    case.weight._fsdp_flattened = True
    with pytest.raises(UnsupportedError, match=r"found 0\.weight, which is sharded; expected plain parameters"):
        ampcompile.release_masters(case.model)
    assert case.whole()


def test_what_no_sample_sees_is_in_what_stays() -> None:
    case = Case(released=False)
    ctypes.memset(case.weight.data_ptr() + 4 * 64, 0, 4 * 64)  # a row
    ampcompile.release_masters(case.model)
    assert not case.weight[1].any()
    with torch.autocast("cpu", BF16):
        assert torch.equal(run(case.compiled, case.x), run(case.model, case.x))


def test_a_backward_to_come_gets_its_gradients() -> None:
    case = Case(released=False, lower="aot_eager")
    expected = gradients(case.model, lambda _: case.compiled(case.x).sum())
    case.model.zero_grad()
    loss = case.compiled(case.x).sum()
    ampcompile.release_masters(case.model)
    loss.backward()
    for param, grad in zip(case.model.parameters(), expected, strict=True):
        assert torch.equal(param.grad, grad.to(param.dtype))


def test_nothing_is_kept_of_models_that_are_gone() -> None:
    case = Case()
    storages = [StorageWeakRef(param.untyped_storage()) for param in case.model.parameters()]
    assert case.released.bytes_freed
    del case
    torch._dynamo.reset()
    gc.collect()
    assert all(storage.expired() for storage in storages)


def test_a_load_by_whoever_holds_the_model_or_a_part_of_it_is_refused() -> None:
    case = Case()
    model, state = case.model, case.checkpoint
    inner, last = nn.ModuleDict({"inner": model}), {"weight": state["2.weight"], "bias": state["2.bias"]}
    for loads, given in ((inner, {f"inner.{name}": state[name] for name in state}), (model, state), (model[2], last)):
        with pytest.raises(UnsupportedError, match="to load into"):
            loads.load_state_dict(given)
