"""Gradients of what was computed from an input before the graph wrote to it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.compiling import LOW, amp
from tests.pairs import pairs

COPIES = {
    "clone": lambda x: x.clone(),
    "there and back": lambda x: x.double().float(),
    "with a view between": lambda x: x.double().t().float(),
    "of a view": lambda x: x.t().double().float(),
    "narrowed": lambda x: x.bfloat16(),
    "computed": lambda x: x.cos(),
}
READERS = {"product": lambda h, w: h * w, "linear": F.linear, "cast": lambda h, w: h.float() * w}


def run(f, weight, *args):
    """A gradient, and what the written input holds afterwards."""
    weight.grad = None
    written = args[0].clone()
    f(written, *args[1:]).float().sin().sum().backward()
    return weight.grad, written


CASES = dict.fromkeys(
    [("aot_eager", "product", "there and back"), *pairs(["aot_eager", "eager"], [*READERS], [*COPIES])]
)
BY_INDUCTOR = [
    pytest.param("inductor", *case, marks=() if case == ("product", "clone") else pytest.mark.slow)
    for case in pairs([*READERS], [*COPIES])
]


@pytest.mark.parametrize(("lower", "reader", "copied"), [*CASES, *BY_INDUCTOR])
def test_backward_uses_the_values_of_before(copied, reader, lower):
    weight, x = nn.Parameter(torch.randn(8, 8)), torch.randn(8, 8)

    def program(x):
        h = COPIES[copied](x)
        x.add_(1)
        return READERS[reader](h, weight)

    with torch.autocast("cpu", LOW):
        expected = run(program, weight, x)
    found = run(amp(program, lower=lower)[0], weight, x)
    assert torch.equal(found[1], expected[1])
    assert (found[0] - expected[0]).norm() < 0.01 * expected[0].norm()


def test_a_copy_in_a_checkpoint_is_saved_all_the_same():
    """Eager's checkpoint would compute it again from the new values, and raises."""
    weight, x = nn.Parameter(torch.randn(8, 8)), torch.randn(8, 8)

    def program(x, checkpointed=True):
        part = lambda x: (x.clone() * weight).sin()  # noqa: E731
        h = checkpoint(part, x, use_reentrant=False) if checkpointed else part(x)
        x.add_(1)
        return h * weight

    expected = run(lambda x: program(x, checkpointed=False), weight, x)
    found = run(amp(program, lower="aot_eager")[0], weight, x)
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
    expected = run(program, weight, x, others[0])
    found = run(amp(program, lower=lower)[0], weight, x, others[1])
    assert torch.allclose(found[0], expected[0], atol=1e-5) and torch.equal(found[1], expected[1])
    assert torch.equal(*others) and torch.equal(others[0], x)


@pytest.mark.parametrize("seen_as", [Tensor.clone, Tensor.t])
@pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
def test_inputs_that_swap_their_values_where_no_gradient_reads_them(lower, seen_as):
    """Also as a view, and in a graph that trains something else. Stock Inductor 2.13 makes them equal."""
    weight, x, y = nn.Parameter(torch.randn(8)), *torch.randn(2, 8, 8)

    def program(x, y, z):
        old = x.clone()
        x.copy_(y)
        y.copy_(seen_as(old))
        return (z * weight).sum()

    run, _ = amp(program, lower=lower)
    for grad in (False, True):
        written = [x.clone(), y.clone()]
        with torch.set_grad_enabled(grad):
            result = run(*written, torch.ones(8))
        assert torch.equal(written[0], y) and torch.equal(written[1], seen_as(x))
        assert torch.allclose(result, weight.sum()) and result.requires_grad == grad


def roll_a_cache(x, y):
    x[:, :-1] = x[:, 1:].clone()
    x[:, -1] = y[0]
    y[1:] = y[:-1].clone()


MOVES = {
    "rows": lambda x, y: x[1:].copy_(x[:-1].clone()),
    "of a transposed one": lambda x, y: x.t().index_copy_(0, torch.arange(1, 64), x.t()[:-1].clone()),
    "by index": lambda x, y: x.index_copy_(0, torch.arange(1, 64), x[:-1].clone()),
    "a cache": roll_a_cache,
}


@pytest.mark.parametrize("moved", MOVES)
def test_rows_that_move_over_their_neighbours(moved):
    """Stock Inductor 2.13 drops the clone, and copies in place rows that it has overwritten."""
    weight, x, y = nn.Parameter(torch.randn(8)), *torch.randn(2, 64, 64)

    def program(x, y, z):
        MOVES[moved](x, y)
        return (z * weight).sum()

    run, _ = amp(program, lower="inductor")
    expected = x.clone(), y.clone()
    MOVES[moved](*expected)
    for grad in (False, True):
        found = x.clone(), y.clone()
        with torch.set_grad_enabled(grad):
            run(*found, torch.ones(8))
        assert all(map(torch.equal, found, expected))


def test_batch_norms_statistics_are_written_and_its_gradient_stays():
    norm, x = nn.BatchNorm1d(8), torch.randn(16, 8)
    fresh = nn.BatchNorm1d(8)
    for module, f in ((norm, norm), (fresh, amp(fresh)[0])):
        with torch.autocast("cpu", LOW):
            f(x).sin().sum().backward()
        assert module.num_batches_tracked == 1
    assert torch.equal(norm.weight.grad, fresh.weight.grad) and torch.equal(norm.running_mean, fresh.running_mean)
