"""Packed forms are made when they pay, renewed with the copy, and stand in for it where nobody else reads it."""

import gc

import pytest
import torch
from torch import Tensor, nn

from ampcompile.kernels.packed_conv import ConvBlocks
from ampcompile.kernels.packed_linear import LinearBlocks, available
from ampcompile.weights import free_copies, weight_stats
from ampcompile.weights.binding import PAYS
from tests.weights.bindings import bind

pytestmark = pytest.mark.skipif(not available(torch.bfloat16), reason="this CPU's oneDNN has no bfloat16 products")
BF16 = torch.bfloat16


def opaque(tensors: list[Tensor]) -> list[bool]:
    return [tensor.is_mkldnn for tensor in tensors]


def dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_mkldnn else tensor


class Case:
    """Weights, and a graph that reads the first packed."""

    def __init__(self) -> None:
        self.params = [nn.Parameter(torch.randn(70, 80)), nn.Parameter(torch.randn(70))]
        self.binding = bind([BF16] * 2, packed=[LinearBlocks(), None])

    def read(self) -> list[Tensor]:
        """The forms that a call reads, which hold the weights' numbers."""
        forms = self.binding.copies(self.params)
        for form, param in zip(forms, self.params, strict=True):
            assert torch.equal(dense(form), param.detach().to(BF16))
        return forms

    def pack(self) -> None:
        """Read until it is packed, which is no sooner than it pays; and go on."""
        for reads in range(1, PAYS + 3):
            assert opaque(self.read()) == [reads >= PAYS, False]


def test_a_copy_is_packed_once_it_was_read_often_enough_and_is_all_that_stays() -> None:
    case = Case()
    case.pack()
    casts = weight_stats().casts
    case.read()
    assert weight_stats() == (2 * (70 * 80 + 70), 2, casts), "not twice"


def test_a_weight_that_changed_or_whose_copies_are_freed_starts_again() -> None:
    case = Case()
    case.pack()
    old = case.read()[0]
    with torch.no_grad():
        case.params[0].zero_()
    case.pack()
    assert dense(old).abs().sum() > 0, "whoever still computes with the old form has the old numbers"
    free_copies(case.params[0])
    assert weight_stats()[:2] == (0, 0)
    case.pack()


def test_one_that_is_written_at_each_call_is_never_packed() -> None:
    case = Case()
    for _ in range(3 * PAYS):
        with torch.no_grad():
            case.params[0].add_(1)
        assert opaque(case.read()) == [False, False]


def test_graphs_that_read_it_either_way_share_a_copy() -> None:
    case, strided = Case(), bind([BF16])
    case.pack()
    for _ in range(3):
        (form,) = strided.copies(case.params[:1])
        assert torch.equal(form, case.params[0].detach().to(BF16)) and form.stride() == case.params[0].stride()
        case.read()
        casts = weight_stats().casts
    assert weight_stats().casts == casts
    assert weight_stats().bytes == 2 * (2 * 70 * 80 + 70), "both forms are read"
    del strided, form
    with torch.no_grad():
        case.params[0].add_(1)
    case.pack()
    assert weight_stats().bytes == 2 * (70 * 80 + 70)


def test_packed_forms_go_with_their_weight() -> None:
    case = Case()
    case.pack()
    gc.disable()
    try:
        case.params.clear()
        assert weight_stats()[:2] == (0, 0)
    finally:
        gc.enable()


def test_what_may_have_been_written_is_packed_again_only_if_it_was() -> None:
    case, strided = Case(), bind([BF16])
    strided.copies(case.params[:1])
    case.pack()
    packed = case.read()[0]
    assert case.params[0].data.norm() > 0, "a read through an alias"
    assert case.read()[0] is packed
    case.params[0].data[3, 3] += 1
    case.pack()
    case.params[0].data[3, 3] += 1
    strided.copies(case.params[:1])  # casts the copy that the packed one was made of
    case.read()


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


def test_weights_tied_to_one_another_are_packed_once() -> None:
    first = nn.Parameter(torch.randn(64, 64))
    tied = nn.Parameter(first.detach())
    binding = bind([BF16] * 2, packed=[LinearBlocks()] * 2)
    for _ in range(PAYS + 1):
        forms = binding.copies([first, tied])
    assert opaque(forms) == [True, True] and forms[0] is forms[1]
