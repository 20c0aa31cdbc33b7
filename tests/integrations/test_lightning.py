"""The network inside a LightningModule, compiled in place: copies follow steps that Lightning takes by closures."""

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed")

import lightning

import ampcompile
from examples.ecosystem.lightning_module import Digits, train
from tests import pages
from tests.integrations.compare import LOWER, QUIET, compare, compare_scalers, fused_steps, same_keys, weights

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


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ampcompile.GradScaler])
def test_our_optimizer_takes_fused_steps_through_any_scaler(kind):
    scaler = kind("cpu", init_scale=2.0**20, growth_interval=4)
    with fused_steps() as casts:
        trainer, _ = train("amp", scaler=scaler, **LOWER)
    assert 0 < len(casts) <= trainer.global_step == 12 and scaler.get_scale() < 2.0**20


class Manual(Digits):
    """Manual optimization of two optimizers, each clipped by its own or by torch's method."""

    def __init__(self, optim):
        super().__init__(optim)
        self.automatic_optimization = False

    def configure_optimizers(self):
        params = list(self.net.parameters())
        return [self.optim.AdamW(params[:2], lr=1e-2), self.optim.SGD(params[2:], lr=0.1, momentum=0.9)]

    def training_step(self, batch, index):
        pictures, answers = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(torch.nn.functional.cross_entropy(self.net(pictures), answers))
        for optimizer in self.optimizers():
            if hasattr(optimizer, "clip_grad_norm_"):
                optimizer.clip_grad_norm_(0.1)
            else:
                torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.1)
            optimizer.step()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_manual_optimization_by_its_wrappers(precision):
    batches, trained = [(torch.randn(8, 64), torch.randint(10, (8,))) for _ in range(4)], []
    for optim in (ampcompile.optim, torch.optim):
        torch.manual_seed(0)
        module = Manual(optim)
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", precision=precision, logger=False, **quiet)
        with fused_steps() as casts:
            trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
        assert len(casts) == (8 if optim is ampcompile.optim else 0)
        trained.append(weights(module))
    for ours, theirs in zip(*trained, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_pages_captured_step_trains_as_it_does_without_a_graph():
    (code,) = (block.code for block in pages.blocks("docs/captured_steps.md") if "LightningModule" in block.code)
    batches, trained = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(8)], []
    for captures in (True, False):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 3)
        names = {"lightning": lightning, "ampcompile": ampcompile, "loss_fn": torch.nn.functional.cross_entropy}
        names["compiled_model"] = torch.compile(net, backend="amp", options=LOWER)
        exec(compile(code, "docs/captured_steps.md", "exec"), names)

        class Module(names["Module"]):
            def configure_optimizers(self):
                optimizer = ampcompile.optim.AdamW(self.net.parameters(), lr=0.1)
                return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)]

        module = Module()
        module.net = net
        if not captures:
            module.on_train_start, module.train_step = lambda: None, module.step
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, **quiet)
        trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
        trained.append((weights(module), repr(module.train_step)))
    (captured, said), (expected, _) = trained
    assert "1 of 1 forms captured" in said and all(map(torch.equal, captured, expected))
