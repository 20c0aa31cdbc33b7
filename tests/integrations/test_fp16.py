"""float16 on a GPU, where frameworks make a scaler of torch's: steps are fused, and skips are the scaler's."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="accelerate is not installed")

import accelerate

import ampcompile
from ampcompile.integrations.accelerate import AmpPlugin
from tests.integrations.compare import LOWER, QUIET, fused_steps

pytestmark = [QUIET, pytest.mark.gpu]
FP16 = {"use_cpu": False, "bf16": False, "fp16": True}


def check(train: Callable[[], tuple[int, torch.amp.GradScaler]]) -> None:
    """`train` returns how many steps there were to take, and the scaler: each step that it didn't skip is fused."""
    with fused_steps() as casts:
        steps, scaler = train()
    skipped = round(16 - torch.tensor(scaler.get_scale()).log2().item())  # halved by each
    assert len(casts) == steps - skipped > 2
    assert 0 < casts[1] == casts[-1] == ampcompile.weight_stats().casts, "no weight is cast after a step"


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("clips", [False, True])
def test_accelerate(fused: bool | None, clips: bool) -> None:
    """With `fused` its clipping is torch's, in place: `unscale_` is called first."""

    def train() -> tuple[int, torch.amp.GradScaler]:
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(mixed_precision="fp16", dynamo_plugin=AmpPlugin(options=LOWER))
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        optimizer = ampcompile.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        model, optimizer = accelerator.prepare(model, optimizer)
        told = []
        for step in range(6):
            factor = torch.inf if step == 3 else 1.0
            loss = model(torch.randn(8, 16, device=accelerator.device)).float().square().mean() * factor
            accelerator.backward(loss)
            if clips:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            told.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
        assert told == [step == 3 and not fused for step in range(6)]
        return 6 + bool(fused), accelerator.scaler  # with `fused` the kernel skips: it runs

    check(train)


@pytest.mark.parametrize(("package", "loop"), [("transformers", "transformers_trainer"), ("trl", "lora_sft")])
def test_trainer(package: str, loop: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    run = import_module(f"examples.ecosystem.{loop}").train
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # else it takes DataParallel

    def train() -> tuple[int, torch.amp.GradScaler]:
        trainer, loss = run("amp", str(tmp_path), steps=4, arguments=FP16, options=LOWER)
        assert torch.isfinite(torch.tensor(loss))
        return 4, trainer.accelerator.scaler

    check(train)
