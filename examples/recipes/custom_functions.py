"""Autograd functions of one's own: one that takes several tensors, one that insists on float32."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd

from examples.recipes import digits
from examples.recipes.recipe import Recipe, compare


class Bilinear(torch.autograd.Function):
    """x @ weight.t() + bias, with its backward written out; runs in the dtype that autocast gives it."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.mm(weight.t()) + bias

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad.mm(weight.to(grad.dtype)), grad.t().mm(x.to(grad.dtype)), grad.sum(0)


class Softplus(torch.autograd.Function):
    """log(1 + exp(x)), which float16 can't hold: computed in float32 whatever comes in."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        ctx.save_for_backward(x)
        return torch.log1p(x.exp())

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(x)


class Layer(nn.Linear):
    """A linear layer by `Bilinear`, then `Softplus`."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        return Softplus.apply(Bilinear.apply(x, self.weight, self.bias))


class CustomFunctions(Recipe):
    """Custom autograd functions."""

    def build(self) -> None:
        model = digits.classifier(Layer(64, 64))
        self.modules = [model]
        self.loss = self.way(lambda x, y: F.cross_entropy(model(x), y))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.scaler = self.way.scaler(init_scale=2.0**12)

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(*digits.batch(self.random))
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss


if __name__ == "__main__":
    compare(CustomFunctions)
