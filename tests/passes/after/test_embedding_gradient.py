"""An embedding's gradient added in place is the one that autograd adds."""

import pytest
import torch

from ampcompile.passes.after.add_embedding_gradients import ADD_EMBEDDING_GRADIENT as add_embedding_gradient_
from tests.kernels.references import embedding_gradient_reference


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("padding_idx", [-1, 0, 5])
@pytest.mark.parametrize(("shape", "vocabulary", "features"), [((3, 7), 9, 5), ((1,), 6, 1), ((64, 40), 300, 67)])
def test_adds_what_autograd_adds(shape, vocabulary, features, padding_idx, dtype):
    indices = torch.randint(vocabulary, shape, dtype=dtype)
    indices[0] = 5
    grad, x = torch.randn(*shape, features), torch.randn(vocabulary, features)
    exact = embedding_gradient_reference(x.double(), grad.double(), indices, padding_idx)
    size = embedding_gradient_reference(x.abs(), grad.abs(), indices, padding_idx)
    found = x.clone()
    add_embedding_gradient_(found, grad, indices, padding_idx)
    most = 1 + int(indices.flatten().bincount(minlength=vocabulary).max())
    assert ((found - exact).abs() <= most * 2**-24 * size).all()
    untouched = torch.ones(vocabulary, dtype=torch.bool)
    untouched[indices.flatten().long()] = False
    untouched |= torch.arange(vocabulary) == padding_idx
    assert torch.equal(found[untouched], x[untouched])


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_sums_are_rounded_once(dtype, index):
    indices, grad, x = (
        torch.zeros(200, dtype=index),
        torch.full((200, 3), 0.01, dtype=dtype),
        torch.ones(4, 3, dtype=dtype),
    )
    expected = x[0] + 200 * grad[0].float()
    add_embedding_gradient_(x, grad, indices)
    assert torch.equal(x[0], expected.to(dtype)) and torch.equal(x[1:], torch.ones(3, 3, dtype=dtype))


def test_no_features_no_tokens():
    x = torch.randn(5, 0)
    add_embedding_gradient_(x, torch.randn(2, 0), torch.tensor([1, 2]))
    x = torch.ones(5, 2)
    add_embedding_gradient_(x, torch.randn(0, 2), torch.tensor([], dtype=torch.int64))
    assert torch.equal(x, torch.ones(5, 2))


def test_reads_transposed_rows_and_what_padding_holds_does_not_matter():
    indices = torch.tensor([[1, 2], [0, 2]])
    grad, x = torch.randn(3, 2, 2).permute(1, 2, 0), torch.zeros(4, 3)
    grad[0, 0] = torch.nan
    add_embedding_gradient_(x, grad, indices, 1)
    assert torch.equal(x, torch.stack([grad[1, 0], torch.zeros(3), grad[0, 1] + grad[1, 1], torch.zeros(3)]))


def test_sums_are_the_same_whatever_the_threads():
    indices, grad, x = torch.randint(7, (4096,)), torch.randn(4096, 32), torch.randn(7, 32)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(x.clone())
            add_embedding_gradient_(found[-1], grad, indices)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
