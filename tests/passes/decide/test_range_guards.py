"""Constants that don't fit the low type neither overflow nor raise nor vanish, unless the user wants eager's ways."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiling import HALF, HIGH, LOW, amp, dtypes, eager, same_bits

LINEAR = nn.utils.skip_init(nn.Linear, 8, 8)
MASK = torch.arange(8) % 2 == 0
BIG, SMALL, WORST = -1e9, 1e-8, torch.finfo(HIGH).min

GUARDED = {
    "masked_fill": lambda h: h.masked_fill(MASK, BIG),
    "where": lambda h: torch.where(MASK, h, BIG),
    "multiply": lambda h: h * 70000.0,
    "add an int": lambda h: 70000 + h,
    "clamp": lambda h: (h / 5).clamp(-128000, 128000),
    "full_like": lambda h: torch.full_like(h, BIG),
    "new_full": lambda h: h.new_full((8,), BIG),
    "alpha": lambda h: torch.add(h, h, alpha=1e6),
    "hardtanh": lambda h: F.hardtanh(h, BIG, -BIG),
    "pad": lambda h: F.pad(h, (1, 1), value=BIG),
    "nan_to_num": lambda h: h.nan_to_num(posinf=1e9),
    "epsilon": lambda h: 1 / (h * 0 + SMALL),
    "divide": lambda h: h / 1e9,
    "constant": lambda h: F.linear(h, LINEAR.weight, torch.tensor([70000.0] * 8)),
}


@pytest.fixture(autouse=True)
def drawn() -> None:
    """Numbers of the test's own seed."""
    LINEAR.reset_parameters()


def each_on_linear(cases):
    """One function of all cases, so that they are compiled together: the results by name."""
    return lambda x: {name: f(LINEAR(x)) for name, f in cases.items()}


def test_the_op_moves_to_float32():
    x = torch.randn(2, 8)
    h = eager(LINEAR, x, dtype=HALF).float()
    run, recorder = amp(each_on_linear(GUARDED), dtype=HALF)
    for name, result in run(x).items():
        assert result.dtype == HIGH and torch.isfinite(result).all(), name
        assert torch.allclose(result, GUARDED[name](h), rtol=5e-3, atol=1e-3), name
    reasons = [n.meta["amp"].because for n in recorder.graphs[0].graph.graph.nodes if "amp" in n.meta]
    guarded = [reason for reason in reasons if reason.startswith("range guard: ") and "doesn't fit f16" in reason]
    assert len(guarded) >= len(GUARDED)


def test_a_comparison_is_exact_and_its_result_boolean():
    run, _ = amp(lambda x: (LINEAR(x) * 0 >= SMALL, LINEAR(x) * 0 < 1e6), dtype=HALF)
    assert [r.unique().tolist() for r in run(torch.randn(2, 8))] == [[False], [True]]


FITTING = {
    "infinity": lambda h: h.masked_fill(MASK, -torch.inf),
    "the type's own limit": lambda h: h.masked_fill(MASK, torch.finfo(h.dtype).min),
    "ordinary numbers": lambda h: (h * 2 + 1e-3).clamp(-100, 100) ** 2,
    "an epsilon inside a kernel": lambda h: F.layer_norm(h, (8,), eps=1e-12),
    "a probability": lambda h: F.dropout(h, 1e-9, training=False),
    "float32 operands": lambda h: h.float() * 1e9 + 1e-9,
    "a dtype asked for": lambda h: torch.full_like(h, BIG, dtype=HIGH),
    "integers": lambda h: h.argmax(-1) + 100000,
}


def test_what_fits_is_left_alone():
    f, x = each_on_linear(FITTING), torch.randn(2, 8)
    run, recorder = amp(f, dtype=HALF)
    assert same_bits(run(x), eager(f, x, dtype=HALF))
    assert not recorder.disagreements


def test_bfloat16_reaches_as_far_as_float32_but_for_its_very_end():
    x = torch.randn(2, 8)
    run, _ = amp(lambda x: (LINEAR(x).masked_fill(MASK, BIG), LINEAR(x) + SMALL, LINEAR(x).masked_fill(MASK, WORST)))
    assert dtypes(run(x)) == [LOW, LOW, HIGH]


WRITERS = {
    "masked_fill_": lambda h: h.masked_fill_(MASK, BIG),
    "fill_": lambda h: h.fill_(WORST),
    "clamp_": lambda h: h.clamp_(BIG, -BIG),
    "index_fill_": lambda h: h.index_fill_(1, torch.tensor([0]), BIG),
    "copy_": lambda h: h.copy_(torch.tensor([BIG] * 8)),
}


def setitem(h):
    h[:, 1:3] = BIG
    h[h > 2] = -BIG
    return h


def test_what_is_written_in_place_is_clamped():
    x, largest = torch.randn(2, 8), torch.finfo(HALF).max
    h = eager(LINEAR, x, dtype=HALF).float()
    writers = {**WRITERS, "setitem": setitem}
    for name, result in amp(each_on_linear(writers), dtype=HALF)[0](x).items():
        expected = writers[name](h.clone()).clamp(-largest, largest)
        assert result.dtype == HALF, name
        assert torch.allclose(result.float(), expected, rtol=5e-3, atol=1e-3), name


SPECIAL = (torch.inf, -torch.inf, torch.nan, 0.0, 1.0, 65504.0, -65504.0, 65519.0, -1e5, WORST, -WORST, BIG)
CONSTANT_WRITERS = {
    "copy_": lambda h, c: h.copy_(c),
    "setitem": lambda h, c: _set(h, 0, c),
    "of a view": lambda h, c: h[0].copy_(c.view(2, 4).t().reshape(8)),
    "index_put_": lambda h, c: h.index_put_((torch.tensor([1]),), c),
    "masked_scatter_": lambda h, c: h.masked_scatter_(MASK, c),
    "index_copy_": lambda h, c: h.index_copy_(0, torch.tensor([0]), c[None]),
}
READERS = {
    "where": lambda h, c: torch.where(MASK, h, c),
    "add": lambda h, c: h + c,
    "scalar": lambda h, c: h.masked_fill(MASK, -torch.inf) + torch.inf,
    "full": lambda h, c: torch.where(MASK, h, torch.full((8,), -torch.inf)),
}


def _set(h, i, value):
    h[i] = value
    return h


@pytest.mark.parametrize("dtype", [HALF, pytest.param(LOW, marks=pytest.mark.ci)])
def test_infinities_and_nan_of_a_constant_stay_what_they_are(dtype):
    x, largest, cases = torch.randn(2, 8), torch.finfo(dtype).max, {**CONSTANT_WRITERS, **READERS}
    for _ in range(4):
        torch._dynamo.reset()
        values = random.choices(SPECIAL, k=8)

        def f(x, values=values):
            return {name: case(LINEAR(x) * 1, torch.tensor(values)) for name, case in cases.items()}

        run, _ = amp(f, dtype=dtype)
        h, constant = eager(LINEAR, x, dtype=dtype).float(), torch.tensor(values)
        clamped = torch.where(constant.isinf(), constant, constant.clamp(-largest, largest))
        for name, found in run(x).items():
            if name in CONSTANT_WRITERS:
                expected = cases[name](h.clone(), clamped).to(dtype)
                assert torch.equal(found.nan_to_num(7.0, 3e4, -3e4), expected.nan_to_num(7.0, 3e4, -3e4)), (
                    name,
                    values,
                )
            else:
                expected = cases[name](h.clone(), constant)
                assert torch.allclose(found.float(), expected, rtol=8e-3, atol=8e-3, equal_nan=True), (name, values)


def test_without_guards_decisions_are_eagers_to_the_letter():
    guarded = {name: GUARDED[name] for name in ("multiply", "epsilon", "divide", "where", "constant")}
    x = torch.randn(2, 8)
    run, recorder = amp(each_on_linear({**guarded, "setitem": setitem}), dtype=HALF, range_guards=False)
    expected = eager(each_on_linear(guarded), x, dtype=HALF)
    expected["setitem"] = setitem(eager(LINEAR, x, dtype=HALF).float()).half()  # eager float16 raises since torch 2.15
    assert same_bits(run(x), expected)
    assert not recorder.disagreements


def test_without_guards_what_eager_refuses_raises():
    f, x = (lambda x: GUARDED["masked_fill"](LINEAR(x))), torch.randn(2, 8)
    for run in (lambda: eager(f, x, dtype=HALF), lambda: amp(f, dtype=HALF, range_guards=False)[0](x)):
        with pytest.raises(RuntimeError, match="without overflow"):
            run()


@pytest.mark.parametrize("seen_as", [lambda bias: bias, lambda bias: bias.view(2, 4)])
def test_a_constant_changed_in_place_is_no_longer_known(seen_as):
    def f(x):
        bias = torch.tensor([70000.0] * 8)
        seen_as(bias).mul_(0)
        return F.linear(x, LINEAR.weight, bias)

    assert amp(f, dtype=HALF)[0](torch.randn(2, 8)).dtype == HALF


def later(x):
    return torch.ones(len(x), len(x)).triu(1) > 0


def attention(x):
    q, k, v = LINEAR(x), LINEAR(x + 1), LINEAR(x - 1)
    mask = torch.zeros(len(x), len(x)).masked_fill(later(x), WORST)
    return ((q @ k.t() / 8**0.5).float() * 1 + mask).softmax(-1) @ v


def masked_scores(x):
    q, k = LINEAR(x), LINEAR(x + 1)
    return (q @ k.t()).masked_fill(later(x), WORST).softmax(-1) @ LINEAR(x)


def scaled_dot_product(x):
    q = LINEAR(x)[None, None]
    mask = torch.zeros(len(x), len(x)).masked_fill(later(x), WORST)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


TRAPS = {
    "attention with finfo.min added": attention,
    "attention with finfo.min filled in": masked_scores,
    "a mask of finfo.min for the fused kernel": scaled_dot_product,
    "clamp at ±128000": lambda x: (LINEAR(x) / 5).clamp(-128000, 128000) @ LINEAR(x).t(),
    "x / (sum + 1e-8) on zeros": lambda x: (h := LINEAR(x) * 0) / (h.sum(-1, keepdim=True) + SMALL),
    "lengths past 2048": lambda x: (
        (LINEAR(x)[:, :1] * 0 + torch.arange(4095.0, 4095.0 + len(x))[:, None]).floor().long()
    ),
}


def test_the_traps_of_float16_are_finite_and_right():
    x = torch.randn(5, 8)
    run, _ = amp(lambda x: {name: f(x) for name, f in TRAPS.items()}, dtype=HALF)
    for name, result in run(x).items():
        assert torch.isfinite(result).all(), name
        expected = TRAPS[name](x)
        torch.testing.assert_close(result.float(), expected.float(), rtol=2e-2, atol=2e-2, msg=lambda m, n=name: n + m)
