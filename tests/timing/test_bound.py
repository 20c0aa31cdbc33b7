"""The least time of a step is that of its products and its update, at rates that are measured."""

import pytest
import torch
from torch import nn

from ampcompile.timing import bound
from ampcompile.timing.bound import Product, find_products, least_seconds, update_bytes

BF16, F32 = torch.bfloat16, torch.float32


def test_products_are_counted_in_the_types_they_run_in() -> None:
    model = nn.Linear(16, 8, bias=False)
    run, x = torch.compile(model, backend="amp", options={"lower": "aot_eager", "dtype": BF16}), torch.randn(4, 16)
    found = find_products(lambda: (run(x).sum().backward(), x @ x.t(), nn.functional.linear(x, x)))
    flops, numbers = 2 * 4 * 16 * 8, 4 * 16 + 16 * 8 + 4 * 8
    assert found[0] == Product(BF16, "cpu", flops, 2 * numbers)
    assert [each.dtype for each in found] == [BF16, BF16, F32, F32]
    assert found[1].flops == flops, "the weight's gradient; the input needs none"
    assert found[2] == Product(F32, "cpu", 2 * 4 * 16 * 4, 4 * (2 * 64 + 16))


def test_an_update_streams_gradients_weights_and_state() -> None:
    params = [nn.Parameter(torch.ones(10, 10)), nn.Parameter(torch.ones(3), requires_grad=False)]
    optimizer = torch.optim.AdamW(params)
    params[0].grad = torch.ones(10, 10)
    optimizer.step()
    assert update_bytes(optimizer) == 100 * 4 * 7
    assert update_bytes(torch.optim.SGD(params)) == 100 * 4 * 3


def test_each_product_is_bound_by_arithmetic_or_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound, "memory_rate", lambda device: 100.0)
    monkeypatch.setattr(bound, "product_rate", lambda device, dtype: {BF16: 1000.0, F32: 500.0}[dtype])
    products = [Product(BF16, "cpu", 2000.0, 100), Product(F32, "cpu", 50.0, 300)]
    assert least_seconds(products, streamed=50) == 2 + 3 + 0.5
    assert least_seconds([]) == 0


def test_rates_are_measured_and_draw_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bound._WIDTH, "cpu", 64)
    monkeypatch.setitem(bound._COPIED, "cpu", 2**12)
    before = torch.get_rng_state()
    assert bound.product_rate("cpu", torch.float8_e4m3fn) > 0 < bound.memory_rate("cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_16_bits_that_a_cpu_emulates_have_the_rate_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {BF16: 1.0, F32: 500.0}
    monkeypatch.setattr(bound, "_measured_rate", lambda device, dtype: rates[dtype])
    for multiplies, rate in ((False, 500.0), (True, 500.0)):
        monkeypatch.setattr(bound.processor, "multiplies", lambda dtype, multiplies=multiplies: multiplies)
        assert bound.product_rate("cpu", BF16) == rate
    rates[BF16] = 900.0
    assert bound.product_rate("cpu", BF16) == 900.0
