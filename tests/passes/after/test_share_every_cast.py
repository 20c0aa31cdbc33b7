"""One cast per value and dtype after differentiation, except where it is returned."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import ampcompile
from ampcompile.passes.share_casts import ShareEveryCast
from tests.compiling import HALF, LOW, amp
from tests.passes.tidied import tidied_joint, words

CASES = {  # what is done to a value, and the ops that are left
    "all readers share": (lambda x: (x.to(LOW) * 2, x.to(LOW) + 1, x.to(HALF) * 2), "< mul add < mul"),
    "what is returned stays apart": (lambda x: (x.to(LOW), x.to(LOW), x.to(LOW) * 2), "< < < mul"),
    "so do its views": (lambda x: (x.to(LOW)[1:], x.to(LOW)[:2]), "< slice < slice"),
    "behind views that are alike": (
        lambda x: (x.view(4, 3).to(LOW) * 2, x.view(4, 3).to(LOW) + 1, x.view(3, 4).to(LOW) + 1),
        "view < mul add view < add",
    ),
    "views that are returned": (lambda x: (x.view(2, 6), x.view(2, 6)), "view view"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_shared_with_the_same_bits(name):
    f, left = CASES[name]
    x = torch.randn(2, 2, 3)
    gm, shared = tidied_joint(f, ShareEveryCast(), x)
    results = gm(x)
    assert words(gm) == left and shared == words(make_fx(f)(x)).count("<") - left.count("<")
    assert len({id(result) for result in results}) == len(results)


def test_what_binds_an_offset_found_at_run_time_stays():
    gm = make_fx(lambda x: (x.select(0, 1) * 2, x.select(0, 1) * 3))(torch.randn(3, 4))
    for select in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.select.int):
        select.meta["unbacked_bindings"] = {}
    ShareEveryCast().apply(gm)
    assert words(gm) == "select mul select mul"


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
