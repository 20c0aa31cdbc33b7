"""Copies of weights: shared, freed, kept apart, and never changed under a backward that is still to come."""

import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import ampcompile
from ampcompile.errors import OptionError
from ampcompile.kernels.fp8 import parts
from ampcompile.weights import Form, free_copies, invalidate, weight_stats
from ampcompile.weights.spec import hoistable
from tests.weights.bindings import bind, copies_of, lines_of
from tests.weights.writers import unsampled

BF16, F16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    gc.collect()
    assert weight_stats().copies == 0
    yield


def parameters(count: int = 3) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(6 + i, 8)) for i in range(count)]


def low(tensors: list[Tensor], dtype: torch.dtype = BF16) -> list[Tensor]:
    return [tensor.detach().to(dtype) for tensor in tensors]


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


def test_graphs_share_one_copy_per_weight_and_dtype() -> None:
    params = parameters()
    train, evaluate = bind([BF16] * 3), bind([BF16, BF16, F16, BF16])
    a = train.copies(params)
    b = evaluate.copies([params[0], params[0], params[0], params[2]])
    assert a[0] is b[0] is b[1] and a[2] is b[3] and b[2].dtype == F16
    assert weight_stats().copies == 4
    assert weight_stats().bytes == 2 * sum(p.numel() for p in [*params, params[0]])


def test_a_write_is_cast_once_for_all_graphs() -> None:
    params = parameters()
    bindings = [bind([BF16] * 3) for _ in range(3)]
    for binding in bindings:
        binding.copies(params)
    casts = weight_stats().casts
    for _ in range(2):
        with torch.no_grad():
            params[1].add_(1)
        for binding in bindings * 2:
            assert same(binding.copies(params), low(params))
            assert all(a is b for a, b in zip(binding.copies(tuple(params)), binding.copies(params), strict=True))
    assert weight_stats().casts == casts + 2


def test_copies_go_with_the_last_graph_and_with_the_weight() -> None:
    params, others = parameters(), parameters()
    first, second = bind([BF16] * 3), bind([BF16])
    for weights in (params, others):
        first.copies(weights)
    second.copies(params[:1])
    assert weight_stats().copies == 6
    del others, weights
    assert weight_stats().copies == 3
    del first
    assert weight_stats().copies == 1
    del second
    assert weight_stats() == (0, 0, weight_stats().casts)


def test_no_reference_to_a_weight_is_kept() -> None:
    (param,) = parameters(1)
    references, attributes = sys.getrefcount(param), dict(param.__dict__)
    binding = bind([BF16])
    binding.copies([param])
    _ = param.data
    assert sys.getrefcount(param) == references
    assert weakref.getweakrefcount(param) == 0
    assert param.__dict__ == attributes and torch.equal(pickle.loads(pickle.dumps(param)), param)
    assert param._use_count() == 1
    torch.utils.swap_tensors(param, nn.Parameter(torch.randn(6, 8)))
    assert same(binding.copies([param]), low([param]))


def test_every_set_of_weights_keeps_its_copies_for_as_long_as_it_lives() -> None:
    binding = bind([BF16] * 3)
    sets = [parameters() for _ in range(100)]
    for params in sets:
        assert same(binding.copies(params), low(params))
    casts = weight_stats().casts
    for params in sets * 2:
        assert same(binding.copies(params), low(params))
    assert weight_stats().casts == casts and weight_stats().copies == 300
    with torch.no_grad():
        sets[2][0].zero_()
    for params in sets * 2:
        assert same(binding.copies(params), low(params))
    assert weight_stats().casts == casts + 1
    del sets[1:]
    del params
    assert weight_stats().copies == 3
    for _ in range(400):
        binding.copies(parameters())
    assert len(binding.sets) < 250, "sets whose weights are gone are let go of"


def test_a_new_weight_at_the_address_and_id_of_a_freed_one() -> None:
    binding, memory = bind([BF16]), torch.zeros(64, 64).numpy()
    places = set()
    for step in range(1, 2000):
        value = torch.from_numpy(memory)
        value[unsampled(value)] = step % 250  # exact in bfloat16
        param = nn.Parameter(value)
        place = id(param), param.data_ptr(), param._version
        assert same(binding.copies([param]), low([param]))
        if place in places and step > 30:
            return
        places.add(place)
        del param, value
    raise AssertionError("no id came back: nothing was tested")


def test_refreshed_in_place_when_no_backward_waits() -> None:
    params = parameters()
    binding = bind([BF16] * 3)
    addresses = [c.data_ptr() for c in binding.copies(params)]
    versions = [c._version for c in binding.copies(params)]
    for _ in range(3):
        x = torch.randn(4, 8, dtype=BF16, requires_grad=True)
        sum(F.linear(x, c).sum() for c in binding.copies(params)).backward()
        with torch.no_grad():
            for param in params:
                param.mul_(0.5)
        assert same(binding.copies(params), low(params))
        assert [c.data_ptr() for c in binding.copies(params)] == addresses
    assert all(c._version > v for c, v in zip(binding.copies(params), versions, strict=True))


def test_in_place_whatever_happens_makes_autograd_raise() -> None:
    (param,) = parameters(1)
    binding = bind([BF16], in_place=True)
    copied = binding.copies([param])[0]
    loss = F.linear(torch.randn(5, 8, dtype=BF16, requires_grad=True), copied).sum()
    with torch.no_grad():
        param.add_(1)
    assert binding.copies([param])[0] is copied
    assert same([copied], low([param]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_copy_made_in_inference_mode_is_no_inference_tensor_and_one_of_such_a_tensor_is_cast_each_time() -> None:
    (param,), binding = parameters(1), bind([BF16])
    with torch.inference_mode():
        assert not binding.copies([param])[0].is_inference()
        weight = torch.randn(6, 8)
    for _ in range(3):
        with torch.inference_mode():
            weight[3, 1] += 1
        assert same(binding.copies([weight]), low([weight]))


@pytest.mark.parametrize("form", [Form(BF16), Form(BF16, wide=True), Form(torch.float8_e4m3fn)])
def test_a_negated_view_has_the_sign_that_it_shows(form: Form) -> None:
    """Its memory holds the opposites; so it is cast in each call, by torch, whatever it was before."""
    weight = nn.Parameter(torch.ones(16, 16))
    binding = bind([form])

    def sign() -> float:
        (copy,) = binding.copies([weight])
        return (parts(copy, 16, 16)[0] if form.quantized else copy)[0, 0].float().sign().item()

    for _ in range(3):
        assert sign() == 1
    weight.data = torch._neg_view(weight.data)
    for _ in range(3):
        assert sign() == -1
    with torch.no_grad():
        weight.neg_()
    assert sign() == 1
    weight.data = weight.data.resolve_neg()
    assert sign() == 1


def test_layouts() -> None:
    for weight in (
        torch.randn(4, 6).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 4, 5).permute(2, 0, 1),
        torch.randn(()),
        torch.randn(0, 4),
        torch.randn(7)[1:],
        torch.randn(7, dtype=torch.float16)[1:],
        torch.randn(5, 3, dtype=torch.float64),
    ):
        binding = bind([BF16])
        for _ in range(2):
            (got,) = binding.copies([weight])
            assert torch.equal(got, weight.to(BF16))
            assert got.stride() == weight.stride()
            weight.add_(1)


@pytest.mark.parametrize("wide", [False, True])
def test_zeros_of_either_sign_are_told_apart(wide: bool) -> None:
    weight, binding = torch.zeros(40, 30), bind([BF16], wide=[wide])
    binding.copies([weight])
    weight.data[unsampled(weight)] = -0.0
    (read,) = binding.copies([weight])
    assert torch.equal(torch.signbit(read), torch.signbit(weight))
    assert read.dtype == (torch.float32 if wide else BF16)


def test_what_has_no_copy() -> None:
    with torch.inference_mode():
        inference = torch.randn(3)
    for tensor in (
        torch.randn(1, 3).expand(4, 3),
        torch.randn(4, 6)[:, ::2],
        torch.eye(3).to_sparse(),
        torch.ones(3, dtype=torch.int64),
        torch.randn(3).as_subclass(type("Sub", (Tensor,), {})),
        torch.empty(3, device="meta"),
        inference,
        3.0,
        None,
    ):
        assert not hoistable(tensor, {})
    assert hoistable(nn.Parameter(torch.randn(3)), {})


def test_invalidate_takes_models_parameters_and_lists() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))
    binding = bind([BF16])
    binding.copies([model[0].weight])
    for argument in (model, model[0].weight, [model[0].weight], model.parameters()):
        casts = weight_stats().casts
        invalidate(argument)
        binding.copies([model[0].weight])
        assert weight_stats().casts == casts + 1
    invalidate(model[1])
    binding.copies([model[0].weight])
    assert weight_stats().casts == casts + 1


def test_copies_are_freed_on_request_and_come_back() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    binding, other, half = bind([BF16] * 2), bind([BF16]), bind([F16])
    weights = [model[0].weight, model[1].weight]
    others = parameters(1)
    for argument in (model, weights[0], iter(weights), model.parameters()):
        assert same(binding.copies(weights), low(weights))
        assert same(half.copies(weights[:1]), low(weights[:1], F16)) and other.copies(others)
        assert weight_stats().copies == 4
        free_copies(argument)
        assert weight_stats().copies == 1, "what is read together is freed together; others stay"
    free_copies(model[0].bias)
    free_copies([])
    assert weight_stats().copies == 1
    casts = weight_stats().casts
    assert same(other.copies(others), low(others)) and weight_stats().casts == casts


@pytest.mark.parametrize("act", [free_copies, invalidate])
@pytest.mark.parametrize("nonsense", [3, None, "model", [torch.ones(2), 1.5], {"weight": torch.ones(2)}, nn.Linear])
def test_neither_module_nor_tensors(act: Callable[[object], None], nonsense: object) -> None:
    with pytest.raises(OptionError, match=r"found '\w+', expected a torch.nn.Module, .*: pass the model, or model.par"):
        act(nonsense)


def test_a_call_runs_the_same_lines_for_many_weights_as_for_few() -> None:
    def lines(count: int) -> int:
        params, binding = parameters(count), bind([BF16] * count)
        binding.copies(params)
        return lines_of(lambda: binding.copies(params))

    assert lines(15) == lines(150)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, ampcompile.optim.SGD])
def test_what_no_graph_reads_is_let_go_after_sixteen_updates_of_its_weight(kind: Any) -> None:
    """But not what is kept in place, of a frozen weight, or of one that another optimizer updates."""
    weights = [nn.Parameter(torch.randn(8, 8)) for _ in range(3)]
    trained, _, other = weights
    own, others = kind([trained], lr=0.1), torch.optim.SGD([other], lr=0.1)
    training, evaluation = bind([BF16] * 3), bind([F16] * 3)
    replayed = bind([torch.float32], in_place=True, wide=[True])
    saved = evaluation.copies(weights)[0]
    replayed.copies([trained])
    trained.grad, other.grad = torch.ones(8, 8), torch.ones(8, 8)
    for _ in range(16):
        own.step()
        assert same(training.copies(weights), low(weights))
        assert [len(copies_of(weight)) for weight in weights] == [3, 2, 2]
    others.step()
    assert [len(copies_of(weight)) for weight in weights] == [3, 2, 2]
    own.step()
    assert [len(copies_of(weight)) for weight in weights] == [2, 2, 2] and saved.isfinite().all()
    for _ in range(20):
        own.step()
        assert same(training.copies(weights), low(weights))
        assert same(evaluation.copies(weights), low(weights, F16)), "read in each update, it stays"
        assert len(copies_of(trained)) == 3
