"""Lightning: compile the network inside the module in place, and give it our optimizer.

python -m examples.ecosystem.lightning_module
"""

import logging
import warnings
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

import ampcompile
from examples.recipes import digits


class Net(nn.Module):
    """A class of its own: torch compiles nothing of `nn.Sequential(...).compile()`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = digits.classifier()

    def forward(self, pictures: Tensor) -> Tensor:
        """Scores, (pictures, 10)."""
        return self.layers(pictures)


class Digits(lightning.LightningModule):
    """A classifier of digits."""

    def __init__(self, optim: Any) -> None:
        super().__init__()
        self.net, self.optim, self.losses = Net(), optim, list[float]()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        pictures, answers = batch
        loss = F.cross_entropy(self.net(pictures), answers)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """What Lightning steps, through the scaler if there is one."""
        return self.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


def train(
    way: str, steps: int = 12, precision: Any = "bf16-mixed", scaler: torch.amp.GradScaler | None = None, **options: Any
) -> tuple[lightning.Trainer, Digits]:
    """The trainer and the module after some steps; with a scaler in float16, else in `precision`."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    batches: Any = [digits.batch(random) for _ in range(2 * steps)]
    module = Digits(ampcompile.optim if way == "amp" else torch.optim)
    if way == "amp":
        module.net.compile(backend="amp", options=options)
    how: dict[str, Any] = {"precision": None if way == "float32" else precision}
    if scaler is not None:
        how = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on few workers, on GPUs that are not used, and the like
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            logger=False,
            **how,
        )
        trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return trainer, module


if __name__ == "__main__":
    for way, scaler in (("autocast", torch.amp.GradScaler), ("amp", ampcompile.GradScaler)):
        scale = scaler("cpu", init_scale=2.0**20, growth_interval=4)
        module = train(way, scaler=scale)[1]
        print(f"{way:8}  loss after 12 steps {module.losses[-1]:.4f}, scale {scale.get_scale():g}")
