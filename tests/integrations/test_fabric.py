"""Fabric compiles again, with our options, what it is given compiled; its checkpoints keep their names."""

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed")

from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision

from examples.ecosystem.fabric_loop import train
from tests.integrations.compare import (
    LOWER,
    QUIET,
    compare,
    compare_scalers,
    compare_with_checkpoints,
    same_keys,
    weights,
)

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
    def run(scaler):
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        return train(way, plugins=[plugin], **LOWER if way == "amp" else {})[2]

    compare_scalers(run, caplog)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_checkpoints_around_a_compiled_block_in_the_context_of_fabric(precision):
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    compare_with_checkpoints(fabric.autocast, fabric.backward)
