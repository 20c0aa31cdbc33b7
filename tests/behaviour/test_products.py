"""Products in float32, as on a CPU that emulates a type: how exact they are, which weights they read, and what's said.

`products="float32"` takes this road on any CPU.
"""

import copy
import gc
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampcompile
from ampcompile.compiler import backend
from ampcompile.timing import step_profile
from tests.compiling import draws, error, gradients
from tests.models import Attention, Net

pytestmark = pytest.mark.units
LOW, HALF = torch.bfloat16, torch.float16
TYPES = pytest.mark.parametrize("dtype", [LOW, HALF])


def images() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(4, 4, 3, groups=4)),
    )


def checkpointed(m: nn.Module, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return torch.einsum("bi,bj->ij", x, x) @ m.layers[0][0].weight


def with_checkpoints() -> nn.Module:
    layers = (nn.Sequential(nn.Linear(12, 12), nn.GELU()) for _ in range(2))
    return Net(checkpointed, layers=nn.ModuleList(layers))


def cell() -> nn.Module:
    return Net(lambda m, x: m.cell(x, m.cell(x))[0], cell=nn.LSTMCell(10, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear layers": (lambda: nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8)), (6, 24)),
    "attention": (Attention, (2, 10, 16)),
    "convolutions": (images, (2, 3, 12, 12)),
    "checkpoints, einsum, a shared weight": (with_checkpoints, (5, 12)),
    "LSTM cell": (cell, (4, 10)),
}


def compiled(model: Any, dtype: torch.dtype, dynamic: bool | None = None, **options: Any) -> Any:
    given = {"lower": "aot_eager", "products": "float32", "dtype": dtype, **options}
    return torch.compile(model, backend="amp", dynamic=dynamic, options=given)


def loss(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return run(x).float().square().mean()


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, LOW) for name in MODELS), ("attention", HALF), ("convolutions", HALF)]
)
def test_no_further_from_float64_than_eager_autocast(name: str, dtype: torch.dtype) -> None:
    make, shape = MODELS[name]
    reference = make()
    twin, exact = copy.deepcopy(reference), copy.deepcopy(reference).double()
    run, totals = compiled(twin, dtype), torch.zeros(2, 2)

    def found(run: Any, owner: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        return [run(x).detach()], gradients(owner, lambda _: loss(run, x))

    for _ in draws(reference, twin, exact):
        x = torch.randn(shape)
        true, ours = found(exact, exact, x.double()), found(run, twin, x)
        with torch.autocast("cpu", dtype):
            theirs = found(reference, reference, x)
        assert ours[0][0].dtype == torch.float32 and ours[0][0].stride() == theirs[0][0].stride()
        totals += torch.tensor([[*map(error, each, true)] for each in (ours, theirs)]).square()
    for mine, eagers in totals.T:  # of the results, and of the gradients
        assert 0 < mine <= 1.3 * eagers, totals


@TYPES
def test_infinities_and_nan_are_as_on_units(dtype: torch.dtype) -> None:
    a = torch.tensor([[torch.inf, 1.0], [torch.nan, 1.0], [60000.0, 60000.0], [torch.inf, -torch.inf], [-0.0, 0.0]])
    b = torch.tensor([[2.0, 0.0], [1.0, 3.0]])
    found = compiled(torch.mm, dtype, outputs="autocast")(a, b)
    largest = torch.inf if dtype == HALF else 180224.0
    expected = torch.tensor([[torch.inf, torch.nan], [torch.nan] * 2, [largest] * 2, [torch.nan] * 2, [0.0, 0.0]])
    assert found.dtype == dtype and torch.equal(found.float().nan_to_num(nan=7), expected.nan_to_num(nan=7))


@TYPES
def test_weights_are_held_as_float32_for_any_number_of_rows_and_follow_every_update(dtype: torch.dtype) -> None:
    model = nn.Linear(8, 8)
    run, optimizer = compiled(model, dtype, dynamic=True), torch.optim.SGD(model.parameters(), lr=0.5)
    before = ampcompile.weight_stats()
    for step, rows in enumerate((4, 9, 40)):
        x = torch.randn(rows, 8)
        loss(run, x).backward()
        held = ampcompile.weight_stats()
        assert held.bytes - before.bytes == 4 * (64 + 8) and held.copies - before.copies == 2
        assert held.casts - before.casts == step + 1
        optimizer.step()
        optimizer.zero_grad()
        assert_current(run(x), model, x, dtype)
        with torch.no_grad():
            assert_current(run(x), model, x, dtype)
    with torch.no_grad():
        model.weight.data.numpy()[:] = 0.25
    assert_current(run(x), model, x, dtype)


def assert_current(found: Tensor, model: nn.Module, x: Tensor, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype), torch.no_grad():
        torch.testing.assert_close(found, model(x).float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize(("dtype", "optimizer"), [(LOW, torch.optim.AdamW), (HALF, torch.optim.SGD)])
def test_the_fused_step_brings_them_up_to_date(dtype: torch.dtype, optimizer: Any) -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    run, scaler = compiled(model, dtype), ampcompile.GradScaler("cpu", init_scale=8.0)
    optimizer = optimizer(model.parameters(), lr=0.1)
    loss(run, x)
    casts = ampcompile.weight_stats().casts
    for bad in (False, True, False):
        scaler.scale(loss(run, x) * (torch.inf if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert_current(run(x), model, x, dtype)
    assert ampcompile.weight_stats().casts == casts, "the step writes copies held as float32"


def test_the_second_backward_reads_the_same_numbers() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)), torch.randn(5, 6, requires_grad=True)

    def penalty(run: Any) -> Tensor:
        (grad,) = torch.autograd.grad(run(x).float().sum(), x, create_graph=True)
        return grad.float().square().sum()

    ours = gradients(model, lambda m: penalty(compiled(m, LOW)))
    with torch.autocast("cpu", LOW):
        theirs = gradients(model, penalty)
    exact = gradients(copy.deepcopy(model).double(), lambda m: penalty(lambda x: m(x.double())))
    assert error(ours, exact) <= 1.5 * error(theirs, exact)


def assert_gradients_are_near(run: Any, model: nn.Module, exact: nn.Module, x: Tensor, dtype: torch.dtype) -> None:
    ours, true = gradients(model, lambda _: loss(run, x)), gradients(exact, lambda m: loss(m, x.double()))
    assert 0 < error(ours, true) < 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("dtype", "grad"), [(LOW, False), pytest.param(HALF, True, marks=pytest.mark.ci)])
def test_through_inductor(dtype: torch.dtype, grad: bool) -> None:
    """Large enough for oneDNN's kernel, and for packed weights where no gradient is wanted."""
    model, x = nn.Sequential(nn.Linear(256, 320), nn.GELU(), nn.Linear(320, 256)), torch.randn(64, 256)
    exact, run = copy.deepcopy(model).double(), compiled(twin := copy.deepcopy(model), dtype, lower="inductor")
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            found = run(x)
        with torch.autocast("cpu", dtype):
            values = model(x)
    true = exact(x.double())
    assert error([found], [true]) <= 1.1 * error([values], [true])
    if grad:
        assert_gradients_are_near(run, twin, exact, x, dtype)


def dense() -> nn.Module:
    """Layers with much to multiply in each row, behind a convolution."""
    conv = nn.Conv2d(16, 32, 3, padding=1)
    layers = nn.Sequential(nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 64))
    return Net(lambda m, x: m.layers(m.conv(x).flatten(1).view(-1, 128)), conv=conv, layers=layers)


@pytest.mark.cpu(faster=())
@pytest.mark.ci
@pytest.mark.parametrize("grad", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_through_inductor_where_units_are_slow(grad: bool) -> None:
    """Many rows run in float32, with wide copies; a graph of few rows has copies of its own, in 16 bits."""
    model = dense()
    exact = copy.deepcopy(model).double()
    run = compiled(model, LOW, lower="inductor", products="auto")
    before = ampcompile.weight_stats().bytes
    with torch.set_grad_enabled(grad):
        for side, bytes_each in ((16, 4), (2, 2)):
            x = torch.randn(2, 16, side, side)
            for _ in range(4):
                found = run(x)
            with torch.autocast("cpu", LOW):
                values = model(x)
            true = exact(x.double())
            assert 0 < error([found], [true]) <= 1.1 * error([values], [true])
            assert ampcompile.weight_stats().bytes - before >= bytes_each * 128 * 192
            if grad:
                assert_gradients_are_near(run, model, exact, x, LOW)
        images = [torch.randn(2, 16, side, side) for side in (16, 2)]
        stale = [run(x).detach() for x in images]
        with torch.enable_grad():
            optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
            loss(run, images[0]).backward()
        ampcompile.GradScaler("cpu", enabled=False).step(optimizer)  # which writes the copies of both graphs
        for x, before_it in zip(images, stale, strict=True):
            assert_current(found := run(x), model, x, LOW)
            assert (found - before_it).abs().max() > 0.01


@pytest.mark.parametrize(
    ("units", "how"),
    [
        pytest.param(True, "timed", marks=pytest.mark.cpu(multiplies=(LOW, HALF))),
        *(pytest.param(False, how, marks=pytest.mark.cpu(multiplies=())) for how in ("timed", "trained")),
    ],
)
def test_a_cpu_without_units_is_told_of_once_a_type_where_time_counts_and_by_explain_in_its_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, units: bool, how: str
) -> None:
    monkeypatch.setattr(backend, "_without_units", {})
    x, optimizers = torch.randn(2, 3), list[Any]()
    # Of this test's own: others may have left some to the garbage collector.
    monkeypatch.setattr(backend, "gc", SimpleNamespace(**vars(gc) | {"get_objects": lambda: [x, *optimizers]}))

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if "units" in record.getMessage()]

    with caplog.at_level(logging.WARNING, "ampcompile"):
        report = ampcompile.explain(nn.Linear(3, 3))(x)
        assert ("no units for bf16" in str(report)) is not units and not said()
        assert report.graphs[0].products == (2, 2), "small ones run in float32 everywhere"
        compiled(nn.ReLU(), LOW)(x)
        assert not said(), "nothing is cast"
        ampcompile.audit(nn.Linear(3, 3))(x)
        ampcompile.record(run := compiled(nn.Linear(3, 3), LOW, lower="aot_eager"))(x)
        run(x).sum().backward()
        assert not said(), "nobody trains or waits"
        if how == "trained":
            optimizers.append(torch.optim.SGD([nn.Parameter(x)]))
            for dtype in (LOW, LOW, HALF):
                compiled(nn.Linear(3, 3), dtype, lower="aot_eager")(x)
        else:
            with torch.no_grad():
                slow = compiled(nn.Linear(3, 3), HALF, lower="aot_eager")
                assert not slow(x).requires_grad and not said()
            for _ in range(2):
                step_profile.measure(lambda: slow(x), steps=1)
    assert [line.split()[7] for line in said()] == ([] if units else ["bf16", "f16"])
