"""Attention written out equals torch's fused kernel, forward and backward, in float64."""

from typing import Any

import pytest
import torch

from ampcompile.auditing.attention import attention, is_attention

aten = torch.ops.aten
FUSED = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": True}],
    ids=["plain", "causal", "scaled", "masked"],
)
def test_it_equals_the_fused_kernel(options: dict[str, Any]) -> None:
    options = dict(options)
    causal = options.pop("is_causal", False)
    query, key, value = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    if "attn_mask" in options:
        options["attn_mask"] = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    if causal:
        key, value = key[:, :, :5].contiguous(), value[:, :, :5].contiguous()
    fused = FUSED(query, key, value, 0.0, causal, **options)
    ours = attention(FUSED, (query, key, value, 0.0, causal), options, fused)
    assert ours is not None
    torch.testing.assert_close(ours[0], fused[0])
    assert ours[1] is fused[1]  # what only the fused backward reads

    grad = torch.randn_like(fused[0])
    arguments = (grad, query, key, value, *fused, 0.0, causal)
    expected = BACKWARD(*arguments, **options)
    found = attention(BACKWARD, arguments, options, expected)
    assert found is not None and len(found) == 3
    for ours_grad, fused_grad in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_grad, fused_grad)


def test_dropout_is_left_to_the_kernel() -> None:
    query = torch.randn(1, 1, 4, 8)
    assert attention(FUSED, (query, query, query, 0.5), {}, None) is None


def test_every_fused_kernel_of_torch_can_be_written_out() -> None:
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::_scaled_dot_product_")]
    packets = {n.removeprefix("aten::").partition(".")[0] for n in names} - {"_scaled_dot_product_attention_math"}
    for packet in packets - {"_scaled_dot_product_attention_math_for_mps"}:
        op = getattr(aten, packet).default
        arguments = {argument.name for argument in op._schema.arguments}
        assert is_attention(op) and {"query", "key", "value", "dropout_p", "is_causal", "scale"} <= arguments, op
        if "backward" in packet:
            assert arguments & {"grad_out", "grad_out_"}, op
