# %% [markdown]
# # Tutorial: fp8
#
# A small GPT learns to write Python. An audit chooses which of its layers may be fp8, and the loss is watched beside
# bfloat16. All of it runs on a CPU, by `products="torch"`, which computes in fp8 slowly, to see its numbers. At the end
# stands what a GPU gained.

# %%
import json
import sysconfig
from pathlib import Path
from statistics import mean, median

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import ampcompile

STEPS = 20


# %%
class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 64, depth: int = 2, context: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads=4) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), targets.flatten())


modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-m]*.py"))
text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in modules)), dtype=torch.uint8)
random = torch.Generator().manual_seed(0)


def batch(size: int = 4, length: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - length, (size, 1), generator=random)
    passages = text[starts + torch.arange(length + 1)].long()
    return passages[:, :-1], passages[:, 1:]


# %% [markdown]
# ## Which layers may be fp8
# `audit` runs one step beside float64. `suggest` then quantizes as many modules as the tolerance admits, and measures again.
# A tenth is a usual tolerance: fp8 has about ten times bfloat16's error.

# %%
torch.manual_seed(0)
audit = ampcompile.audit(GPT(), dtype=torch.bfloat16, products="torch")(*batch())
policy = audit.suggest(0.1, allow="fp8", trials=2)
print(f"error in bfloat16: {audit.error:.1e}")
print("policy:", policy)
assert "fp8" in str(policy) and "head" not in str(policy)

# %% [markdown]
# The head isn't named: what is rounded there reaches the loss at once. Embeddings and norms multiply no matrices.
# In a large model you may just write `module blocks.*=fp8`, and let the audit of one step confirm it:

# %%
quantized = ampcompile.audit(GPT(), dtype=torch.bfloat16, policy="module blocks.*=fp8", products="torch")(*batch())
print(f"error of all blocks in fp8: {quantized.error:.1e}")
assert audit.error < quantized.error < 0.3

# %% [markdown]
# ## The loss beside bfloat16
# `lower="aot_eager"` leaves out code generation, which this short run on a CPU wouldn't repay. On a GPU leave out both
# `lower` and `products`.


# %%
def train(**options: object) -> list[float]:
    torch.manual_seed(0)
    random.manual_seed(1)
    model = GPT()
    compiled = torch.compile(
        model, backend="amp", options={"dtype": torch.bfloat16, "products": "torch", "lower": "aot_eager", **options}
    )
    optimizer = ampcompile.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = compiled(*batch())
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


losses = {"bfloat16": train(), "fp8": train(policy="module blocks.*=fp8")}
for name, found in losses.items():
    print(f"{name:8} mean of the last ten losses {mean(found[-10:]):.3f}")
assert abs(mean(losses["fp8"][-10:]) - mean(losses["bfloat16"][-10:])) < 0.1

# %%
figure, axes = plt.subplots(figsize=(7, 3))
for (name, found), style in zip(losses.items(), ("-", "--"), strict=True):
    axes.plot(found, style, label=name)
axes.set(xlabel="step", ylabel="loss")
axes.legend()
figure.tight_layout()

# %% [markdown]
# The curves lie on one another. Keep such a plot of your own model's first thousand steps before you trust a long run.
#
# ## What a GPU gains
# The repository keeps what was measured: a step of a Llama-like model of width 4096, on an H200, by
# `benchmarks/results/gpu-h200-fp8.json`.

# %%
results = json.loads(Path("benchmarks/results/gpu-h200-fp8.json").read_text())
step = results["stages"]["Llama d4096, 4x2048: clipped step"]
milliseconds = {peer: 1e3 * median(figures["seconds"]) for peer, figures in step.items()}
figure, axes = plt.subplots(figsize=(7, 2.4))
bars = axes.barh(list(milliseconds), list(milliseconds.values()))
axes.bar_label(bars, fmt="%.1f ms", padding=3)
axes.set(xlabel=f"a training step on one {results['about']['gpu']}", xlim=(0, 62))
axes.invert_yaxis()
figure.tight_layout()
assert min(milliseconds, key=milliseconds.get) == "amp, fp8"

# %% [markdown]
# ## What to change
# - A few rows much larger than the others? `fp8_rowwise` gives each row its own scale.
# - Which GPUs, which widths, how much memory: [fp8](../fp8.md).
# - In Trainer: `AmpPlugin(options={"policy": "module *.layers.*=fp8"})`, see [integrations](../integrations.md).
