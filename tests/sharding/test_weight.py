"""A sharded weight is a plain parameter to Dynamo, tells of eager readers, and refuses them once it is in 16 bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ampcompile.errors import UnsupportedError
from ampcompile.sharding.weight import Gather, ShardedWeight, gathers_of
from ampcompile.weights.spec import Form


def made(low: bool = False) -> tuple[nn.Linear, Gather]:
    layer = nn.Linear(4, 3)
    numbers = layer.weight.detach().bfloat16()
    param = SimpleNamespace(
        weight=layer.weight, low=None, is_low=False, is_saved=False, low_numbers=lambda form, fp8: numbers
    )
    gather = Gather("blocks.0.up.weight", param)
    gather.dtype = torch.bfloat16
    if low:
        gather.rounded_to.add(torch.bfloat16)
        gather.decide(torch.bfloat16)
    return layer, gather


READERS: dict[str, Any] = {
    "linear": lambda w: nn.functional.linear(torch.ones(4), w),
    "float": lambda w: w.float(),
    "mul": lambda w: 2 * w,
    "cat": lambda w: torch.cat([w, w]),
    "_foreach_norm": lambda w: torch._foreach_norm([w]),
    "data": lambda w: w.data,
    "detach": lambda w: w.detach(),
    "T": lambda w: w.T,
    "numpy": lambda w: w.numpy(force=True),
    "__getitem__": lambda w: w[0],
    "data_ptr": lambda w: w.data_ptr(),
    "untyped_storage": lambda w: w.untyped_storage(),
    "__repr__": repr,
}


@pytest.mark.parametrize("name", READERS)
def test_an_eager_reader_is_noted_at_first_and_refused_later(name: str) -> None:
    layer, gather = made()
    READERS[name](layer.weight)
    assert gather.reader == f"{name} in eager code" and not gather.may_be(torch.bfloat16)
    assert type(layer.weight) is ShardedWeight
    layer, gather = made(low=True)
    with pytest.raises(UnsupportedError, match=f"blocks.0.up.weight gathered in bf16.*{name} in eager code.*'fp32'"):
        READERS[name](layer.weight)


def test_metadata_and_gradients_are_free() -> None:
    layer, gather = made(low=True)
    weight = layer.weight
    assert weight.shape == (3, 4) and weight.size(0) == weight.stride(0) - 1 == 3 and weight.numel() == 12
    assert weight.dtype == torch.float32 and weight.requires_grad and weight.is_contiguous() and weight.is_leaf
    weight.grad = torch.zeros_like(weight)
    assert type(weight.grad) is torch.Tensor and len(weight) == 3 and hash(weight) == id(weight)
    weight.requires_grad_(False)
    assert not gather.reader


def test_a_weight_may_be_low_once_graphs_have_rounded_it_to_one_type() -> None:
    _, gather = made()
    assert not gather.may_be(torch.bfloat16) and "when the second forward starts" in gather.record().because
    assert gather.rounded_numbers(Form(torch.bfloat16)) is gather.rounded_numbers(Form(torch.bfloat16))
    assert gather.may_be(torch.bfloat16)
    gather.decide(None)
    assert gather.record() == ("blocks.0.up.weight", "f32", gather.record().because, 0)
    assert "some rank read it in another type or not at all" in gather.record().because
    gather.decide(torch.bfloat16)
    assert gather.record()[1:] == ("bf16", "compiled graphs round it before they read it", 24)
    gather.decide(None)
    assert gather.rounded_numbers(Form(torch.float16)).dtype == torch.float16 and not gather.may_be(torch.bfloat16)
    assert gather.record().because == "compiled graphs round it to bf16, f16"


def test_a_weight_may_have_8_bits_once_graphs_have_multiplied_it_in_fp8_alone() -> None:
    _, gather = made()
    eight = torch.float8_e4m3fn
    gather.rounded_numbers(Form(eight, part=0), unquantized="")
    assert gather.may_be(eight) and not gather.may_be(torch.bfloat16)
    assert "when the second forward starts" in gather.record().because
    gather.decide(eight)
    assert gather.record()[1:] == ("f8", "compiled graphs multiply it in fp8", 36)
    with pytest.raises(UnsupportedError, match=r"gathered in f8.*rounds it to bf16"):
        gather.rounded_numbers(Form(torch.bfloat16))
    gather.decide(None)
    gather.reader = ""
    assert gather.record().because == "compiled graphs round it to bf16, f8"
    _, gather = made()
    gather.rounded_numbers(Form(eight, part=0))
    gather.fp8 = False
    assert not gather.may_be(eight) and gather.record().because == "compiled graphs round it to f8"


def test_a_graph_that_rounds_to_another_type_is_refused() -> None:
    _, gather = made(low=True)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="rounds it to f16"):
            gather.rounded_numbers(Form(torch.float16))
        assert gather.rounded_numbers(Form(torch.bfloat16)).dtype == torch.bfloat16


def test_who_else_reads_a_weight_may_write_it() -> None:
    """Then graphs get numbers rounded for each call."""
    layer, gather = made()
    gather.read_whole("someone")
    before = gather.rounded_numbers(Form(torch.bfloat16))
    with torch.no_grad():
        layer.weight.data.add_(1.0)
    after = gather.rounded_numbers(Form(torch.bfloat16))
    assert after.dtype == torch.bfloat16 and not torch.equal(before, after)


def test_modules_without_a_policy_have_no_gathers() -> None:
    assert gathers_of(nn.Linear(2, 2)) == gathers_of(len) == []


def test_a_graph_beside_another_reader_quantizes_a_weight_once_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from ampcompile.kernels import fp8

    (layer, gather), calls, quantize = made(), [], fp8.quantized_parts
    monkeypatch.setattr(fp8, "quantized_parts", lambda weight: calls.append(weight) or quantize(weight))
    gather.read_whole("someone")
    for _ in range(2):
        quantized: dict[Any, Any] = {}
        parts = [gather.rounded_numbers(Form(fp8.E4M3, part=i), "", quantized) for i in range(3)]
        assert torch.equal(parts[0].float(), quantize(layer.weight.detach())[0].float())
    assert len(calls) == 2
