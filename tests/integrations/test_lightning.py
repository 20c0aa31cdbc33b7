"""The network inside a LightningModule, compiled in place: copies follow steps that Lightning takes by closures."""

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed")

from examples.ecosystem.lightning_module import train
from tests.integrations.compare import LOWER, QUIET, compare, compare_scalers, same_keys

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
    options = LOWER if way == "amp" else {}
    compare_scalers(lambda scaler: train(way, scaler=scaler, **options)[1].losses[-1], caplog)
