"""A teacher whose weights are a moving average of the student's: written in place, outside of any optimizer."""

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.recipes import digits
from examples.recipes.recipe import Recipe, compare, copied


class MeanTeacher(Recipe):
    """An EMA teacher."""

    def build(self) -> None:
        self.student = digits.classifier()
        self.teacher = copied(self.student).requires_grad_(False)
        self.modules = [self.student, self.teacher]
        self.learn, self.teach = self.way(self.student), self.way(self.teacher)
        self.optimizer = torch.optim.SGD(self.student.parameters(), lr=0.1, momentum=0.9)
        self.scaler = self.way.scaler()

    def step(self) -> Tensor:
        pictures, answers = digits.batch(self.random)
        with torch.no_grad():
            target = self.teach(pictures).float().softmax(-1)
        self.optimizer.zero_grad()
        outputs = self.learn(pictures).float()
        loss = F.cross_entropy(outputs, answers) + F.cross_entropy(outputs, target)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with torch.no_grad():
            for average, weight in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                average.lerp_(weight, 0.2)
        return loss


if __name__ == "__main__":
    compare(MeanTeacher)
