"""Gradients of what was computed from an input before the graph wrote to it."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.compiling import LOW, amp, same_bits

COPIES = {
    "clone": lambda x: x.clone(),
    "there and back": lambda x: x.double().float(),
    "with a view between": lambda x: x.double().t().float(),
    "of a view": lambda x: x.t().double().float(),
    "narrowed": lambda x: x.bfloat16(),
    "computed": lambda x: x.cos(),
}
READERS = {"product": lambda h, w: h * w, "linear": F.linear, "cast": lambda h, w: h.float() * w}


def gradient_and_input(f, weight, *args):
    """A gradient, and what the written input holds afterwards."""
    weight.grad = None
    written = args[0].clone()
    f(written, *args[1:]).float().sin().sum().backward()
    return weight.grad, written


@pytest.mark.parametrize("lower", ["aot_eager", "eager", pytest.param("inductor", marks=pytest.mark.ci)])
def test_backward_uses_the_values_of_before(lower):
    """Each copy of an input of its own, read in each way."""
    names = list(product(COPIES, READERS))
    inputs, weights = torch.randn(len(names), 8, 8).unbind(), torch.randn(len(names), 8, 8).unbind()

    def program(inputs, weights):
        found = {}
        for (copied, reader), x, weight in zip(names, inputs, weights, strict=True):
            h = COPIES[copied](x)
            x.add_(1)
            found[copied, reader] = READERS[reader](h, weight)
        return found

    def gradients(f):
        written, leaves = [x.clone() for x in inputs], [w.clone().requires_grad_() for w in weights]
        sum(each.float().sin().sum() for each in f(written, leaves).values()).backward()
        return [leaf.grad for leaf in leaves], written

    with torch.autocast("cpu", LOW):
        expected, after = gradients(program)
    found, written = gradients(amp(program, lower=lower)[0])
    assert all(map(torch.equal, written, after))
    far = [
        n
        for n, ours, theirs in zip(names, found, expected, strict=True)
        if (ours - theirs).norm() >= 0.01 * theirs.norm()
    ]
    assert not far


def test_a_copy_in_a_checkpoint_is_saved_all_the_same():
    """Eager's checkpoint would compute it again from the new values, and raises."""
    weight, x = nn.Parameter(torch.randn(8, 8)), torch.randn(8, 8)

    def program(x, checkpointed=True):
        part = lambda x: (x.clone() * weight).sin()
        h = checkpoint(part, x, use_reentrant=False) if checkpointed else part(x)
        x.add_(1)
        return h * weight

    expected = gradient_and_input(lambda x: program(x, checkpointed=False), weight, x)
    found = gradient_and_input(amp(program, lower="aot_eager")[0], weight, x)
    assert torch.allclose(found[0], expected[0], atol=1e-5) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("lower", ["aot_eager", pytest.param("inductor", marks=pytest.mark.ci)])
def test_inputs_that_swap_their_values(lower):
    """Stock Inductor 2.13 writes the first one's new value into the second, and its gradient is of that."""
    weight = nn.Parameter(torch.randn(8, 8))

    def program(x, y):
        old = x.clone()
        x.copy_(y)
        y.copy_(old)
        return old * weight

    x, y = torch.randn(2, 8, 8)
    others = [y.clone(), y.clone()]
    expected = gradient_and_input(program, weight, x, others[0])
    found = gradient_and_input(amp(program, lower=lower)[0], weight, x, others[1])
    assert torch.allclose(found[0], expected[0], atol=1e-5) and torch.equal(found[1], expected[1])
    assert torch.equal(*others) and torch.equal(others[0], x)


def swap(seen_as):
    def program(x, y):
        old = x.clone()
        x.copy_(y)
        y.copy_(seen_as(old))

    return program


def roll_a_cache(x, y):
    x[:, :-1] = x[:, 1:].clone()
    x[:, -1] = y[0]
    y[1:] = y[:-1].clone()


WRITES = {  # what stock Inductor 2.13 gets wrong: it makes swapped inputs equal, and copies in place what it overwrote
    "swapped": swap(Tensor.clone),
    "swapped and turned": swap(Tensor.t),
    "rows": lambda x, y: x[1:].copy_(x[:-1].clone()),
    "rows of a transposed one": lambda x, y: x.t().index_copy_(0, torch.arange(1, 64), x.t()[:-1].clone()),
    "rows by index": lambda x, y: x.index_copy_(0, torch.arange(1, 64), x[:-1].clone()),
    "a cache": roll_a_cache,
}


@pytest.mark.parametrize("lower", ["aot_eager", pytest.param("inductor", marks=pytest.mark.ci)])
def test_what_no_gradient_reads_is_written_as_it_was(lower):
    """In a graph that trains something else, and in one without gradients."""
    weight, inputs = nn.Parameter(torch.randn(8)), torch.randn(len(WRITES), 2, 64, 64)

    def program(inputs, z):
        for write, (x, y) in zip(WRITES.values(), inputs, strict=True):
            write(x, y)
        return (z * weight).sum()

    def copies():
        return [(x.clone(), y.clone()) for x, y in inputs]

    expected = copies()
    program(expected, torch.ones(8))
    run, _ = amp(program, lower=lower)
    for grad in (False, True):
        found = copies()
        with torch.set_grad_enabled(grad):
            result = run(found, torch.ones(8))
        assert torch.allclose(result, weight.sum()) and result.requires_grad == grad
        assert [
            name for name, ours, theirs in zip(WRITES, found, expected, strict=True) if not same_bits(ours, theirs)
        ] == []


def test_batch_norms_statistics_are_written_and_its_gradient_stays():
    norm, x = nn.BatchNorm1d(8), torch.randn(16, 8)
    fresh = nn.BatchNorm1d(8)
    for module, f in ((norm, norm), (fresh, amp(fresh)[0])):
        with torch.autocast("cpu", LOW):
            f(x).sin().sum().backward()
        assert module.num_batches_tracked == 1
    assert torch.equal(norm.weight.grad, fresh.weight.grad) and torch.equal(norm.running_mean, fresh.running_mean)
