"""Gradients of attention are no further from float64 than the flash kernel's, which stays where it is needed."""

import pytest
import torch
import torch.nn.functional as F

from ampcompile.kernels import attention_backward as module
from ampcompile.kernels.attention_backward import ATTENTION_BACKWARD, FLASH_BACKWARD, LONGEST, attention_backward

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
LOW = torch.bfloat16
needs_kernel = pytest.mark.skipif(not module.available(), reason="this processor has no kernel of ours")


@pytest.fixture
def whole_products(monkeypatch):
    """A processor without a kernel of ours."""
    monkeypatch.setattr(module, "available", lambda: False)


def operands(length, other, dtype=LOW, features=12):
    return [torch.randn(2, n, 3, features, dtype=dtype).transpose(1, 2) for n in (length, other, other, length)]


def error(found, exact):
    return float((found.double() - exact).norm())


def both(q, k, v, grad, causal, scale=None, mask=None):
    """Ours, the flash kernel's, and in float64."""
    options = {"attn_mask": mask, "scale": scale}
    out, logsumexp = FORWARD(q, k, v, 0.0, causal, **options)
    inputs = [t.double().requires_grad_() for t in (q, k, v)]
    exact_mask = None if mask is None else mask.double()
    exact_out = F.scaled_dot_product_attention(*inputs, exact_mask, is_causal=causal, scale=scale)
    exact = torch.autograd.grad(exact_out, inputs, grad.double())
    given = grad, q, k, v, out, logsumexp, 0.0, causal
    return attention_backward(*given, **options), FLASH_BACKWARD(*given, **options), exact


def check(make, causal, scale=None, mask=None):
    """Over several draws gradients are no further from float64; one draw may be by chance, the sooner the smaller."""
    totals = [[0.0, 0.0, 0.0, 0.0] for _ in range(3)]
    for _ in range(24 if make()[0].shape[2] < 20 else 6):
        q, k, v, grad = make()
        ours, flash, exact = both(q, k, v, grad, causal, scale, mask)
        for total, mine, theirs, right in zip(totals, ours, flash, exact, strict=True):
            assert mine.dtype == q.dtype and mine.shape == right.shape
            sizes = error(mine, right), error(theirs, right), float(right.norm()), float(grad.double().norm())
            total[:] = (a + b for a, b in zip(total, sizes, strict=True))
    for mine, theirs, exact, given in totals:
        assert mine <= 1.1 * theirs + 1e-6 * given
        assert mine <= 0.02 * exact + 0.002 * given


@pytest.mark.parametrize("dtype", [LOW, torch.float16])
@pytest.mark.parametrize(
    ("length", "other", "causal"), [(1, 1, True), (17, 17, True), (33, 19, False), (LONGEST, 3, False)]
)
@pytest.mark.parametrize("scale", [None, 0.2])
def test_whole_products(whole_products, dtype, length, other, causal, scale):
    check(lambda: operands(length, other, dtype), causal, scale)


@needs_kernel
@pytest.mark.parametrize("features", [16, 48, 80])
@pytest.mark.parametrize(
    ("length", "other"), [(1, 1), (17, 17), (64, 64), (128, 128), (7, 131), (131, 7), (200, 65), (65, 200), (300, 300)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_our_kernel(length, other, causal, features):
    check(lambda: operands(length, other, features=features), causal, None if length % 2 else 0.25)


MASKS = {
    "padding": lambda: torch.zeros(2, 1, 1, 140).index_fill(3, torch.arange(90, 140), -torch.inf),
    "padding, its lowest number": lambda: torch.zeros(2, 1, 1, 140).index_fill(3, torch.arange(90), LOWEST),
    "a bias of each head": lambda: torch.randn(1, 3, 130, 140),
    "for all": lambda: torch.randn(130, 140).clamp(min=0),
    "a query that sees nothing": lambda: torch.zeros(130, 140).index_fill(0, torch.tensor([129]), -torch.inf),
    "expanded": lambda: torch.randn(2, 1, 130, 1).expand(2, 3, 130, 140),
}
LOWEST = torch.finfo(LOW).min


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("mask", MASKS)
def test_our_kernel_adds_masks(mask, dtype):
    check(lambda: operands(130, 140, features=32), causal=False, scale=0.125, mask=MASKS[mask]().to(dtype))


@needs_kernel
def test_our_kernel_takes_a_query_whose_keys_all_have_the_lowest_number_as_forward_does():
    mask = torch.zeros(40, 70, dtype=LOW).index_fill(0, torch.tensor([7]), LOWEST)
    ours, flash, _ = both(*operands(40, 70, features=16), causal=False, mask=mask)
    for mine, theirs in zip(ours, flash, strict=True):
        assert error(mine, theirs) < 0.01 * float(theirs.double().norm())


@needs_kernel
@pytest.mark.parametrize("unseen", [0.0, torch.inf, torch.nan])
def test_our_kernel_gives_masked_keys_no_gradient(unseen):
    q, k, v, grad = operands(20, 90, features=16)
    k[:, :, 20:] += unseen
    ours, _, _ = both(q, k, v, grad, causal=True)
    assert all(grad[:, :, :20].count_nonzero() and not grad[:, :, 20:].count_nonzero() for grad in ours[1:])


LAYOUTS = {
    "parts of one product": lambda t: torch.stack([t] * 3).permute(1, 3, 0, 2, 4).contiguous()[:, :, 1].transpose(1, 2),
    "tokens apart": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "features apart": lambda t: t.mT.contiguous().mT,
    "a slice": lambda t: torch.cat([t, t], -1)[..., :32],
    "expanded": lambda t: t[:1, :1].expand_as(t),
}


@needs_kernel
@pytest.mark.parametrize("layout", LAYOUTS)
def test_our_kernel_reads_any_layout(layout):
    tensors = [LAYOUTS[layout](t) for t in operands(40, 40, features=32)]
    plain = [t.contiguous() for t in tensors]
    q, k, v, grad = plain
    out, logsumexp = FORWARD(q, k, v, 0.0, True)
    expected = ATTENTION_BACKWARD(grad, q, k, v, out, logsumexp, None, True, 0.2)
    q, k, v, grad = tensors
    found = ATTENTION_BACKWARD(grad, q, k, v, LAYOUTS["a slice"](out), logsumexp.mT.contiguous().mT, None, True, 0.2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


WINDOWS = {
    "windows": lambda: torch.randn(2, 3, 40, dtype=LOW).unfold(2, 32, 1),
    "one row for all": lambda: torch.randn(2, 32, 1, dtype=LOW).mT.unsqueeze(1).expand(2, 3, 9, 32),
}


@needs_kernel
@pytest.mark.parametrize("place", [1, 2], ids=["keys", "values"])
@pytest.mark.parametrize("layout", WINDOWS)
def test_our_kernel_writes_gradients_of_overlapping_rows(layout, place):
    tensors = operands(9, 9, features=32)
    tensors[place] = WINDOWS[layout]()
    ours, _, exact = both(*tensors, causal=False)
    for mine, right in zip(ours, exact, strict=True):
        assert error(mine, right) <= 0.02 * float(right.norm()) + 0.01 * float(tensors[3].double().norm())


@needs_kernel
def test_our_kernel_keeps_its_bits_whatever_the_threads():
    q, k, v, grad = operands(150, 150, features=32)
    out, logsumexp = FORWARD(q, k, v, 0.0, True)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(ATTENTION_BACKWARD(grad, q, k, v, out, logsumexp, None, True, 0.3))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@needs_kernel
def test_our_kernel_survives_large_scores_and_passes_on_what_is_not_finite():
    check(lambda: [t * s for t, s in zip(operands(70, 70, features=16), (30, 30, 1, 1), strict=True)], causal=False)
    q, k, v, grad = operands(70, 70, features=16)
    grad[0, 0, 5, 3] = torch.inf
    ours, _, _ = both(q, k, v, grad, causal=True)
    for mine in ours:
        assert not mine[0, 0].isfinite().all() and mine[0, 1].isfinite().all() and mine[1].isfinite().all()


@needs_kernel
def test_our_kernel_is_an_op_that_torch_can_trace():
    q, k, v, grad = operands(9, 5, features=16)
    out, logsumexp = FORWARD(q, k, v, 0.0, False)
    arguments = (grad, q, k, v, out, logsumexp, torch.zeros(5), False, 0.25)
    torch.library.opcheck(ATTENTION_BACKWARD, arguments, test_utils=("test_schema", "test_faketensor"))


def test_what_was_compiled_for_it_runs_without_it(whole_products):
    q, k, v, grad = operands(9, 9, features=16)
    out, logsumexp = FORWARD(q, k, v, 0.0, True)
    ours = ATTENTION_BACKWARD(grad, q, k, v, out, logsumexp, None, True, 0.25)
    flash = FLASH_BACKWARD(grad, q, k, v, out, logsumexp, 0.0, True, scale=0.25)
    for mine, theirs, like in zip(ours, flash, (q, k, v), strict=True):
        assert torch.equal(mine, theirs) and mine.stride() == like.stride()


@pytest.mark.parametrize(
    "change",
    [
        {"attn_mask": torch.zeros(17, 17, dtype=LOW)},
        {"dropout_p": 0.1},
        {"length": LONGEST + 1},
        {"dtype": torch.float32},
    ],
    ids=["a mask", "dropout", "long", "float32"],
)
def test_leaves_the_rest_to_the_flash_kernel(change):
    options = {"length": 17, "dropout_p": 0.0, "dtype": LOW, "attn_mask": None} | change
    q, k, v, grad = operands(options["length"], options["length"], options["dtype"])
    sums = q[..., 0].float()  # the kernel isn't asked for: without vectors torch's has none for long ones on every CPU
    result = attention_backward(grad, q, k, v, q, sums, options["dropout_p"], False, attn_mask=options["attn_mask"])
    assert result is NotImplemented


@pytest.mark.parametrize("batch", [1, 2])
def test_leaves_keys_and_values_of_different_sizes_to_the_flash_kernel(batch):
    q, k, v, grad = operands(17, 17, features=16)
    fewer = v[:batch, :, :5]
    assert attention_backward(grad, q, k, fewer, q, q[..., 0].float(), 0.0, False) is NotImplemented
    assert attention_backward(grad[..., :0], q[..., :0], k[..., :0], v[..., :0], q, q, 0.0, False) is NotImplemented
