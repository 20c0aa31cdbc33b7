"""Adam's step counts are where torch keeps them whenever somebody reads them."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from ampcompile.optim import adopt
from ampcompile.optim.plan import move_step_counts_to_cpu, new_step
from ampcompile.torch_private import optimizers
from tests.scaler.cases import scaled


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"capturable": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("read", ["step", "state_dict", "move_step_counts_to_cpu"])
def test_counts_on_a_gpu_return_before_anyone_looks(options, read):
    """As fake tensors."""
    with FakeTensorMode():
        params = [nn.Parameter(torch.ones(3, device="cuda")) for _ in range(3)]
        optimizer = torch.optim.Adam(params, **options)
        torchs_step, step = optimizer.step, adopt(optimizer)
        group = optimizer.param_groups[0]
        home = "cuda" if "capturable" in options or "fused" in options else "cpu"
        for param in params[:2]:
            optimizer.state[param] = {"step": new_step(param, group), "exp_avg": param, "exp_avg_sq": param}
            assert optimizer.state[param]["step"].device.type == home
            optimizer.state[param]["step"] = torch.ones((), device="cuda")
        assert list(optimizers.named_pre_hooks(optimizer).values()) == [step]
        if read == "step":
            torchs_step()
        else:
            move_step_counts_to_cpu(optimizer) if read == "move_step_counts_to_cpu" else optimizer.state_dict()
        counts = [optimizer.state[param]["step"] for param in params[:2]]
        assert [(c.device.type, c.dtype, c.shape) for c in counts] == [(home, torch.float32, ())] * 2
        assert counts[0].untyped_storage()._cdata != counts[1].untyped_storage()._cdata
        assert params[2] not in optimizer.state


@pytest.mark.gpu
def test_counts_are_torchs_after_fused_steps_on_a_gpu():
    counts = []
    for ours in (True, False):
        param = nn.Parameter(torch.ones(3, device="cuda"))
        optimizer, scaler = torch.optim.AdamW([param]), scaled(device="cuda", init_scale=1.0)
        for grad in (1.0, math.inf, 2.0, 3.0):
            param.grad = torch.full_like(param, grad)
            if ours and grad != 3.0:
                scaler.step(optimizer)
                scaler.update(1.0)
            elif grad != math.inf:
                optimizer.step()
            step = optimizer.state_dict()["state"][0]["step"]
            assert step.is_cpu
            counts.append(step.item())
    assert counts == [1, 1, 2, 3] * 2
