"""A server answers under inference_mode, then the same compiled model is fine-tuned, and answers again."""

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.recipes import digits
from examples.recipes.recipe import Recipe, compare


class WarmUp(Recipe):
    """Warm-up under inference_mode, then fine-tuning."""

    def build(self) -> None:
        self.model = digits.classifier()
        self.modules = [self.model]
        self.run = self.way(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = self.way.scaler()
        self.answers: list[float] = [self.answer()]

    @torch.inference_mode()
    def answer(self) -> float:
        """How sure the model is of what it sees, as it serves."""
        return float(self.run(digits.unseen()[0]).float().softmax(-1).amax(-1).mean())

    def step(self) -> Tensor:
        pictures, answers = digits.batch(self.random)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.run(pictures).float(), answers)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.answers.append(self.answer())
        return loss


if __name__ == "__main__":
    compare(WarmUp)
