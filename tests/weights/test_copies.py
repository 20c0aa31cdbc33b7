"""One copy: what makes it fresh, out of date, comparable, writable; and how many casts a refresh takes."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from ampcompile.kernels.packed_linear import LinearBlocks, available
from ampcompile.weights import copies as copies_module
from ampcompile.weights.copies import TRIAL, Copy, copies_of, copy_of, refresh
from ampcompile.weights.freshness import Memory
from ampcompile.weights.spec import Form
from ampcompile.weights.store import store

BF16, F16 = Form(torch.bfloat16), Form(torch.float16)
WIDE = Form(torch.bfloat16, wide=True)


def made(weight: Tensor, form: Form = BF16) -> Copy:
    """A fresh copy of a weight that is known."""
    copy = copy_of(weight, form)
    copy.memory.admit(weight)
    copy.memory.examine()
    cast(copy, weight)
    return copy


def cast(copy: Copy, weight: Tensor, doubtful: Iterable[Memory] = ()) -> int:
    """Refresh a copy that is read in the weight's strides; how many passes that took."""
    before = store.passes
    with torch.no_grad():
        written = refresh([(copy, weight, True)], set(doubtful), {})
    assert written == ({copy} if store.passes > before else set())
    return store.passes - before


def right(copy: Copy, weight: Tensor) -> bool:
    rounded = weight.detach().to(copy.form.dtype)
    held = rounded.float() if copy.form.wide else rounded
    return copy.tensor is not None and copy.tensor.dtype == held.dtype and torch.equal(copy.tensor, held)


def test_a_weight_has_one_copy_for_each_type_and_layout() -> None:
    weight = torch.randn(4, 4)
    tied = nn.Parameter(weight)
    copy = copy_of(weight, BF16)
    assert copy_of(tied, BF16) is copy and copy_of(weight, F16) is not copy
    assert copies_of(tied) == [copy], "one in float16 was made and let go"
    half = copy_of(weight, F16)
    assert copies_of(weight) == [copy, half]
    wide = copy_of(weight, WIDE)
    assert copies_of(weight) == [copy, wide, half]
    for other in (weight.t(), weight[1:], weight.view(-1), weight.view(torch.int32)):
        assert not copies_of(other)


def test_the_copy_of_a_freed_weight_serves_no_other() -> None:
    copy = made(weight := torch.randn(4))
    assert right(copy, weight)
    del weight
    assert copy.tensor is None and copy.nbytes() == 0 and not copy.fresh(None) and copy.memory.storage() is None


@pytest.mark.parametrize("form", [BF16, WIDE])
def test_a_copy_is_fresh_until_a_write_or_a_doubt(form: Form) -> None:
    weight = torch.randn(4, 6).t()
    copy = made(weight, form)
    assert copy.fresh(None) and right(copy, weight) and copy.tensor is not None
    assert copy.tensor.stride() == weight.stride() and copy.nbytes() == (96 if form.wide else 48)
    for report in (copy.memory.written, copy.memory.doubted):
        report()
        assert not copy.fresh(None)
        cast(copy, weight)
        assert copy.fresh(None)
    weight.numpy()[0, 0] += 1  # nobody reports it, but a sample sees it
    assert not copy.fresh(None) and cast(copy, weight) == 1 and right(copy, weight)


def test_only_what_is_out_of_date_is_cast() -> None:
    copy = made(weight := torch.randn(4))
    assert cast(copy, weight) == 0
    copy.memory.written()
    assert cast(copy, weight) == 1 and copy.fresh(None)


@pytest.mark.parametrize("form", [BF16, WIDE])
def test_a_doubt_costs_a_comparison_and_keeps_the_buffer(form: Form) -> None:
    copy = made(weight := torch.randn(4), form)
    buffer = copy.buffer
    copy.memory.doubted()
    assert cast(copy, weight) == 0 and copy.fresh(None) and copy.buffer == buffer
    weight.data[1] = -weight.data[1]
    copy.words = copy.sample.read()  # as if the sample had missed it
    copy.memory.doubted()
    assert cast(copy, weight) == 1 and right(copy, weight)


@pytest.mark.parametrize("form", [BF16, WIDE])
def test_zeros_of_either_sign_are_told_apart(form: Form) -> None:
    copy = made(weight := torch.zeros(4), form)
    weight.neg_()
    copy.words = copy.sample.read()
    copy.memory.doubted()
    assert cast(copy, weight) == 1
    assert copy.tensor is not None and torch.signbit(copy.tensor).all()


def test_what_is_doubtful_is_right_for_now_only() -> None:
    copy = made(weight := torch.randn(4))
    for _ in range(2):
        assert cast(copy, weight, doubtful=[copy.memory]) == 0 and not copy.fresh(None)
    weight.add_(1)
    copy.memory.written()
    assert cast(copy, weight, doubtful=[copy.memory]) == 1 and right(copy, weight) and not copy.fresh(None)
    assert cast(copy, weight) == 0 and copy.fresh(None)


def test_a_copy_on_trial_is_compared_until_it_stayed_the_same_for_long() -> None:
    weight = torch.randn(4)
    copy = copy_of(weight, BF16)
    copy.memory.admit(weight)
    copy.memory.examine()
    copy.trial = TRIAL
    assert cast(copy, weight) == 1
    for left in reversed(range(TRIAL)):
        assert not copy.fresh(None) and cast(copy, weight) == 0 and copy.trial == left
    assert copy.fresh(None)
    copy.trial = 1
    copy.memory.written()
    assert cast(copy, weight) == 1 and copy.trial == TRIAL, "it starts again"


def test_a_buffer_that_a_backward_waits_for_is_left_to_it() -> None:
    copy = made(weight := torch.randn(4))
    assert copy.writable()
    x = torch.ones(4, dtype=BF16.dtype, requires_grad=True)
    waiting = x * copy.tensor  # saves the copy
    assert not copy.writable()
    expected = weight.to(BF16.dtype)
    weight.add_(1)
    copy.memory.written()
    buffer = copy.buffer
    assert cast(copy, weight) == 1 and right(copy, weight) and copy.buffer != buffer
    waiting.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, expected)
    del waiting
    assert copy.tensor is not None
    view = copy.tensor[1:]
    assert not copy.writable()
    copy.in_place = True  # for a replayed CUDA graph, whatever happens
    assert copy.writable()
    del view


def test_a_pass_that_was_interrupted_leaves_nothing_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = made(weight := torch.randn(4))

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    copy.memory.written()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(copies_module, "cast_many_", fails)
        cast(copy, weight)
    assert store.casting and not copy.fresh(None)
    store.casting = False
    assert not store.casting and not copy.fresh(None)
    assert cast(copy, weight) == 1 and copy.fresh(None) and right(copy, weight) and not store.casting


@pytest.mark.parametrize("form", [BF16, WIDE])
def test_the_packed_form_replaces_the_other_where_nobody_reads_that(form: Form) -> None:
    held = torch.float32 if form.wide else form.dtype
    if not available(held):
        pytest.skip(f"this CPU's oneDNN has no {held} products")
    copy = made(weight := torch.randn(64, 64), form)
    copy.readers[None] = 1
    copy.pack(LinearBlocks())
    assert copy.packed and copy.nbytes() == 2 * held.itemsize * 64 * 64
    copy.readers[None] = 0
    copy.pack(LinearBlocks())
    assert copy.tensor is None and copy.nbytes() == held.itemsize * 64 * 64
    assert copy.fresh(LinearBlocks()) and not copy.fresh(None) and not copy.writable()
    assert cast(copy, weight) == 1 and right(copy, weight) and copy.packed, "the weight is the same"
    copy.memory.written()
    copy.reads = 5
    assert cast(copy, weight) == 1 and not copy.packed and copy.reads == 0


def test_what_a_step_has_rewritten_is_fresh() -> None:
    copy = made(weight := torch.randn(4))
    weight.add_(1)
    copy.memory.written()
    assert copy.tensor is not None
    copy.tensor.copy_(weight)
    copy.reads = 5
    copy.rewritten()
    assert copy.fresh(None) and copy.reads == 0 and cast(copy, weight) == 0
