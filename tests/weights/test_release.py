"""Serving with 16-bit weights: the same bits, fewer bytes, no silent rounding, and the way back."""

import copy
import ctypes
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.errors import ReleasedError
from ampcompile.weights import release
from benchmarks.models import GPT, GPTConfig
from tests.models import Block

lowered = pytest.mark.parametrize("lower", ["aot_eager", pytest.param("inductor", marks=pytest.mark.ci)])
BF16 = torch.bfloat16


def tied() -> tuple[nn.Module, Tensor]:
    return GPT(GPTConfig(layers=1, width=64, heads=2, vocab=96, context=16)), torch.randint(0, 96, (2, 8))


def convolutions() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(128, 64)]
    return nn.Sequential(*layers), torch.randn(2, 3, 8, 8)


def layers() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Block(64, 128), Block(64, 128)), torch.randn(4, 64)


MODELS = {"tied": tied, "convolutions": convolutions, "layers": layers}
FLOAT32 = {  # what graphs read in float32
    "tied": {"tokens.weight", "positions.weight", "blocks.0.attention_norm.weight", "blocks.0.attention_norm.bias"}
    | {"blocks.0.mlp_norm.weight", "blocks.0.mlp_norm.bias", "norm.weight", "norm.bias"},
    "convolutions": {"1.weight", "1.bias"},
    "layers": {f"{i}.norm.{name}" for i in (0, 1) for name in ("weight", "bias")},
}


def amp(model: Any, lower: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(model, backend="amp", options={"lower": lower, **options})


def called(model: nn.Module, x: Tensor, lower: str = "aot_eager", **options: Any) -> Any:
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
    def __init__(self) -> None:
        self.model, self.x = layers()
        self.model.eval()
        self.checkpoint = saved(self.model)
        self.compiled = called(self.model, self.x)
        self.expected = run(self.compiled, self.x)
        self.weight = self.model[0].up.weight
        self.released = ampcompile.release_masters(self.compiled)


@lowered
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


ROUNDING: dict[str, Callable[[Case], object]] = {
    "a step": lambda case: step(case.weight),
    "a fused step": lambda case: step(case.weight, fused=True),
    "load_state_dict": lambda case: case.model.load_state_dict(case.checkpoint),
    "load_state_dict of a part": lambda case: case.model[0].up.load_state_dict(
        {"weight": torch.ones(128, 64), "bias": torch.ones(128)}
    ),
}


def step(weight: Tensor, **options: Any) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], **options).step()


@pytest.mark.parametrize("use", ROUNDING)
def test_what_would_round_silently_raises_and_changes_nothing(use: str) -> None:
    case = Case()
    with pytest.raises(ReleasedError, match=r"found .* ampcompile.release_masters turned into .*; expected"):
        ROUNDING[use](case)
    assert torch.equal(run(case.compiled, case.x), case.expected)
    case.released.restore(case.checkpoint)
    assert all(p.dtype == torch.float32 for p in case.model.parameters())
    assert torch.equal(run(case.compiled, case.x), case.expected)
    case.weight.grad = None
    ROUNDING[use](case)


def test_a_state_in_16_bits_loads_and_one_in_float32_may_be_assigned() -> None:
    case = Case()
    case.model.load_state_dict(saved(case.model))
    assert torch.equal(run(case.compiled, case.x), case.expected)
    case.model.load_state_dict(case.checkpoint, assign=True)
    assert all(p.dtype == torch.float32 for p in case.model.parameters())
    assert torch.equal(run(case.compiled, case.x), case.expected)
    step(case.model[0].up.weight)


def test_after_restoring_all_works_as_before(tmp_path: Any) -> None:
    case = Case()
    torch.save(case.checkpoint, tmp_path / "model.pt")
    case.released.restore(tmp_path / "model.pt")
    assert all(torch.equal(value, case.checkpoint[name]) for name, value in case.model.state_dict().items())
    case.compiled(case.x).sum().backward()
    torch.optim.SGD(case.model.parameters(), lr=0.5).step()
    with torch.autocast("cpu", BF16):
        assert torch.equal(run(case.compiled, case.x), run(case.model, case.x))
    assert not torch.equal(run(case.compiled, case.x), case.expected)


def test_another_checkpoint_is_loaded_as_a_whole_and_a_wrong_one_not_at_all() -> None:
    case = Case()
    other = {name: value + 1 for name, value in case.checkpoint.items()}
    for wrong, found in (({}, "nothing"), (other | {"0.up.weight": torch.ones(3)}, r"a tensor of \(3,\)")):
        with pytest.raises(ReleasedError, match=f"found {found} under '0.up.weight' in the checkpoint, expected"):
            case.released.restore(wrong)
        assert torch.equal(run(case.compiled, case.x), case.expected)
    case.released.restore({f"_orig_mod.{name}": value for name, value in other.items()})
    assert all(torch.equal(value, other[name]) for name, value in case.model.state_dict().items())


def test_a_second_call_gives_the_way_back_too_and_releases_the_rest() -> None:
    model, x = layers()
    checkpoint, compiled = saved(model), called(model, x)
    expected = run(compiled, x)
    first = ampcompile.release_masters(model, keep=["0.up.weight", "1"])
    assert first.kept["0.up.weight"] == first.kept["1.down.bias"] == "asked for"
    assert "0.down.weight" not in first.kept and "1.down.bias is kept in float32: asked for" in str(first)
    for name in ("head", "0.firs"):
        with pytest.raises(ReleasedError, match=f"found keep='{name}', expected the name of a weight or module"):
            ampcompile.release_masters(model, keep=name)
    assert torch.equal(run(compiled, x), expected)
    second = ampcompile.release_masters(model)
    assert second.bytes_freed > first.bytes_freed and torch.equal(run(compiled, x), expected)
    second.restore(checkpoint)
    assert all(p.dtype == torch.float32 for p in model.parameters()) and torch.equal(run(compiled, x), expected)


def read_in_float32(model: nn.Module) -> Any:
    reader = amp(lambda x: x + model[0].up.weight[0])
    run(reader, torch.zeros(64))
    return reader


def with_gradient(model: nn.Module) -> None:
    model[0].up.weight.grad = torch.zeros(128, 64)


HOLDERS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a view": (lambda model: model[0].up.weight.detach()[0], "something else holds its memory"),
    "an array": (lambda model: model[0].up.weight.detach().numpy(), "something else holds its memory"),
    "a graph without copies": (read_in_float32, "a compiled graph reads it in float32"),
    "another type": (
        lambda model: called(model, torch.randn(4, 64), dtype=torch.float16),
        "compiled graphs read it as",
    ),
    "a gradient": (with_gradient, "it has a gradient"),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_read_otherwise_or_held_is_kept(holder: str) -> None:
    model, x = layers()
    compiled = called(model, x)
    expected = run(compiled, x)
    hold, because = HOLDERS[holder]
    held = hold(model)
    if holder == "another type":
        with pytest.raises(ReleasedError, match="found no weight of Sequential"):
            ampcompile.release_masters(model)
    else:
        kept = ampcompile.release_masters(model).kept
        assert kept["0.up.weight"].startswith(because) and "1.up.weight" not in kept
    assert torch.equal(run(compiled, x), expected)
    del held


@pytest.mark.parametrize("options", [{"weights": "every_call"}, {"triton.cudagraphs": True}])
def test_graphs_that_need_the_weights_themselves_keep_them(options: dict[str, Any]) -> None:
    model, x = layers()
    compiled = called(model, x, **options)
    expected = run(compiled, x)
    with pytest.raises(ReleasedError, match="found no weight of Sequential"):
        ampcompile.release_masters(model)
    assert torch.equal(run(compiled, x), expected)


def test_arguments_that_are_refused() -> None:
    model, x = layers()
    called(model, x)
    with pytest.raises(ReleasedError, match="found 'list', expected"):
        ampcompile.release_masters([model[0].up.weight])
    model[1].up.weight._fsdp_flattened = True
    with pytest.raises(ReleasedError, match=r"found 1\.up\.weight, which is sharded; expected plain parameters"):
        ampcompile.release_masters(model)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_what_no_sample_sees_is_in_what_stays() -> None:
    model, x = layers()
    compiled = called(model, x)
    weight = model[0].up.weight
    ctypes.memset(weight.data_ptr() + 4 * 64, 0, 4 * 64)  # a row
    ampcompile.release_masters(model)
    assert not weight[1].any()
    with torch.autocast("cpu", BF16):
        assert torch.equal(run(compiled, x), run(model, x))


def test_a_backward_to_come_gets_its_gradients() -> None:
    model, x = layers()
    compiled = called(model, x)
    compiled(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss = compiled(x).sum()
    ampcompile.release_masters(model)
    loss.backward()
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param.grad, grad.to(param.dtype))


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    case = Case()
    twin = amp(copy.deepcopy(case.model))
    case.released.restore(case.checkpoint)
    assert torch.equal(run(twin, case.x), case.expected) and torch.equal(run(case.compiled, case.x), case.expected)


def test_nothing_is_kept_of_models_that_are_gone() -> None:
    gc.collect()
    before = len(release._released)
    for _ in range(3):
        model, x = layers()
        called(model, x)
        assert ampcompile.release_masters(model).bytes_freed
        assert len(release._released) > before
        del model
        torch._dynamo.reset()
        gc.collect()
    assert len(release._released) == before


def test_a_load_looks_at_each_weight_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = layers()
    called(model, x)
    state = saved(model)
    ampcompile.release_masters(model)
    looked: list[Any] = []
    is_released = release.is_released
    monkeypatch.setattr(release, "is_released", lambda weight: looked.append(weight) or is_released(weight))
    for loads, prefix in ((nn.ModuleDict({"inner": model}), "inner."), (model, ""), (model[1], "")):
        given = {prefix + name: value for name, value in state.items()}
        if loads is model[1]:
            given = {name.removeprefix("1."): value for name, value in state.items() if name.startswith("1.")}
        with pytest.raises(ReleasedError, match="to load into"):
            loads.load_state_dict(given)
    in_16_bits = saved(model)
    looked.clear()
    model.load_state_dict(in_16_bits)
    assert len(looked) == 2 * len(list(model.parameters()))
