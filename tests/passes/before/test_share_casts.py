"""One cast per value and dtype, where no sum of gradients changes; after differentiation everywhere."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ampcompile.passes.before.share_casts import ShareCasts, share_after_differentiation
from tests.compiling import LOW, amp
from tests.passes.tidied import inserted, ours, tidied


def three_readers(x, w):
    return torch.mm(x, w), torch.mm(x, w.t()), torch.mm(x + 0, w)


def test_fires_where_no_gradient_flows():
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    gm = inserted(three_readers, x, w)
    before = len(ours(gm))
    assert tidied(gm, ShareCasts(gradients=False), x, w, gradients=False) == 2  # x once more, w once more
    assert len(ours(gm)) == before - 2
    assert tidied(gm, ShareCasts(gradients=False), x, w, gradients=False) == 0


def test_fires_in_a_region_without_gradients():
    def f(x, w):
        with torch.no_grad():
            frozen = torch.mm(x, w) + torch.mm(w, x)
        return torch.mm(x, frozen) + torch.mm(w, frozen.float())

    x, w = torch.randn(8, 8), torch.randn(8, 8)
    gm = inserted(f, x, w)
    assert tidied(gm, ShareCasts(gradients=True), x, w) == 2


def written(x, w):
    first = torch.mm(x, w)
    x.add_(1)
    return first, torch.mm(x, w[:])


@pytest.mark.parametrize("f", [three_readers, written])
def test_declines(f):
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    gm = inserted(f, x, w)
    assert tidied(gm, ShareCasts(gradients=True), x, w) == 0


def test_a_value_written_between_two_readers_is_cast_twice():
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    assert tidied(inserted(written, x, w), ShareCasts(gradients=False), x, w, gradients=False) == 0


def test_after_differentiation_all_readers_share_and_nothing_that_is_returned_does():
    def f(x):
        return x.to(LOW) * 2, x.to(LOW) + 1, x.to(LOW), x.to(LOW), x.to(torch.float16)

    x = torch.randn(3)
    gm = make_fx(f, tracing_mode="fake")(x)
    assert share_after_differentiation(gm.graph) == 1
    gm.recompile()
    results = gm(x)
    assert all(torch.equal(a, b) for a, b in zip(results, f(x), strict=True))
    assert results[2].data_ptr() != results[3].data_ptr()


def test_a_weight_used_eight_times_is_cast_once_and_its_gradient_summed_in_float32():
    import ampcompile

    model = torch.nn.Linear(16, 16, bias=False)

    def eight(x):
        return sum(model(x * (1 + i / 7)).float() for i in range(8)).square().sum()

    x = torch.randn(4, 16)
    totals = ampcompile.explain(eight, weights="every_call")(x).graphs[0].totals
    casts = {total.stage.partition(",")[0]: total.casts for total in totals}
    assert casts["bind_weights"] - casts["share_casts"] >= 7
    run, _ = amp(eight)
    run(x).backward()
    ours_, model.weight.grad = model.weight.grad, None
    exact = torch.nn.Linear(16, 16, bias=False).double()
    exact.load_state_dict(model.state_dict())
    sum(exact(x.double() * (1 + i / 7)) for i in range(8)).square().sum().backward()
    with torch.autocast("cpu", LOW):
        eight(x).backward()  # one cast, cached: gradients are summed in bfloat16
    distance = [(g.double() - exact.weight.grad).norm() / exact.weight.grad.norm() for g in (ours_, model.weight.grad)]
    assert not torch.equal(ours_.to(LOW).float(), ours_), "a sum in bfloat16 has bfloat16's digits"
    assert distance[0] < distance[1] * 1.05
