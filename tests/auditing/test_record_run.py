"""A recording holds every op beside float64, and the results of the compiled call itself."""

import copy

import pytest
import torch
from torch import nn

import ampcompile
from ampcompile.errors import OptionError
from tests.auditing.models import Block, mean_square


def test_ops_inputs_and_results_are_recorded_and_nothing_is_left_behind() -> None:
    model, x = nn.Sequential(Block(), nn.BatchNorm1d(8), nn.Dropout(0.5)), torch.randn(4, 8)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    recording = ampcompile.record(model, loss=mean_square, lower="aot_eager")(x)
    named = [step.place.op for step in recording.steps]
    assert {"input 0.up.weight", "aten.addmm", "aten.native_batch_norm_backward"} <= set(named)
    assert set(recording.results) == {"output 0", *(f"gradient of {name}" for name, _ in model.named_parameters())}
    assert all(r.call == pytest.approx(r.ops, rel=0.1, abs=1e-6) for r in recording.results.values()), "the same mask"
    product = recording.steps[named.index("aten.addmm")]
    weight = recording.steps[product.operands[-1]].operands
    assert (product.dtype, product.shape, product.length) == ("bf16", (4, 16), 8)
    assert [named[i] for i in weight] == ["input 0.up.weight"]
    about = recording.about
    assert (about["callable"], about["run"], about["option lower"]) == ("Sequential", "compiled", "aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    assert torch.equal(random, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())


def test_eager_autocast_is_recorded_with_its_own_casts() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    recording = ampcompile.record(model, eager=True, policy="module *=fp32", backward=False)(x)
    assert [s.dtype for s in recording.steps if s.place.op == "aten.addmm"] == ["bf16"], "policies are ours alone"
    with torch.autocast("cpu", torch.bfloat16):
        exact = model(x).double() - (x.bfloat16().double() @ model.weight.bfloat16().double().T)
    assert exact.isfinite().all() and recording.about["run"] == "eager autocast"
    assert recording.results["output 0"].call == recording.results["output 0"].ops


def test_options_are_checked_at_once() -> None:
    with pytest.raises(OptionError):
        ampcompile.record(nn.Linear(2, 2), dtype="int8")
    with pytest.raises(OptionError, match="expected the callable alone"):
        ampcompile.record(nn.Linear(2, 2), torch.ones(2))
    assert "waits for a call" in repr(ampcompile.record(nn.Linear(2, 2)))
