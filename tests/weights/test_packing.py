"""Packed forms are made when they pay, renewed with the copy, and stand in for it where nobody else reads it."""

import gc

import pytest
import torch
from torch import Tensor, nn

from ampcompile.kernels.packed_conv import ConvBlocks
from ampcompile.kernels.packed_linear import LinearBlocks, available
from ampcompile.weights import Binding, free_copies, weight_stats
from ampcompile.weights.binding import PAYS
from tests.weights.bindings import bind

pytestmark = pytest.mark.skipif(not available(torch.bfloat16), reason="this CPU's oneDNN has no bfloat16 products")
BF16 = torch.bfloat16


def setting() -> tuple[list[nn.Parameter], Binding]:
    """A graph that reads its first weight packed."""
    params = [nn.Parameter(torch.randn(70, 80)), nn.Parameter(torch.randn(70))]
    return params, bind([BF16] * 2, packed=[LinearBlocks(), None])


def opaque(tensors: list[Tensor]) -> list[bool]:
    return [tensor.is_mkldnn for tensor in tensors]


def dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_mkldnn else tensor


def test_a_copy_is_packed_once_it_was_read_often_enough_and_is_all_that_stays() -> None:
    params, binding = setting()
    for reads in range(1, 8):
        forms = binding.copies(params)
        assert opaque(forms) == [reads >= PAYS, False]
        for form, param in zip(forms, params, strict=True):
            assert torch.equal(dense(form), param.detach().to(BF16))
    assert weight_stats()[:2] == (2 * (70 * 80 + 70), 2), "not twice"
    assert weight_stats().casts == binding_casts(binding, params)


def binding_casts(binding: Binding, params: list[nn.Parameter]) -> int:
    """How many casts there were after some more calls."""
    for _ in range(3):
        binding.copies(params)
    return weight_stats().casts


def test_a_weight_that_changed_starts_again() -> None:
    params, binding = setting()
    for _ in range(PAYS):
        old = binding.copies(params)
    with torch.no_grad():
        params[0].zero_()
    for reads in range(1, PAYS + 2):
        forms = binding.copies(params)
        assert opaque(forms) == [reads >= PAYS, False] and not dense(forms[0]).any()
    assert dense(old[0]).abs().sum() > 0, "whoever still computes with the old form has the old numbers"


def test_one_that_is_written_at_each_call_is_never_packed() -> None:
    params, binding = setting()
    for _ in range(3 * PAYS):
        with torch.no_grad():
            params[0].add_(1)
        assert opaque(binding.copies(params)) == [False, False]


def test_graphs_that_read_it_either_way_share_a_copy() -> None:
    params, binding = setting()
    for _ in range(PAYS):
        binding.copies(params)
    strided = bind([BF16])
    for _ in range(3):
        (form,) = strided.copies(params[:1])
        assert torch.equal(form, params[0].detach().to(BF16)) and form.stride() == params[0].stride()
        forms = binding.copies(params)
        assert torch.equal(dense(forms[0]), params[0].detach().to(BF16))
        casts = weight_stats().casts
    assert weight_stats().casts == casts
    assert weight_stats().bytes == 2 * (2 * 70 * 80 + 70), "both forms are read"
    del strided, form
    with torch.no_grad():
        params[0].add_(1)
    for _ in range(PAYS):
        binding.copies(params)
    assert weight_stats().bytes == 2 * (70 * 80 + 70)


def test_packed_forms_are_freed_and_made_again_once_that_pays() -> None:
    params, binding = setting()
    for _ in range(PAYS):
        binding.copies(params)
    free_copies(params[0])
    assert weight_stats()[:2] == (0, 0)
    for reads in range(1, PAYS + 2):
        forms = binding.copies(params)
        assert opaque(forms) == [reads >= PAYS, False]
        assert torch.equal(dense(forms[0]), params[0].detach().to(BF16))


def test_packed_forms_go_with_their_weight() -> None:
    params, binding = setting()
    for _ in range(PAYS):
        binding.copies(params)
    gc.disable()
    try:
        del params
        assert weight_stats()[:2] == (0, 0)
    finally:
        gc.enable()


def test_what_may_have_been_written_is_packed_again_only_if_it_was() -> None:
    params, binding = setting()
    strided = bind([BF16])
    strided.copies(params[:1])
    for _ in range(PAYS):
        packed = binding.copies(params)[0]
    assert params[0].data.norm() > 0, "a read through an alias"
    assert binding.copies(params)[0] is packed
    params[0].data[3, 3] += 1
    assert torch.equal(dense(binding.copies(params)[0]), params[0].detach().to(BF16))


def test_each_way_to_pack_a_weight_has_its_form() -> None:
    weight = nn.Parameter(torch.randn(16, 8, 3, 3))
    ways = [ConvBlocks((stride, stride), (1, 1), (1, 1), 1) for stride in (1, 2)]
    bindings = [bind([BF16], packed=[blocks]) for blocks in ways]
    for _ in range(2):
        for _ in range(PAYS + 1):
            forms = [binding.copies([weight])[0] for binding in bindings]
            assert all(torch.equal(dense(form), weight.detach().to(BF16)) for form in forms)
        assert opaque(forms) == [True, True] and weight_stats()[:2] == (2 * 2 * weight.numel(), 1)
        casts = weight_stats().casts
        assert opaque([binding.copies([weight])[0] for binding in bindings]) == [True, True]
        assert weight_stats().casts == casts
        with torch.no_grad():
            weight.mul_(2)


def test_weights_tied_to_one_another_are_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packs: list[LinearBlocks] = []
    pack = LinearBlocks.pack
    monkeypatch.setattr(LinearBlocks, "pack", lambda self, copy: packs.append(self) or pack(self, copy))
    first = nn.Parameter(torch.randn(64, 64))
    tied = nn.Parameter(first.detach())
    binding = bind([BF16] * 2, packed=[LinearBlocks()] * 2)
    for _ in range(PAYS + 1):
        forms = binding.copies([first, tied])
    assert opaque(forms) == [True, True] and len(packs) == 1
