# %% [markdown]
# # Tutorial: from float32 to amp
#
# A small vision transformer learns handwritten digits, first in float32, then with amp. The loop has what real loops have:
# a loader, clipping, an average of the weights, a checkpoint. You see which lines change, that the model learns as well,
# and where to look for what was gained.

# %%
import io
from statistics import median
from time import perf_counter

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import ampcompile

STEPS = 50

# %% [markdown]
# ## The model and the data
# Nothing in the model knows of precision.


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
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class ViT(nn.Module):
    def __init__(self, width: int = 128, depth: int = 2, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.randn(64, width) * 0.5)
        self.blocks = nn.Sequential(*[Block(width, heads=4) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


digits = load_digits()
images = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, scale_factor=4)
labels = torch.tensor(digits.target)
held_out = images[:128], labels[:128]


def loader() -> DataLoader:
    data = TensorDataset(images[128:], labels[128:])
    return DataLoader(data, batch_size=32, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0))


# %% [markdown]
# ## In float32
# The loop as you have it. Times leave out the first steps.


# %%
def train_in_float32(model: nn.Module) -> tuple[list[float], list[float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    losses, seconds = [], []
    for _, (x, y) in zip(range(STEPS), loader(), strict=False):
        start = perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
        losses.append(loss.item())
        seconds.append(perf_counter() - start)
    return losses, seconds[4:]


torch.manual_seed(0)
losses_float32, seconds_float32 = train_in_float32(ViT())
print(f"loss {losses_float32[0]:.3f} -> {losses_float32[-1]:.3f}")

# %% [markdown]
# ## With amp
# Three lines change: the model is compiled with `backend="amp"`, the optimizer is ours, and the optimizer clips. Parameters
# stay float32. So the average and the checkpoint stay as they are, and both are made of `model`, not of `compiled`.
#
# On a CPU, and on a GPU from Ampere on, take bfloat16: it needs no loss scaling.


# %%
def train_with_amp(model: nn.Module) -> tuple[list[float], list[float], bytes]:
    compiled = torch.compile(model, backend="amp", options={"dtype": torch.bfloat16})
    optimizer = ampcompile.optim.AdamW(model.parameters(), lr=1e-3)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    losses, seconds = [], []
    for _, (x, y) in zip(range(STEPS), loader(), strict=False):
        start = perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(compiled(x), y)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        average.update_parameters(model)
        losses.append(loss.item())
        seconds.append(perf_counter() - start)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "average": average.module.state_dict()}, file)
    return losses, seconds[4:], file.getvalue()


torch.manual_seed(0)
model = ViT()
losses_amp, seconds_amp, checkpoint = train_with_amp(model)
print(f"loss {losses_amp[0]:.3f} -> {losses_amp[-1]:.3f}")
assert abs(sum(losses_amp[-5:]) - sum(losses_float32[-5:])) < 1 and sum(losses_amp[-5:]) < sum(losses_amp[:5])

# %% [markdown]
# ## It learns as well
# Both began with the same weights and saw the same batches.

# %%
figure, axes = plt.subplots(figsize=(7, 3))
axes.plot(losses_float32, label="float32")
axes.plot(losses_amp, "--", label="amp, bfloat16")
axes.set(xlabel="step", ylabel="loss")
axes.legend()
figure.tight_layout()

# %% [markdown]
# ## The checkpoint is a float32 checkpoint
# Load it where you like: in a script without amp, or before compiling.

# %%
loaded = torch.load(io.BytesIO(checkpoint))
fresh = ViT()
fresh.load_state_dict(loaded["average"])
x, y = held_out
with torch.no_grad():
    loss = F.cross_entropy(fresh(x), y).item()
print(f"loss of the average, in float32, on digits it never saw: {loss:.2f}; at first it was {losses_amp[0]:.2f}")
print({weight.dtype for weight in loaded["model"].values()})
assert loss < losses_amp[0] and {weight.dtype for weight in loaded["model"].values()} == {torch.float32}

# %% [markdown]
# ## What it gains here
# The machine is named at the top of the page. These are a few steps of a small model, beside whatever else ran there.

# %%
print(f"a step in float32, eager: {1e3 * median(seconds_float32):.0f} ms")
print(f"a step with amp:          {1e3 * median(seconds_amp):.0f} ms")

# %% [markdown]
# Compilation comes first, and takes longer than these steps together. So look at [what was
# measured](../performance.md) with care, on larger models and other machines, and time your own:
# `python -m ampcompile bench mymodels:mlp`.
#
# ## Where to see it
# Weights were cast by the optimizer as it wrote them, not in each call:

# %%
stats = ampcompile.weight_stats()
print(f"{stats.copies} copies of weights, {stats.bytes / 1e6:.1f} MB")
print("\n".join(str(ampcompile.explain(model, dtype=torch.bfloat16)(x)).splitlines()[:12]))

# %% [markdown]
# ## What to change
# - On a T4 or V100 take `"dtype": torch.float16` and a scaler: [settings for your hardware](../hardware.md).
# - In Trainer, Accelerate or Lightning the lines are [others](../integrations.md).
# - If the loss becomes NaN in float16: [hunting a NaN](hunting_a_nan.md).
