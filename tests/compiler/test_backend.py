"""The backend from outside: found by name, one graph per grad mode, gradients whatever ran before."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from ampcompile.errors import OptionError
from tests.compiling import HIGH, LOW, compiled, eager, error, gradients, same_bits
from tests.models import Net


def model_of_images():
    parts = {"conv": nn.Conv2d(3, 8, 3), "norm": nn.BatchNorm2d(8), "head": nn.Linear(8, 4)}
    return Net(lambda m, x: m.head(m.norm(m.conv(x)).relu().mean((2, 3))), **parts)


def images(count=4):
    return torch.randn(count, 3, 6, 6)


def grads(model, run, x):
    return gradients(model, lambda _: run(x).float().square().sum())


FIRST = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "eval": nullcontext,
    "eval without grad": torch.no_grad,
}


@pytest.mark.parametrize(("first", "lower"), [*((first, "aot_eager") for first in FIRST), ("no_grad", "eager")])
def test_every_gradient_is_there_whatever_ran_before(first, lower):
    model, x = model_of_images(), images()
    expected_model = copy.deepcopy(model)
    run, _ = compiled(model, lower=lower)
    for module in (model, expected_model):
        module.train("eval" not in first)
    with FIRST[first]():
        assert run(x).dtype == LOW
        eager(expected_model, x)
    model.train()
    expected_model.train()
    found, expected = grads(model, run, x), grads(expected_model, lambda x: eager(expected_model, x), x)
    assert all(g is not None and g.dtype == HIGH for g in found)
    assert error(found, [g.double() for g in expected]) < 0.03
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), expected_model.buffers(), strict=True))


def test_batch_sizes_need_two_graphs_at_most():
    model = model_of_images()
    run, recorder = compiled(model)
    for count in (2, 3, 5, 8, 5, 2, 11):
        x = images(count)
        assert torch.allclose(run(x).float(), eager(model, x).float(), atol=0.02)
    assert len(recorder.graphs) == 2
    torch._dynamo.reset()
    counters.clear()
    run, _ = compiled(model, dynamic=True)
    for count in (2, 3, 5):
        run(images(count))
    assert counters["stats"]["unique_graphs"] == 1  # Dynamo asks twice for it: eps is a symbol at first


def test_one_graph_per_grad_mode_and_none_for_flipping_back_or_for_new_weights():
    model, x = model_of_images(), images()
    run, recorder = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    for _ in range(2):
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                run(x)
        for around in (nullcontext(), torch.autocast("cpu", LOW)):
            with around:
                loss = run(x).float().square().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        with torch.no_grad():
            model.head.weight.data.add_(1)
            model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    assert len(recorder.graphs) <= 3


def test_modes_and_inductors_own_options_go_on_to_inductor(monkeypatch):
    import torch._inductor.compile_fx as inductor

    seen = []

    def compile_fx(gm, inputs, config_patches=None, **kwargs):
        seen.append(config_patches)
        return gm

    monkeypatch.setattr(inductor, "compile_fx", compile_fx)

    def f(x):
        return x @ x

    x = images()
    torch.compile(f, backend="amp", mode="max-autotune-no-cudagraphs")(x)
    torch._dynamo.reset()
    torch.compile(f, backend="amp", options={"epilogue_fusion": False, "numerics": "relaxed"})(x)
    torch._dynamo.reset()
    torch.compile(f, backend="amp", options={"emulate_precision_casts": False})(x)
    assert seen[0]["max_autotune"] and seen[0]["coordinate_descent_tuning"] and seen[0]["emulate_precision_casts"]
    assert seen[1]["epilogue_fusion"] is False and not seen[1]["emulate_precision_casts"]
    assert "lower" not in seen[1] and "numerics" not in seen[1]
    assert not seen[2]["emulate_precision_casts"], "the user's word is the last"


def sizes(backend_options, shapes=((4, 4), (5, 5), (6, 6)), **arguments):
    """The number of graphs for squares of some sizes."""
    counters.clear()
    run = torch.compile(lambda x: x @ x, backend="amp", options={"lower": "aot_eager", **backend_options}, **arguments)
    for shape in shapes:
        run(torch.ones(shape))
    return counters["stats"]["unique_graphs"]


def test_what_torch_takes_beside_options_may_be_among_them():
    assert (sizes({"dynamic": True}), sizes({"dynamic": False})) == (1, 3)
    assert (sizes({}, dynamic=True), sizes({}, dynamic=False)) == (1, 3)

    def breaks(x):
        torch._dynamo.graph_break()
        return x @ x

    module, x = nn.Linear(2, 2), torch.ones(2, 2)
    module.forward = breaks
    for options in ({"fullgraph": True}, {"fullgraph": True, "dynamic": True, "mode": "max-autotune"}):
        for f in (breaks, module):
            with pytest.raises(torch._dynamo.exc.Unsupported):
                torch.compile(f, backend="amp", options={"lower": "aot_eager", **options})(x)
    assert torch.compile(breaks, backend="amp", options={"lower": "aot_eager", "fullgraph": False})(x).shape


def test_a_setting_that_is_given_twice_must_agree():
    assert sizes({"dynamic": True, "fullgraph": True}, dynamic=True, fullgraph=True) == 1
    for arguments, options in (({"dynamic": True}, {"dynamic": False}), ({"fullgraph": True}, {"fullgraph": False})):
        with pytest.raises(OptionError, match=r"beside options=.*expected one of the two"):
            torch.compile(nn.Linear(2, 2), backend="amp", options=options, **arguments)


def test_weights_that_are_returned_are_the_users_own():
    linear = nn.Linear(2, 2)

    def f(x):
        return linear(x), linear.weight, linear.weight.to(LOW), linear.weight.float()

    run, _ = compiled(f)
    results = run(torch.ones(1, 2))
    assert results[1] is linear.weight and results[3] is linear.weight
    results[2].data.zero_()
    assert linear.weight.abs().sum() > 0 and same_bits(run(torch.ones(1, 2))[0], results[0])
