"""Neither step nor update nor clip asks the device for a number."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompile.optim.keep_masters import keep_masters
from ampcompile.optim.plan import amp_aware
from ampcompile.scaler.grad_scaler import GradScaler
from tests import pages
from tests.scaler.cases import KINDS, assert_close, fill, iterate, params_with, scaled

ASKING = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "masked_select", "unique"}


class Questions(TorchDispatchMode):
    """Collects the ops that make the host wait for a value."""

    __module__ = "torch.utils.flop_counter"  # so it is one of those that only watch

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        device_to_host = name in ("_to_copy", "copy_") and str((kwargs or {}).get("device", "")) == "cpu"
        if name in ASKING or (device_to_host and args[0].device.type != "cpu"):
            self.asked.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def asking_nothing() -> Iterator[None]:
    with Questions() as questions:
        yield
    assert questions.asked == []


OPTIMIZERS = [
    *KINDS[:3],
    lambda params: torch.optim.SGD(params, torch.tensor(0.1), momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda params: torch.optim.Adam(
        params, torch.tensor(0.1), betas=(torch.tensor(0.9), torch.tensor(0.99)), amsgrad=True
    ),
    lambda params: torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:], "lr": 0.3}], maximize=True),
]


@pytest.mark.parametrize("how", ["step", "unscale_", "clip_grad_norm_", "clip_grad_value_", "disabled"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_iteration_asks_nothing(how, kind):
    params = [nn.Parameter(torch.randn(3, 4)) for _ in range(3)]
    optimizer, scaler = kind(params), GradScaler("cpu", enabled=how != "disabled")
    name = "clip_grad_norm_" if how == "disabled" else how
    for seed, bad in enumerate((math.inf, None, math.nan, None)):
        fill(params, seed, bad=bad)
        loss = params[0].sum()
        with asking_nothing():
            scaler.scale(loss)
            if how != "step":
                limits = [torch.tensor(1.0) if seed % 2 and "norm" in name else 1.0]
                getattr(scaler, name)(optimizer, *(limits if "clip" in name else []))
            scaler.step(optimizer)
            flags = scaler.last_step_skipped, scaler.step_skipped(optimizer)
            scaler.update()
        assert all(flag.item() == (how != "disabled" and bad is not None) for flag in flags)


@pytest.mark.parametrize("how", ["remainder", "float32", "stochastic"])
@pytest.mark.parametrize("scaler", [GradScaler, torch.amp.GradScaler, None])
def test_a_step_of_16_bit_parameters_asks_nothing(how, scaler):
    params = [nn.Parameter(torch.randn(3, 4).bfloat16()) for _ in range(3)]
    optimizer = torch.optim.AdamW(params)
    keep_masters(optimizer, how)
    for seed in range(2):
        fill(params, seed)
        scaling = scaled(scaler) if scaler else None
        with asking_nothing():
            scaling.step(optimizer) if scaling else optimizer.step()


@pytest.mark.parametrize("kind", KINDS[3:])
def test_the_generic_path_asks_once_unless_the_optimizer_skips_by_itself(kind):
    optimizer, scaler = kind(params_with(1.0)), scaled()
    with Questions() as questions:
        scaler.step(optimizer)
        scaler.update()
    assert len(questions.asked) == (not amp_aware(optimizer))


def test_looking_out_for_many_skips_asks_nothing():
    optimizer, scaler = torch.optim.SGD(params_with(1.0)), scaled()
    for i in range(120):
        with asking_nothing():
            iterate(scaler, optimizer, math.inf if i % 60 else 1.0)


def batches_of(bad, device="cpu"):
    """Batches of which some overflow."""
    generator = torch.Generator().manual_seed(0)
    for i in range(8):
        x = torch.randn(5, 4, generator=generator)
        yield (x * math.inf if i in bad else x).to(device), torch.randint(3, (5,), generator=generator).to(device)


def watched(batches, watch):
    """The batches, in a context that begins at the first and ends after the last."""
    batches = list(batches)
    with watch:
        yield from batches


def as_the_page_does(model, batches, scaler):
    """The names that the page's Python leaves behind."""
    (code,) = (block.code for block in pages.blocks("docs/scaler.md") if "AveragedModel" in block.code)
    names = {"model": model, "batches": batches, "loss_fn": nn.functional.cross_entropy, "scaler": scaler}
    exec(compile(code, "docs/scaler.md", "exec"), names)
    return names


def as_usual(model, batches, scaler):
    """The same schedule and average with torch's scaler, which the host asks in each iteration."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    averaged.update_parameters(model)
    for x, y in batches:
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if not scaler.get_scale() < before:
            schedule.step()
            averaged.update_parameters(model)
    return optimizer.param_groups[0]["lr"], averaged


@pytest.mark.parametrize("bad", [(), (0, 1), (3, 7)])
def test_the_pages_schedule_and_average_leave_out_skipped_steps_and_ask_nothing(bad):
    model = nn.Linear(4, 3)
    other = deepcopy(model)
    found = as_the_page_does(model, watched(batches_of(bad), asking_nothing()), scaler=GradScaler("cpu"))
    rate, averaged = as_usual(other, batches_of(bad), torch.amp.GradScaler("cpu"))
    assert found["steps_taken"] == 8 - len(bad)
    (group,) = found["optimizer"].param_groups
    assert group["lr"].item() == pytest.approx(rate, rel=1e-6) and rate < 1e-3
    assert_close(list(model.parameters()), list(other.parameters()))
    assert_close(list(found["averaged"].module.parameters()), list(averaged.module.parameters()))
    assert not torch.equal(found["averaged"].module.weight, model.weight)


def test_the_counter_counts():
    with Questions() as questions:
        torch.ones(()).item()
        torch.equal(torch.ones(2), torch.ones(2))
        bool(torch.ones(()) > 0)
    assert questions.asked == ["_local_scalar_dense", "equal", "_local_scalar_dense"]
