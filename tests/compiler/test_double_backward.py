"""Gradients of gradients with default options: as exact as eager autocast's, or refused; free for who never asks."""

import copy
import gc
import weakref
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from ampcompile.errors import UnsupportedError
from ampcompile.scaler.grad_scaler import GradScaler
from tests.compiling import HALF, LOW, amp, compiled, draws, eager, error, same_bits
from tests.models import Net
from tests.weights.bindings import copies_of

LOWERS = ["aot_eager", "eager"]
LOWERS_AND_INDUCTOR = [*LOWERS, pytest.param("inductor", marks=pytest.mark.ci)]


def smooth(*extra):
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.LayerNorm(16), *extra, nn.Linear(16, 1), nn.Flatten(0))


class Grows(torch.autograd.Function):
    """Its backward reads inputs and the result."""

    @staticmethod
    def forward(ctx, x, scale):
        result = (scale * x**3).exp()
        ctx.save_for_backward(x, scale, result)
        return result

    @staticmethod
    def backward(ctx, grad):
        x, scale, result = ctx.saved_tensors
        grad = grad * result
        return 3 * scale * x**2 * grad, (x**3 * grad).sum()


class Hides(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad


def penalty(run, model, x):
    """Outputs, gradient of the inputs, and what a loss on both gives: the gradient penalty of GANs."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    outputs = run(x)
    (slope,) = torch.autograd.grad(outputs.float().sum(), x, create_graph=True)
    (outputs.float().square().mean() + (slope.float().norm(dim=1) - 1).square().mean()).backward()
    return [outputs, slope, x.grad, *(p.grad for p in model.parameters())]


def forces(run, model, x):
    """The same for energies and forces: the loss sees second derivatives of the weights, in one kept graph."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    energy = run(x)
    (force,) = torch.autograd.grad(energy.float().sum(), x, retain_graph=True, create_graph=True)
    loss = force.float().square().mean() + 0.1 * energy.float().square().mean()
    return [energy, force, *torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)]


def flat_minimum(run, model, x):
    """The loss plus the squared norm of its own gradient with respect to the weights."""
    model.zero_grad()
    loss = run(x).float().square().mean()
    gradients = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    (loss + sum(g.square().sum() for g in gradients)).backward()
    return [loss, *gradients, *(p.grad for p in model.parameters())]


def compare(model, losses, shape, lower="aot_eager", count=16):
    """Of each loss amp's errors against float64, summed over weights and inputs, are about eager autocast's."""
    exact_model, eager_model, ours = copy.deepcopy(model).double(), copy.deepcopy(model), copy.deepcopy(model)
    run, _ = compiled(ours, lower=lower)
    for loss in losses:
        totals = [0.0, 0.0]
        for _ in draws(eager_model, exact_model, ours, count=count):
            x = torch.randn(shape)
            exact = loss(exact_model, exact_model, x.double())
            reference = loss(lambda v: eager(eager_model, v), eager_model, x)
            found = loss(run, ours, x)
            assert [r is None for r in found] == [r is None for r in reference]
            assert all(r is None or r.isfinite().all() for r in found)
            totals = [total + error(values, exact) for total, values in zip(totals, (found, reference), strict=True)]
        assert 0 < totals[0] <= 1.2 * totals[1], loss


@pytest.mark.parametrize(
    ("lower", "losses"), [("aot_eager", [penalty, forces, flat_minimum]), ("eager", [forces, penalty])]
)
def test_it_is_as_exact_as_eager_autocast(lower, losses):
    compare(smooth(), losses, (64, 4), lower)


@pytest.mark.ci
def test_the_default_lowering():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    compare(model, [penalty], (64, 64), "inductor")


@pytest.mark.parametrize("lower", LOWERS)
def test_half_precision_under_an_autocast_region_that_is_not_the_graphs(lower):
    model, x = smooth(), torch.randn(16, 4)
    run, _ = compiled(model, dtype=HALF, lower=lower)
    alone = penalty(run, model, x)
    with torch.autocast("cpu", HALF):
        outputs = run(x.requires_grad_())
    with torch.autocast("cpu", LOW):  # acts on neither the graph's gradients nor theirs
        (slope,) = torch.autograd.grad(outputs.float().sum(), x, create_graph=True)
        second = torch.autograd.grad(slope.square().sum(), [*model.parameters()], allow_unused=True)
    assert same_bits([outputs, slope], alone[:2])
    assert all(g is None or g.dtype == torch.float32 for g in second)


def many(a, b, c, n):
    """Several outputs, views, inputs that are given twice or are functions of one another, and what are no tensors."""
    product = (b * c).exp()
    return a * b, a.t()[1:], (a.exp() + b).view(-1), 3, a, c * n, product[:1], product[1:], None


def orders(run):
    """Three orders of derivatives."""
    torch.manual_seed(0)
    b = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    a = b.square()
    product, view, total, three, same, scaled, *parts, _ = run(a, b, b, 2)
    assert three == 3
    loss = product.square().sum() + view.prod() + (total * total[0]).sum() + (product * a).sum() + same.cos().sum()
    loss += (scaled * torch.cat(parts)).sum()
    found = []
    for _ in range(3):
        (gradient,) = torch.autograd.grad(loss, b, create_graph=True)
        found.append(gradient)
        loss = gradient.square().sum()
    return found


@pytest.mark.parametrize("lower", LOWERS)
def test_derivatives_of_each_order_are_eager_modes(lower):
    for ours, expected in zip(orders(amp(many, lower=lower)[0]), orders(many), strict=True):
        torch.testing.assert_close(ours, expected)


def test_graphs_after_one_another_and_a_shape_that_changes():
    def broken(m, x):
        h = m.first(x).tanh()
        torch._dynamo.graph_break()
        return m.second(h).squeeze(-1)

    model = Net(broken, first=nn.Linear(4, 8), second=nn.Linear(8, 1))
    ours = copy.deepcopy(model)
    run, recorder = compiled(ours, dynamic=True)
    for rows in (5, 8, 13):
        x = torch.randn(rows, 4)
        found = penalty(run, ours, x)
        expected = penalty(lambda v: eager(model, v), model, x)
        assert error(found, expected) < 0.02
    assert len(recorder.graphs) == 2


def test_running_statistics_are_updated_once():
    model, x = smooth(nn.BatchNorm1d(16)), torch.randn(32, 4)
    compare(model, [penalty], x.shape)
    twin = copy.deepcopy(model)
    penalty(compiled(model)[0], model, x)
    eager(twin, x)
    assert model[3].num_batches_tracked == 1
    torch.testing.assert_close(model[3].running_mean, twin[3].running_mean)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
@pytest.mark.parametrize("lower", ["aot_eager", pytest.param("eager", marks=pytest.mark.ci)])
def test_checkpointed_blocks_and_custom_functions(lower):
    def forward(m, x):
        h = checkpoint(lambda v: m.first(v).tanh(), x, use_reentrant=False)
        return m.last(Grows.apply(h, m.scale)).squeeze(-1)

    model = Net(forward, first=nn.Linear(4, 16), last=nn.Linear(16, 1), scale=nn.Parameter(torch.tensor(0.5)))
    compare(model, [penalty, flat_minimum], (32, 4), lower, count=48)  # the exponential's errors scatter


@pytest.mark.parametrize("lower", ["aot_eager", pytest.param("inductor", marks=pytest.mark.ci)])
def test_dropout_is_refused_when_it_is_differentiated_twice_and_not_before(lower):
    model = smooth(nn.Dropout(0.5))
    run, _ = compiled(model, lower=lower)
    x = torch.randn(8, 4, requires_grad=True)
    run(x).sum().backward()  # compiles a backward that may overwrite what was saved
    outputs = run(x)
    state = torch.get_rng_state()
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(torch.autograd.grad(outputs.sum(), x)[0], slope)  # of the same mask
    with pytest.raises(UnsupportedError, match=r'draws random numbers.*options=\{"lower": "eager"\}'):
        slope.square().sum().backward()
    model.eval()
    (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    slope.square().sum().backward()


def writes(x, _):
    x.mul_(2)
    return x.sin() + x


def counts(x, state):
    state.add_(1)
    return x.sin() * state[:3]


CUSTOM = r"custom autograd function.*torch\.compiler\.disable"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
@pytest.mark.parametrize(
    ("f", "slope", "said", "lower"),
    [
        (writes, lambda x: 2 * (2 * x).cos() + 2, "writes to an input in place", "aot_eager"),
        (counts, lambda x: 2 * x.cos(), "reads inputs that it also writes to, of more than a megabyte", "aot_eager"),
        *((lambda x, _: Hides.apply(x) * x, lambda x: x.cos() * x + x.sin(), CUSTOM, how) for how in LOWERS),
    ],
)
def test_what_can_not_run_again_is_refused(f, slope, said, lower):
    leaf = torch.randn(3, requires_grad=True)
    result = amp(f, lower=lower)[0](leaf + 0, torch.ones(1 << 19))
    (found,) = torch.autograd.grad(result.sum(), leaf, create_graph=True)
    torch.testing.assert_close(found, slope(leaf))
    with pytest.raises(UnsupportedError, match=said):
        found.sum().backward()


@pytest.mark.parametrize("lower", LOWERS_AND_INDUCTOR)
def test_what_a_graph_overwrites_is_kept_as_it_was(lower):
    """As spectral norm's vectors: a penalty of the gradient of a discriminator."""
    model = nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Tanh(), spectral_norm(nn.Linear(8, 1)))
    twin = copy.deepcopy(model)
    run = compiled(model, lower=lower)[0]
    leaf, state, seen = torch.randn(3, requires_grad=True), torch.ones(3), []
    counted = compiled(counts, lower=lower)[0]
    for call in range(3):
        x = torch.randn(4, 8)
        for f, module in ((run, model), (lambda x: eager(twin, x), twin)):
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(f(x).float().sum(), x, create_graph=True)
            penalty = slope.float().square().sum()
            seen.append(
                [*torch.autograd.grad(penalty, [p for p in module.parameters() if p.dim() > 1]), *module.buffers()]
            )
        for found, expected in zip(*seen[-2:], strict=True):
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-4)
        if lower == "eager":
            continue  # autograd itself refuses what was overwritten
        result = counted(leaf, state)
        counted(leaf, state)
        (slope,) = torch.autograd.grad(result.sum(), leaf, create_graph=True)
        (again,) = torch.autograd.grad(slope.sum(), leaf)
        torch.testing.assert_close(again, -leaf.detach().sin() * (2 + 2 * call), msg=f"call {call}")
        assert state[0] == 3 + 2 * call


def test_an_input_that_was_written_since_is_refused():
    leaf, other = torch.randn(3, requires_grad=True), torch.randn(3)
    result = amp(lambda x, y: (x + y).sin())[0](leaf, other)
    other.add_(1)
    (slope,) = torch.autograd.grad(result.sum(), leaf, create_graph=True)
    with pytest.raises(UnsupportedError, match="read an input that was written since"):
        slope.sum().backward()


@pytest.mark.parametrize("lower", LOWERS_AND_INDUCTOR)
def test_a_graph_can_be_kept_whatever_came_before(lower):
    """Inductor computes in what forward saved; stock torch.compile raises where a later backward keeps its graph."""
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
    run, _ = compiled(model, lower=lower)
    x = torch.randn(8, 16)
    run(x).square().mean().backward()
    loss = run(x).square().mean()
    kept = [torch.autograd.grad(loss, [*model.parameters()], retain_graph=True) for _ in range(2)]
    last = torch.autograd.grad(loss, [*model.parameters()])
    assert same_bits(kept[0], kept[1]) and same_bits(kept[0], last)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_backward_frees_the_inputs_and_a_cycle_keeps_none():
    model = smooth()
    run, _ = compiled(model)

    def alive(differentiate):
        x = torch.randn(8, 4, requires_grad=True)
        inputs = x + 0
        reference = weakref.ref(inputs)
        loss = run(inputs).sum()
        del inputs
        differentiate(loss, x)
        del loss
        return reference() is not None

    gc.disable()
    try:
        assert not alive(lambda loss, x: loss.backward())
        assert not alive(lambda loss, x: loss.backward(retain_graph=True))
        assert not alive(lambda loss, x: torch.autograd.grad(loss, x, create_graph=True)[0].square().sum().backward())
        assert not alive(lambda loss, x: None)
    finally:
        gc.enable()
    held = torch.randn(8, 4, requires_grad=True) + 0
    reference, loss = weakref.ref(held), run(held).sum()
    del held
    loss.backward()
    assert reference() is None  # while the loss still lives


def buffers(model):
    """Where the copies of a model's weights lie."""
    return tuple(c.data_ptr() for p in model.parameters() for c in copies_of(p))


def fused_step(model):
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    torch.optim.SGD(model.parameters(), lr=1.0, fused=True).step()
    model.zero_grad()


def scaler_step(model):
    scaler, optimizer = GradScaler("cpu", init_scale=1.0), torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.scale(torch.ones(()))
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    scaler.step(optimizer)
    model.zero_grad()


def in_place(model):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3)


def through_data(model):
    for param in model.parameters():
        param.data.mul_(3)


def twice(outputs, x, weights, between=lambda: None):
    """What a call gave, and its first and second derivatives, after something else."""
    between()
    first = torch.autograd.grad(outputs.float().sum(), x, retain_graph=True)
    second = torch.autograd.grad(outputs.float().sum(), x, create_graph=True)
    third = torch.autograd.grad((second[0].norm(dim=1) - 1).square().mean(), [x, *weights], allow_unused=True)
    return [outputs, *first, *second, *third]


@pytest.mark.parametrize("lower", LOWERS_AND_INDUCTOR)
def test_both_passes_see_the_weights_of_the_call_whatever_is_written_then(lower):
    """As eager autocast, whose own low-precision weights stay as they were."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    run, _ = compiled(model, lower=lower)
    x = torch.randn(32, 8, requires_grad=True)

    def write_and_call(write, called):
        write(model)
        if called:
            run(x.detach())

    start = copy.deepcopy(model.state_dict())
    for case in product([fused_step, scaler_step, in_place, through_data], [False, True]):
        model.load_state_dict(start)
        old, exact = copy.deepcopy(model), copy.deepcopy(model).double()
        found = twice(run(x), x, model.parameters(), partial(write_and_call, *case))
        reference = twice(eager(old, x), x, old.parameters())
        best = twice(exact(x.double()), x, exact.parameters())
        assert torch.equal(found[1], found[2]) or error(found[1:2], found[2:3]) < 0.01, case
        assert [value is None for value in found] == [value is None for value in reference]
        assert error(found, best) <= 1.2 * error(reference, best), case


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_weight_read_in_float32_is_autograds_affair(create_graph):
    """A norm's: eager autograd saved the weight itself and raises, too."""
    model = smooth()
    run, _ = compiled(model)
    x = torch.randn(8, 4, requires_grad=True)
    for outputs in (eager(model, x), run(x)):
        in_place(model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(outputs.float().sum(), x, create_graph=create_graph)


def kept_then_freed(loss, _):
    loss.backward(retain_graph=True)


def differentiable(loss, weights):
    torch.autograd.grad(loss, weights, create_graph=True)


@pytest.mark.parametrize("lower", ["aot_eager", pytest.param("inductor", marks=pytest.mark.ci)])
def test_a_loss_that_lives_on_keeps_no_copy_from_being_refreshed_in_place(lower):
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    run, _ = compiled(model, lower=lower)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, losses = set(), []
    for before in (None, kept_then_freed, differentiable):
        for _ in range(4):
            losses.append(run(torch.randn(8, 8, requires_grad=True)).float().square().mean())
            if before is not None:
                before(losses[-1], [*model.parameters()])
            losses[-1].backward()
            optimizer.step()
            seen.add(buffers(model))
    assert len(seen) == 1 and seen != {()}
