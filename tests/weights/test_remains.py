"""What graphs read of weights without memory: fixed tensors, beside copies of others that are refreshed."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompile.errors import ReleasedError
from ampcompile.kernels.packed_linear import LinearBlocks, available
from ampcompile.torch_private import storages
from ampcompile.weights import Binding, CopySpec, Form
from ampcompile.weights.copies import PAYS
from ampcompile.weights.release import release_masters
from ampcompile.weights.remains import MixedSet, record_of
from ampcompile.weights.store import store, weight_stats

BF16, HALF = Form(torch.bfloat16), Form(torch.float16)


def reader(*weights: int, form: Form = BF16, blocks: Any = None, whole: tuple[int, ...] = ()) -> Binding:
    return Binding([CopySpec(weight, form, blocks) for weight in weights], whole=whole)


def model(count: int = 3) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.randn(64, 64)) for _ in range(count))


def rounded(weights: Any) -> list[Tensor]:
    return [weight.detach().bfloat16() for weight in weights]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


def test_released_weights_keep_their_tensors_and_the_others_are_refreshed() -> None:
    weights = model()
    binding, alone = reader(0, 1, 2), reader(1)
    alone.copies(list(weights)), binding.copies(list(weights))
    expected = rounded(weights)
    release_masters(weights, keep=["2"])
    for _ in range(2):
        assert same(binding.copies(list(weights)), expected) and same(alone.copies([None, weights[1]]), expected[1:2])
    assert [type(each) for each in binding._sets.values()] == [MixedSet]
    fixed = binding.copies(list(weights))[0]
    for write in (lambda: weights[2].detach().add_(1), lambda: weights[2].data.mul_(2)):
        write()
        expected[2] = weights[2].detach().bfloat16()
        assert same(binding.copies(list(weights)), expected)
    assert binding.copies(list(weights))[0] is fixed


def test_a_weight_that_has_memory_again_is_cast_again() -> None:
    weights = model()
    binding = reader(0, 1, 2)
    binding.copies(list(weights))
    release_masters(weights)
    expected = rounded(weights[:0]) + binding.copies(list(weights))
    storages.write_data(weights[1], torch.ones(64, 64))
    expected[1] = torch.ones(64, 64, dtype=torch.bfloat16)
    assert record_of(weights[1]) is None and same(binding.copies(list(weights)), expected)
    weights[1].detach().add_(1)
    assert same(binding.copies(list(weights)), [expected[0], expected[1] + 1, expected[2]])
    other = [weights[0], nn.Parameter(torch.zeros(64, 64)), weights[2]]
    assert same(binding.copies(other), [expected[0], torch.zeros(64, 64).bfloat16(), expected[2]])


def test_a_graph_gets_what_is_left_or_an_error() -> None:
    weights = model(1)
    reader(0).copies(list(weights))
    kept = reader(0)
    expected = kept.copies(list(weights))
    release_masters(weights)
    assert same(reader(0).copies(list(weights)), expected) and same(kept.copies(list(weights)), expected)
    with pytest.raises(ReleasedError, match="found a graph that reads 0 as f16, in a layout that no graph read before"):
        reader(0, form=HALF).copies(list(weights))
    storages.discard_memory(stranger := nn.Parameter(torch.ones(2)), "not ours")
    with pytest.raises(ReleasedError, match="found a graph that reads a weight as bf16"):
        reader(0).copies([stranger])


@pytest.mark.skipif(not available(torch.bfloat16), reason="nothing is packed in bfloat16 here")
def test_packed_forms_stay_and_plain_ones_only_where_they_are_read() -> None:
    weights = model(1)
    packed, plain = reader(0, blocks=LinearBlocks()), reader(0)
    packed.copies(list(weights))
    release_masters(weights)  # packed before it would have paid
    (form,) = packed.copies(list(weights))
    assert form.is_mkldnn and weight_stats()[:2] == (2 * 64 * 64, 1)
    with pytest.raises(ReleasedError, match="found a graph that reads 0 as bf16, in a layout"):
        plain.copies(list(weights))
    weights = model(1)
    plain.copies(list(weights))
    for _ in range(PAYS):
        packed.copies(list(weights))
    release_masters(weights)
    assert packed.copies(list(weights))[0].is_mkldnn and not plain.copies(list(weights))[0].is_mkldnn


def test_weights_that_a_graph_reads_whole_are_those_of_its_calls() -> None:
    one, other = model(2), model(2)
    binding, second = reader(0, whole=(1,)), reader(1)
    binding.copies(list(one)), binding.copies(list(other)), second.copies(list(one))
    assert {storages.storage_key(weights[1]) for weights in (one, other)} <= store.read_whole()
    assert release_masters(one).kept == {"1": "a compiled graph reads it in float32"}
    key = storages.storage_key(other[1])
    del other
    assert key not in store.read_whole()


def test_what_is_left_goes_with_the_weight() -> None:
    weights = model(2)
    binding = reader(0, 1)
    forms = list(map(weakref.ref, binding.copies(list(weights))))
    release_masters(weights)
    keys = set(map(id, weights))
    assert keys <= store.released.keys() and None not in [form() for form in forms]
    del weights
    assert keys.isdisjoint(store.released) and [form() for form in forms] == [None, None]
    fresh = model(2)
    assert same(binding.copies(list(fresh)), rounded(fresh))
