"""Forward in worker threads, where nobody opened autocast: what `nn.DataParallel` does on several GPUs."""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.recipes import digits
from examples.recipes.recipe import Recipe, compare


class Threads(Recipe):
    """Forward in worker threads without autocast state of their own."""

    def build(self) -> None:
        self.model = digits.classifier()
        self.modules = [self.model]
        self.run = self.way(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = self.way.scaler(init_scale=2.0**10)
        self.workers = ThreadPoolExecutor(2)

    def step(self) -> Tensor:
        pictures, answers = digits.batch(self.random)
        self.optimizer.zero_grad()
        outputs = torch.cat(list(self.workers.map(self.run, pictures.chunk(2))))
        loss = F.cross_entropy(outputs.float(), answers)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss


if __name__ == "__main__":
    compare(Threads)
