"""Packed forms are made when they pay, shared, renewed with the copy, and keep no copy from being overwritten."""

import sys

import pytest
import torch

from ampcompile.compat_weights import storage_key, storage_users
from ampcompile.kernels.packed_linear import available
from ampcompile.packing import PAYS, packed_bytes, packed_form, reader

pytestmark = pytest.mark.skipif(not available(torch.bfloat16), reason="this CPU's oneDNN has no bfloat16 products")


def copies():
    return [torch.randn(70, 80, dtype=torch.bfloat16), torch.randn(70, dtype=torch.bfloat16)]


def opaque(tensors):
    return [tensor.is_mkldnn for tensor in tensors]


def test_a_copy_is_packed_once_it_was_read_often_enough():
    held, read = copies(), reader([0, 1], ["packed", "strided"])
    for reads in range(1, 8):
        forms = read(held)
        assert opaque(forms) == [reads >= PAYS, False]
        assert [form.shape for form in forms] == [(70, 80), (70,)]
    assert read(held)[0] is read(held)[0]


def test_a_changed_copy_starts_again():
    held, read = copies(), reader([0], ["packed"])
    for _ in range(PAYS):
        old = read(held)
    held[0].zero_()
    assert opaque(read(list(held))) == [False]
    assert old[0].to_dense().abs().sum() > 0


def test_another_list_of_the_same_copies_goes_on_counting():
    held, read = copies(), reader([0], ["packed"])
    for _ in range(PAYS - 1):
        read(list(held))
    assert opaque(read(list(held))) == [True]


def test_readers_share_forms_and_forms_go_with_their_copy():
    held, before = copies(), packed_bytes()
    form = packed_form(held[0], PAYS)
    assert reader([0], ["packed"])(held)[0] is form
    assert packed_bytes() == before + 70 * 80 * 2
    del held, form
    assert packed_bytes() == before


def test_no_reference_to_a_copy_stays():
    held, read = copies(), reader([0, 1], ["packed", "strided"])

    def references():
        return [(sys.getrefcount(copy), storage_users(storage_key(copy))) for copy in held]

    before = references()
    for _ in range(10):
        read(held)
        assert references() == before
