"""One cast per value and dtype after differentiation, except where it is returned."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import ampcompile
from ampcompile.passes.share_casts import ShareEveryCast
from tests.compiling import LOW, amp
from tests.passes.tidied import tidied_joint


def test_after_differentiation_all_readers_share_and_nothing_that_is_returned_does():
    def f(x):
        return x.to(LOW) * 2, x.to(LOW) + 1, x.to(LOW), x.to(LOW), x.to(torch.float16)

    x = torch.randn(3)
    gm, rewrites = tidied_joint(f, ShareEveryCast(), x)
    results = gm(x)
    assert rewrites == 1 and results[2].data_ptr() != results[3].data_ptr()


def test_casts_behind_views_that_are_alike_are_shared():
    def f(x):
        rows, again, other = x.view(4, 3), x.view(4, 3), x.view(3, 4)
        return rows.to(LOW) * 2, again.to(LOW) + 1, other.to(LOW) + 1, x.view(2, 6), x.view(2, 6)

    x = torch.randn(2, 2, 3)
    gm, rewrites = tidied_joint(f, ShareEveryCast(), x)
    results = gm(x)
    assert rewrites == 1 and results[3] is not results[4]
    assert all(map(torch.equal, results, f(x)))


def test_what_binds_an_offset_found_at_run_time_stays():
    gm = make_fx(lambda x: (x.select(0, 1) * 2, x.select(0, 1) * 3))(torch.randn(3, 4))
    first, second = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.select.int)
    first.meta["unbacked_bindings"] = second.meta["unbacked_bindings"] = {}
    ShareEveryCast().apply(gm)
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.select.int)) == 2


def test_a_weight_used_eight_times_is_cast_once_and_its_gradient_summed_in_float32():
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
