"""The network inside a LightningModule, compiled in place: copies follow steps that Lightning takes by closures."""

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed")

import ampcompile
from examples.ecosystem.lightning_module import train
from tests.integrations.compare import LOWER, QUIET, compare, same_keys

pytestmark = QUIET


@pytest.mark.parametrize("precision", ["bf16-mixed", None])
def test_a_loop_with_accumulation(precision, tmp_path):
    kept = {}

    def run(way):
        ours = way == "amp"
        trainer, module = train(way, precision=precision if ours else "bf16-mixed", **LOWER if ours else {})
        kept.update(trainer=trainer)
        return module, module.losses[-1]

    module = compare(run)
    kept["trainer"].save_checkpoint(tmp_path / "c")
    same_keys(torch.load(tmp_path / "c", weights_only=False)["state_dict"], module)


@pytest.mark.parametrize("way", ["autocast", "amp"])
def test_a_scaler_of_ours_takes_lightnings_place(way, caplog):
    caplog.set_level("INFO", logger="ampcompile")
    ends = []
    for kind in (torch.amp.GradScaler, ampcompile.GradScaler):
        scaler = kind("cpu", init_scale=2.0**20, growth_interval=4)
        _, module = train(way, scaler=scaler, **LOWER if way == "amp" else {})
        ends.append((scaler.get_scale(), module.losses[-1]))
    assert ends[0] == pytest.approx(ends[1]) and ends[0][0] < 2.0**20
    assert "generic path" not in caplog.text, "steps are fused"
