"""Fabric compiles again, with our options, what it is given compiled; its checkpoints keep their names."""

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed")

from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision

import ampcompile
from examples.ecosystem.fabric_loop import train
from tests.integrations.compare import LOWER, QUIET, compare, compare_with_checkpoints, same_keys, weights

pytestmark = QUIET


@pytest.mark.parametrize("precision", ["bf16-mixed", None])
def test_a_loop(precision, tmp_path):
    kept = {}

    def run(way):
        ours = way == "amp"
        fabric, model, loss = train(way, precision=precision if ours else "bf16-mixed", **LOWER if ours else {})
        kept.update(fabric=fabric, model=model)
        return model, loss

    compare(run)
    fabric, model = kept.values()
    fabric.save(tmp_path / "c", {"model": model})
    saved = torch.load(tmp_path / "c")["model"]
    same_keys(saved, model)
    x = torch.randn(8, 64)
    with torch.no_grad():
        before = model(x)
        for p in weights(model):
            p.zero_()
        assert not model(x).any()
        fabric.load(tmp_path / "c", {"model": model})
        assert torch.equal(model(x), before)


@pytest.mark.parametrize("way", ["autocast", "amp"])
def test_a_scaler_of_ours_takes_fabrics_place(way, caplog):
    caplog.set_level("INFO", logger="ampcompile")
    ends = []
    for kind in (torch.amp.GradScaler, ampcompile.GradScaler):
        scaler = kind("cpu", init_scale=2.0**20, growth_interval=4)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        _, _, loss = train(way, plugins=[plugin], **LOWER if way == "amp" else {})
        ends.append((scaler.get_scale(), loss))
    assert ends[0] == pytest.approx(ends[1]) and ends[0][0] < 2.0**20
    assert "generic path" not in caplog.text, "steps are fused"


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_checkpoints_around_a_compiled_block_in_the_context_of_fabric(precision):
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    compare_with_checkpoints(fabric.autocast, fabric.backward)
