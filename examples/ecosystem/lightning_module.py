"""Lightning: compile the network inside the module, and give `MixedPrecision` our scaler.

python -m examples.ecosystem.lightning_module
"""

import logging
import warnings
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

import ampcompile
from examples.recipes import digits


class Digits(lightning.LightningModule):
    """A classifier of digits."""

    def __init__(self, options: dict[str, object] | None) -> None:
        super().__init__()
        self.net, self.losses = digits.classifier(), list[float]()
        if options is not None:
            self.net.compile(backend="amp", options=options)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        pictures, answers = batch
        loss = F.cross_entropy(self.net(pictures).float(), answers)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """What Lightning steps, through the scaler."""
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


def train(compiled: bool, lower: str = "inductor", steps: int = 12) -> tuple[Digits, torch.amp.GradScaler]:
    """The module after some steps in float16, and its scaler."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    batches: Any = [digits.batch(random) for _ in range(steps)]
    scaler = (ampcompile.GradScaler if compiled else torch.amp.GradScaler)("cpu", init_scale=2.0**20, growth_interval=4)
    module = Digits({"dtype": torch.float16, "lower": lower} if compiled else None)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on few workers, on GPUs that are not used, and the like
        lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            logger=False,
            gradient_clip_val=1.0,
        ).fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return module, scaler


if __name__ == "__main__":
    for compiled in (False, True):
        module, scaler = train(compiled)
        name = "amp" if compiled else "eager autocast"
        print(f"{name:14}  loss after 12 steps {module.losses[-1]:.4f}, scale {scaler.get_scale():g}")
