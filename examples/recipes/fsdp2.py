"""FSDP2 with 16-bit gathers: torchrun --standalone --nproc-per-node 2 -m examples.recipes.fsdp2

The same training twice: with weights gathered in float32, and in 16 bits where every reader rounds them first. It
prints how each weight is gathered, and whether the weights are the same to the bit.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ampcompile
from examples.recipes import digits


class Block(nn.Module):
    """A norm and two layers, with what came in added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Features in, features out."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Head(nn.Module):
    """A norm and a layer."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Features in, logits out."""
        return self.layer(self.norm(x))


def train(device_type: str, in_16_bits: bool) -> tuple[list[Tensor], str]:
    """Return the weights after ten steps, and how they were gathered."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(64), Block(64), Head(64, 10)).to(device_type)
    for layer in model:
        layer.compile(backend="amp", options={"dtype": torch.bfloat16})
        fully_shard(layer)
    fully_shard(model)
    policy = ampcompile.shard_policy(model, torch.bfloat16 if in_16_bits else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(10):
        pictures, names = (tensor.to(device_type) for tensor in digits.batch(random))
        with torch.autocast(device_type, torch.bfloat16):
            loss = F.cross_entropy(model(pictures), names)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)], str(policy)


def main() -> None:
    """Train twice on every rank that torchrun started; the first one prints."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    if device_type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    (wide, _), (narrow, told) = (train(device_type, in_16_bits) for in_16_bits in (False, True))
    if dist.get_rank() == 0:
        print(told)
        print("the same weights" if all(map(torch.equal, wide, narrow)) else "other weights", "as with float32 gathers")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
