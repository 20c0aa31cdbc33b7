"""Inductor and AOTAutograd take our joint-graph pass, decompositions, settings and lowerings."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.cpp_extension
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.runtime import compile_tasks
from torch._subclasses import FakeTensorMode

from ampcompile.torch_private import lowering
from ampcompile.torch_private.dispatcher import TORCH
from tests.models import Net


def test_roundings_on_a_gpu_make_inductor_write_no_more_values_to_memory() -> None:
    assert lowering.config_for_rounding(True, [torch.ones(2), 3]) == {"emulate_precision_casts": True}
    with FakeTensorMode():
        inputs = [torch.empty(2, device="cuda")]
    config = lowering.config_for_rounding(True, inputs)
    assert config == {"emulate_precision_casts": True, "realize_opcount_threshold": 40}
    assert config.keys() <= torch._inductor.config.get_config_copy().keys()
    assert lowering.config_for_rounding(False, inputs) == {"emulate_precision_casts": False}


@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 never warns of it")
@pytest.mark.parametrize("toolkit", [None, "/nowhere"])
def test_a_missing_toolkit_is_no_news_to_our_users(toolkit: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor warns of it where it is told to round; kernels of our graphs always are."""
    knobs = pytest.importorskip("triton").knobs.nvidia
    monkeypatch.setattr(knobs, "libdevice_path", None)
    monkeypatch.delenv("TRITON_LIBDEVICE_PATH", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", toolkit)
    compile_kernel = lowering._without_advice(compile_tasks._set_triton_libdevice_path)
    with config.patch(emulate_precision_casts=True):
        with pytest.warns(UserWarning, match="bundled"):
            compile_kernel()  # by another backend
        with config.patch(joint_custom_pre_pass=lowering._JointGraphPass(len, "")):
            compile_kernel()  # warnings are errors
    assert knobs.libdevice_path is None


def upsampled(m: Any, x: Tensor, beside: Tensor) -> Tensor:
    """What the end of a UNet is: an upsampled image beside another one, read by two convolutions."""
    both = lambda: torch.cat([F.interpolate(m.below(x), scale_factor=2.0), beside], 1)
    return m.skip(both()) + m.out(m.norm(both()))


@pytest.mark.ci
def test_a_gradient_that_is_summed_in_place_is_read_after_that() -> None:
    """Stock Inductor reads zeros there, up to torch 2.13."""
    below, skip, out = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(24, 8, 1), nn.Conv2d(24, 8, 3, padding=1)
    module = Net(upsampled, below=below, skip=skip, out=out, norm=nn.GroupNorm(8, 24))
    x, beside = torch.randn(2, 16, 8, 8, requires_grad=True), torch.randn(2, 8, 16, 16)
    (expected,) = torch.autograd.grad(module(x, beside).square().sum(), x)
    run = torch.compile(module, backend="amp")
    (found,) = torch.autograd.grad(run(x, beside).float().square().sum(), x)
    assert (found - expected).norm() < 0.05 * expected.norm()
