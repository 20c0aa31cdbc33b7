"""The gradients of short attention are closer to float64 than the flash kernel's, which stays where it is better."""

import pytest
import torch
import torch.nn.functional as F

from ampcompile.kernels.attention_backward import FLASH_BACKWARD, LONGEST, attention_backward

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def operands(length, other, dtype=torch.bfloat16, features=12):
    q, k, v, grad = (
        torch.randn(2, n, 3, features, dtype=dtype).transpose(1, 2) for n in (length, other, other, length)
    )
    return q, k, v, grad


def error(found, exact):
    return float((found.double() - exact).norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("length", "other", "causal"), [(1, 1, True), (17, 17, True), (33, 19, False), (LONGEST, 3, False)]
)
@pytest.mark.parametrize("scale", [None, 0.2])
def test_closer_to_float64_than_the_flash_kernel(dtype, length, other, causal, scale):
    q, k, v, grad = operands(length, other, dtype)
    out, logsumexp = FORWARD(q, k, v, 0.0, causal, scale=scale)
    exact_inputs = [t.double().requires_grad_() for t in (q, k, v)]
    exact_out = F.scaled_dot_product_attention(*exact_inputs, is_causal=causal, scale=scale)
    exact = torch.autograd.grad(exact_out, exact_inputs, grad.double())
    ours = attention_backward(grad, q, k, v, out, logsumexp, 0.0, causal, scale=scale)
    flash = FLASH_BACKWARD(grad, q, k, v, out, logsumexp, 0.0, causal, scale=scale)
    for mine, theirs, right in zip(ours, flash, exact, strict=True):
        assert mine.dtype == dtype and mine.shape == right.shape
        assert error(mine, right) <= 1.01 * error(theirs, right) + 1e-3 * float(grad.double().norm())
        assert error(mine, right) < 0.02 * float(grad.double().norm())


@pytest.mark.parametrize(
    "change",
    [
        {"attn_mask": torch.zeros(17, 17, dtype=torch.bfloat16)},
        {"dropout_p": 0.1},
        {"length": LONGEST + 1},
        {"dtype": torch.float32},
    ],
    ids=["a mask", "dropout", "long", "float32"],
)
def test_leaves_the_rest_to_the_flash_kernel(change):
    options = {"length": 17, "dropout_p": 0.0, "dtype": torch.bfloat16, "attn_mask": None} | change
    q, k, v, grad = operands(options["length"], options["length"], options["dtype"])
    out, logsumexp = FORWARD(q, k, v, 0.0, False)
    result = attention_backward(
        grad, q, k, v, out, logsumexp, options["dropout_p"], False, attn_mask=options["attn_mask"]
    )
    assert result is NotImplemented
