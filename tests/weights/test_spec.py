"""A copy has its weight's layout, and only what can be watched has one."""

import pytest
import torch
from torch import Tensor, nn

from ampcompile.kernels.packed_linear import LinearBlocks
from ampcompile.weights.spec import CopySpec, Form, hoistable

LAYOUTS = (
    torch.zeros(4, 6).t(),
    torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.zeros(3, 4, 5).permute(2, 0, 1),
    torch.zeros(()),
    torch.zeros(0, 4),
    torch.zeros(7)[1:],
    torch.zeros(7, dtype=torch.float16)[1:],
    torch.zeros(5, 3, dtype=torch.float64),
    nn.Parameter(torch.zeros(3)),
)


@pytest.mark.parametrize("wide", [False, True])
def test_a_copy_is_laid_out_as_its_weight_until_it_is_packed(wide: bool) -> None:
    form = Form(torch.bfloat16, wide)
    for weight in LAYOUTS:
        assert hoistable(weight)
        for copy in (form.empty_like(weight), CopySpec(0, form).empty_like(weight)):
            assert copy.dtype == (torch.float32 if wide else torch.bfloat16)
            assert (copy.shape, copy.stride(), copy.requires_grad) == (weight.shape, weight.stride(), False)
        packed = CopySpec(0, form, LinearBlocks()).empty_like(weight)
        assert packed.shape == weight.shape and packed.is_contiguous()


def test_what_is_not_hoistable() -> None:
    with torch.inference_mode():
        inference = torch.randn(3)
    for tensor in (
        torch.randn(1, 3).expand(4, 3),
        torch.randn(4, 6)[:, ::2],
        torch.eye(3).to_sparse(),
        torch.ones(3, dtype=torch.int64),
        torch.randn(3).as_subclass(type("Sub", (Tensor,), {})),
        torch.empty(3, device="meta"),
        inference,
        3.0,
        None,
    ):
        assert not hoistable(tensor)
    assert hoistable(nn.Parameter(torch.randn(3)))
