# %% [markdown]
# # Tutorial: where are my casts
#
# Mixed precision is a matter of casts: which op runs in which type, and what is converted on the way. `explain` shows each
# of them with its reason, a policy moves them, and `compare` says what that changed.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import ampcompile


# %%
class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = F.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1)
        return x + self.out(weights @ v)


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width) for _ in range(2)])
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


torch.manual_seed(0)
model, x = Net(), torch.randn(4, 16, 64)

# %% [markdown]
# ## Every cast, and why
# One call, and a report. Its beginning says what amp removes: casts of weights leave the calls, others join kernels.

# %%
report = ampcompile.explain(model, dtype=torch.bfloat16)(x)
print("\n".join(str(report).splitlines()[:40]))
assert report.casts and not report.unknown_ops

# %% [markdown]
# `report.save("amp.html")` writes all of it as one page, to click through; a notebook shows that page for `report`. This
# is what it looks like for a GPT:
#
# ![The page of casts: a block of a GPT, and the reason for one cast](../pictures/casts.png)
#
# ## As data
# Everything printed is there as plain records too. Which casts run in every call, and how many bytes do they move?

# %%
every_call = [cast for cast in report.casts if cast.runs]
for cast in every_call[:5]:
    print(f"{cast.module:14} {cast.op:22} {cast.dtype_from} -> {cast.dtype_to}", cast.because, sep="\n    ")
print(f"{len(report.casts)} casts, {len(every_call)} of them in every call")

# %%
names = sorted({cast.module for cast in report.casts})
bytes_of = {
    when: [sum(c.bytes for c in report.casts if c.module == name and bool(c.runs) == runs) / 1024 for name in names]
    for when, runs in (("in every call", True), ("once per update, or gone", False))
}
figure, axes = plt.subplots(figsize=(7, 3))
left = [0.0] * len(names)
for when, sizes in bytes_of.items():
    axes.barh(names, sizes, left=left, label=when)
    left = [a + b for a, b in zip(left, sizes, strict=True)]
axes.set(xlabel="KiB read and written by casts")
axes.legend()
figure.tight_layout()

# %% [markdown]
# ## A policy by op, and by module
# The rules are eager autocast's for the device. On a GPU softmax is on its float32 list; on a CPU it runs in the type that
# arrives. A policy can say otherwise, for all of them or for one module's:

# %%
policy = ampcompile.Policy(ops={"softmax@blocks.0": "fp32"}, modules={"head": "fp32"})
steered = ampcompile.explain(model, dtype=torch.bfloat16, policy=policy)(x)
for op in steered.ops:
    if op.op.endswith("softmax") or op.module == "head":
        print(f"{op.module:10} {op.op:12} {op.dtype}  {op.because}")
dtypes = {op.module: op.dtype for op in steered.ops if "softmax" in op.op}
assert dtypes["blocks.0"] == torch.float32
print("policy:", policy)

# %% [markdown]
# The same text works on the command line, as `--policy`, and as the option `policy` of `torch.compile`.
#
# ## What it changed
# `record` runs a call op by op beside float64; `compare` names the first op that differs beyond rounding.

# %%
before = ampcompile.record(model, dtype=torch.bfloat16)(x)
after = ampcompile.record(model, dtype=torch.bfloat16, policy=policy)(x)
comparison = ampcompile.compare(before, after)
print("\n".join(str(comparison).splitlines()[:16]))
assert not comparison.agree and comparison.first is not None

# %% [markdown]
# A recording can be saved as a file, so the two may come from two machines, or two versions of torch.
#
# ## What to change
# - The policy's words are listed in [options](../options.md#steering-policies-and-precision-blocks).
# - How large an error is, rather than where it begins: [audit](../audit.md).
