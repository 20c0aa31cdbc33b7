"""Rules from outside, for a model that isn't touched: per op, per op pattern, per module path, per custom op.

python -m examples.steering.overrides
"""

import torch
from torch import Tensor, nn

import ampcompile
from ampcompile import Policy
from ampcompile.insight.report import Report


class Block(nn.Module):
    """A norm and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


POLICIES = {
    "as autocast has it": Policy(),
    "norms in float32 inside, low outside": Policy(ops=(("*norm*", "fp32_inside"),)),
    "the first block in float32": Policy(modules=(("0", "fp32"),)),
    "every `down`, by a pattern": Policy(modules=(("*.down", "fp32"),)),
    "float16 in the last block, but for its norm": Policy(modules=(("1", "fp16"), ("1.norm", "fp32"))),
}


def explained(policy: Policy) -> Report:
    """Two blocks under a policy."""
    return ampcompile.explain(nn.Sequential(Block(), Block()), policy=policy)(torch.randn(4, 8))


def main() -> None:
    """Prints a policy as text, and what runs in what."""
    for title, policy in POLICIES.items():
        print(f"{title}: policy={str(policy)!r}")
        for op in explained(policy).ops:
            if op.op in ("aten.linear", "aten.layer_norm"):
                print(f"  {op.module} {op.op} in {op.dtype}")


if __name__ == "__main__":
    main()
