"""A run that is saved, and goes on in new objects, ends with the bits of one that never stopped: masters, states, fp8.

The frameworks save and load by their own functions; the data is the same, batch by batch.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampcompile
from ampcompile.weights.store import store
from tests.compiling import same_bits
from tests.integrations.compare import LOWER, QUIET, fused_steps

pytestmark = QUIET
FP8 = LOWER | {"policy": "op linear=fp8", "products": "torch"}
CASES = {  # how parameters are kept, and the options
    "float32 masters": ({"masters": "float32"}, LOWER),
    "remainders and states in 8 bits": ({"masters": "remainder8", "states": "8bit"}, LOWER),
    "stochastic, states by name": ({"masters": "stochastic", "states": {"*layers.0.*": "bfloat16"}, "seed": 3}, LOWER),
    "fp8": ({}, FP8),
    "masters and fp8": ({"masters": "remainder"}, FP8),
}
STEPS = 3  # of an epoch


class Net(nn.Module):
    """Returns a loss, as Trainer expects, in a class of its own: torch compiles no `nn.Sequential` in place."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.to(torch.bfloat16 if "masters" in how else torch.float32)

    def forward(self, x, labels):
        y = self.layers(x.to(self.layers[0].weight.dtype))
        return {"loss": F.cross_entropy(y.float(), labels), "logits": y}


def data():
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(16 * STEPS, 32, generator=random), torch.randint(16, (16 * STEPS,), generator=random)
    return [{"x": x, "labels": label} for x, label in zip(*rows, strict=True)]


def batches():
    return torch.utils.data.DataLoader(data(), batch_size=16)


def adam(model, how):
    return ampcompile.optim.AdamW(model.parameters(), names=model, lr=1e-2, **how)


def end_of(model, optimizer):
    """Weights, the optimizer's state as saved, masters among it, and the bytes of what it holds."""
    saved, held = optimizer.state_dict()["state"], optimizer.state
    assert any("exp_avg_codes" in slots for slots in held.values()) == ("states" in optimizer.defaults)
    state = [value for slots in saved.values() for value in slots.values() if torch.is_tensor(value)]
    sizes = [v.nbytes for p in model.parameters() for _, v in sorted(held[p].items()) if torch.is_tensor(v)]
    return copy.deepcopy([*model.state_dict().values(), *state, torch.tensor(sizes)])


def epochs(resumed, save, load):
    """The batches of two epochs, with the run saved between them; or of the second, with the saved run loaded."""
    if resumed:
        load()
    else:
        yield from batches()
        save()
    yield from batches()


def with_accelerate(how, options, folder, resumed):
    accelerate = pytest.importorskip("accelerate")
    from ampcompile.integrations.accelerate import AmpPlugin

    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", dynamo_plugin=AmpPlugin(options=options))
    model = Net(how)
    compiled, optimizer = accelerator.prepare(model, adam(model, how))
    for batch in epochs(resumed, partial(accelerator.save_state, folder), partial(accelerator.load_state, folder)):
        accelerator.backward(compiled(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    return end_of(model, optimizer.optimizer)


def with_fabric(how, options, folder, resumed):
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cpu", precision=None)
    model = Net(how)
    compiled, optimizer = fabric.setup(torch.compile(model, backend="amp", options=options), adam(model, how))
    saved = folder / "c", {"model": compiled, "optimizer": optimizer}
    for batch in epochs(resumed, partial(fabric.save, *saved), partial(fabric.load, *saved)):
        fabric.backward(compiled(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    return end_of(model, optimizer.optimizer)


def with_lightning(how, options, folder, resumed):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net(how)
            self.net.compile(backend="amp", options=options)

        def training_step(self, batch, index):
            return self.net(**batch)["loss"]

        def on_train_epoch_end(self):
            if self.current_epoch == 0:
                self.trainer.save_checkpoint(folder / "c")

        def configure_optimizers(self):
            return adam(self, how)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", precision="bf16-mixed", logger=False, **quiet)
    module, checkpoint = Module(), {"ckpt_path": folder / "c", "weights_only": False} if resumed else {}
    trainer.fit(module, batches(), **checkpoint)
    return end_of(module, trainer.optimizers[0])


def with_trainer(how, options, folder, resumed):
    accelerate, transformers = pytest.importorskip("accelerate"), pytest.importorskip("transformers")
    from ampcompile.integrations.accelerate import AmpPlugin

    accelerate.state.AcceleratorState._reset_state(True)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=16,
        save_strategy="no" if resumed else "epoch",
        logging_strategy="no",
        bf16=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    optimizer = ampcompile.optim.AdamW, {"lr": 1e-2, "names": (model := Net(how)), **how}
    trainer = transformers.Trainer(model, arguments, train_dataset=data(), optimizer_cls_and_kwargs=optimizer)
    trainer.accelerator.state.dynamo_plugin = AmpPlugin(options=options)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS}" if resumed else None)
    return end_of(trainer.model, trainer.optimizer.optimizer)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("train", [with_accelerate, with_fabric, with_lightning, with_trainer])
def test_a_run_goes_on_as_one_that_never_stopped(train, case, tmp_path):
    how, options = CASES[case]
    straight = train(how, options, tmp_path, resumed=False)
    with fused_steps() as casts:
        again = train(how, options, tmp_path, resumed=True)
    assert len(casts) == STEPS and same_bits(again, straight)
    assert any(copy.form.quantized for copy in store.by_handle.values()) == ("fp8" in case)
