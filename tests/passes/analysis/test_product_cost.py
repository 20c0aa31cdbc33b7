"""What a graph's products take is estimated from measurements, and said by explain and doctor."""

import pytest
import torch
import torch.nn.functional as F

import ampcompile
from ampcompile.passes.analysis import product_cost, wide_products
from ampcompile.passes.analysis.product_cost import Estimate, Speed
from ampcompile.torch_private import processor
from tests.compiling import HALF, HIGH, LOW


@pytest.fixture
def machine(monkeypatch):
    """A machine that starts a product in 1 us in float32, in 5 us in bfloat16, but then is 4 times as fast."""
    speeds = {HIGH: Speed(1e-6, 1e9), LOW: Speed(5e-6, 4e9), HALF: Speed(1e-6, 1e6)}
    monkeypatch.setattr(product_cost, "speed", lambda device, dtype: speeds[dtype])
    monkeypatch.setattr(product_cost, "bandwidth", lambda device: 1e12)
    monkeypatch.setattr(wide_products, "SMALL", 0)  # it multiplies all in their own types


def estimated(f, *args, **options):
    torch._dynamo.reset()
    (graph,) = ampcompile.explain(f, **options)(*args).graphs
    return graph.estimate


def test_products_are_counted_with_their_flops(machine):
    found = estimated(lambda x, w: F.linear(x, w).relu() @ w, torch.randn(16, 32), torch.randn(32, 32))
    flops = 2 * 16 * 32 * 32
    assert (found.device, found.low, found.products) == ("cpu", LOW, 2)
    assert found.wide == pytest.approx(2 * (1e-6 + flops / 1e9))
    assert found.narrow == pytest.approx(2 * (5e-6 + flops / 4e9))
    assert found.casts == pytest.approx(6 * (16 * 32 + 32 * 32) / 1e12), "w is cast once"


@pytest.mark.parametrize(
    ("width", "dtype", "pays", "matters", "verdict"),
    [
        (4, LOW, False, False, "bf16 gains nothing here"),
        (24, LOW, True, False, "bf16 or f32 makes no difference here"),
        (64, LOW, True, True, "bf16 pays"),
        (64, HALF, False, True, "f16 won't help here"),
    ],
)
def test_tiny_products_dont_pay_and_get_no_advice(machine, width, dtype, pays, matters, verdict):
    found = estimated(torch.nn.Linear(width, width), torch.randn(width, width), dtype=dtype)
    assert found.pays == pays and (found.gain > 1) == pays and found.matters == matters
    assert str(found).startswith(f"{verdict} (estimated): 1 product on this cpu: ")
    backward = "; in backward {:.0f} us and {:.0f} us".format(*(1e6 * each for each in found.backward))
    end = f"{backward}; besides, 11 us a call and 16 us an update of 2 weights"
    assert ("for casts" + ", less than a call itself takes" * (not matters) + end) in str(found)
    assert str(found).endswith("us longer" if not pays else end)


def test_a_product_starts_as_fast_on_a_machine_that_others_use(monkeypatch):
    """Two calls of three wait for another process, 20 ms each."""
    waits = iter([0.02, 0.02, 2e-6] * 20)
    monkeypatch.setattr(product_cost, "time_call", lambda device, call: next(waits))
    assert product_cost.speed.__wrapped__("cpu", HIGH).start == 2e-6


def three_linears():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))


@pytest.mark.parametrize("trained", [True, False])
def test_products_that_gain_less_than_the_host_loses_dont_pay(machine, monkeypatch, trained):
    """An MLP that is 3 x 2.5 us faster in forward, and in a step 8 x 2.5 us; a call of ours and an update take 30."""
    speeds = {HIGH: Speed(20.5e-6, 1e15), LOW: Speed(18e-6, 1e15)}
    monkeypatch.setattr(product_cost, "speed", lambda device, dtype: speeds[dtype])
    found = estimated(three_linears().requires_grad_(trained), torch.randn(32, 64))
    assert found.wide > product_cost.ENOUGH * (found.narrow + found.casts) and not found.pays
    assert found.copies == 6 and found.call == pytest.approx(10e-6 + 6 * 0.3e-6)
    if trained:
        assert found.update == pytest.approx(15e-6 + 6 * 0.5e-6)
        assert found.backward[0] == pytest.approx(5 * 20.5e-6, rel=1e-3), "the input needs no gradient"
        assert str(found).startswith("bf16 won't help here (estimated): 3 products on this cpu: 62 us in f32")
        assert str(found).endswith("12 us a call and 18 us an update of 6 weights: a step takes some 10 us longer")
    else:
        assert (
            found.update == 0
            and found.backward == (0, 0)
            and str(found).endswith("; besides, 12 us a call: a call takes some 4 us longer")
        )
        assert found.whole == pytest.approx((3 * 20.5e-6, 3 * 18e-6 + 11.8e-6), rel=1e-2)


def test_an_update_of_large_weights_takes_their_cast(machine, monkeypatch):
    monkeypatch.setattr(product_cost, "bandwidth", lambda device: 1e9)
    found = estimated(torch.nn.Linear(512, 512), torch.randn(512, 512))
    cast = 6 * 512 * 512 / 1e9
    assert found.update == pytest.approx(15e-6 + cast + 6 * 512 / 1e9)
    assert found.backward[1] == pytest.approx(found.narrow + found.casts + cast, rel=0.01), "and so does a gradient"
    assert found.pays and str(found).startswith("bf16 pays")


def test_a_type_that_a_device_has_no_units_for_has_no_width(machine):
    assert [product_cost.smallest_gaining_width("cpu", low) for low in (HALF, LOW)] == [None, 16]


def test_where_memory_is_slow_half_the_bytes_pay_but_not_on_a_cpu(machine, monkeypatch):
    monkeypatch.setattr(product_cost, "bandwidth", lambda device: 1e6)
    for dtype in (HIGH, LOW):
        assert product_cost._seconds("cuda", dtype, 1.0, 1000) == pytest.approx(1000 * dtype.itemsize / 1e6)
        assert product_cost._seconds("cpu", dtype, 1e6, 1 << 20) == product_cost.speed("cpu", dtype).seconds(1e6)


def test_small_products_of_a_cpu_take_float32s_time(machine, monkeypatch):
    monkeypatch.setattr(wide_products, "SMALL", 1 << 19)
    wide, low = (product_cost.speed("cpu", dtype) for dtype in (HIGH, LOW))
    assert product_cost._seconds("cpu", LOW, 2.0**17, 1000) == wide.seconds(2.0**17) != low.seconds(2.0**17)
    assert product_cost._seconds("cuda", LOW, 2.0**17, 1000) != wide.seconds(2.0**17)


def test_dense_products_of_a_slow_type_take_float32s_time(machine, monkeypatch):
    monkeypatch.setattr(processor, "multiplies_faster", lambda dtype: dtype != LOW)
    wide, low = (product_cost.speed("cpu", dtype) for dtype in (HIGH, LOW))
    assert product_cost._seconds("cpu", LOW, 2e6, 1000) == wide.seconds(2e6)
    assert product_cost._seconds("cpu", LOW, 2e6, 1 << 20) == low.seconds(2e6)


@pytest.mark.parametrize("f", [torch.sin, lambda x: x.softmax(-1), lambda x: torch.mm(x.double(), x.double())])
def test_nothing_low_is_nothing_to_estimate(machine, f):
    assert estimated(f, torch.randn(4, 4)) is None


def test_explain_says_so(machine):
    report = ampcompile.explain(torch.nn.Linear(64, 64), dtype=HALF)(torch.randn(64, 64))
    assert "f16 won't help here (estimated): 1 product on this cpu:" in str(report)


def test_sizes_that_are_symbols_add_no_guard(machine):
    x = torch.randn(6, 8)
    torch._dynamo.mark_dynamic(x, 0)  # which raises if a guard fixes the size
    assert estimated(torch.mm, x, torch.randn(8, 8)).wide == pytest.approx(1e-6 + 2 * 6 * 8 * 8 / 1e9)


def test_a_machine_is_really_measured():
    for dtype in (HIGH, LOW):
        found = product_cost.speed("cpu", dtype)
        assert 0 < found.start < 1 and found.flops > 0
    assert product_cost.bandwidth("cpu") > 0
    assert Estimate("cpu", LOW, 0, 0.0, 0.0, 1.0).pays, "without products there is nothing to gain or lose"


def test_a_device_that_is_not_here_is_not_measured(monkeypatch):
    monkeypatch.setattr(product_cost, "device_type_of", lambda values: "cuda")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert estimated(torch.nn.Linear(4, 4), torch.randn(2, 4)) is None
