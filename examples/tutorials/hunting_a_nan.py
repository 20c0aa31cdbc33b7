# %% [markdown]
# # Tutorial: hunting a NaN
#
# A model trains in float16, and its loss becomes NaN. Three tools say where, why, and what to do. `watch` names the first
# number out of range in the run itself. `audit` compares one step with float64, and its `suggest` writes the policy that
# mends it.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import ampcompile

# %% [markdown]
# ## The model
# It compares textures: `Gram` multiplies features with themselves. Such sums grow with the square of the features, and
# float16 ends at 65504.


# %%
class Gram(nn.Module):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features @ features.mT / features.shape[-1]


class Texture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.gram = nn.Linear(32, 256), Gram()
        self.head = nn.Linear(24 * 24, 4)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.head(self.gram(F.relu(self.lift(patches))).flatten(1) / 100)


def batches(count: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Patches of images; from the ninth batch on some images are bright."""
    random = torch.Generator().manual_seed(0)
    found = []
    for index in range(count):
        patches = torch.randn(16, 24, 32, generator=random) * (10.0 if index < 8 else 40.0)
        found.append((patches, torch.randint(4, (16,), generator=random)))
    return found


# %% [markdown]
# ## The run that fails
# A usual loop in float16. Only `"watch": True` is new: graphs then remember magnitudes, and results keep their bits.


# %%
def train(**options: object) -> tuple[list[float], list[bool], nn.Module, object]:
    torch.manual_seed(0)
    model = Texture()
    compiled = torch.compile(model, backend="amp", options={"dtype": torch.float16, **options})
    optimizer = ampcompile.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = ampcompile.GradScaler("cpu", init_scale=256.0)  # the default, 65536, is too large here: it skips first
    watch = ampcompile.watch(compiled) if options.get("watch") else None
    losses, skipped = [], []
    for patches, labels in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(compiled(patches), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        skipped.append(bool(scaler.last_step_skipped))
    return losses, skipped, model, watch.report() if watch else None


losses, skipped, model, report = train(watch=True)
print([round(loss, 2) for loss in losses])
print(f"{sum(skipped)} of {len(skipped)} steps were skipped")
assert any(loss != loss for loss in losses) and not any(skipped[:8]) and all(skipped[8:])

# %% [markdown]
# The scaler does its work: it skips each step whose gradients aren't finite, and lowers the scale. A smaller scale can't
# help here, since the forward pass itself overflows.
#
# ## Where it began
# The report names the first call out of range, the module and the line. In backward a scale that is too large puts
# numbers out of range as well, so ask for those of forward. (On a CPU without units for float16 the op is named as
# `prims.convert_element_type`: what rounds the product's result.)

# %%
first = report.first_in_forward
print(first)
assert first.at.call == 9 and first.at.value.module == "gram"

# %% [markdown]
# ## Why
# Give `audit` the model and a batch that failed: skipped steps have left its weights as they were then. It names what
# isn't finite, and the first op that made it so where float32 would have kept a number.

# %%
patches, labels = batches()[-1]
audit = ampcompile.audit(model, dtype=torch.float16, loss=lambda logits: F.cross_entropy(logits, labels))(patches)
print("first overflow:", audit.first_overflow)
for name, numbers in audit.modules.items():
    print(f"{name:6} overflowed {numbers.overflowed:6.1%}  largest {numbers.largest:.1e}")
assert audit.first_overflow.module == "gram"

# %% [markdown]
# `overflowed` is not zero for `gram` alone: the model and its inputs are fine, float16 is too narrow for this product. If
# float64 were infinite too, the fault would be the model's. (`largest` is of finite numbers; the row without a name is
# code outside of submodules.)
#
# ## The policy
# `suggest` finds the modules to keep in float32 for a tolerance, and measures each choice. To keep a single op, name it
# as your code does, in its module: `op matmul@gram=fp32`.

# %%
policy = audit.suggest(1e-2)
print(policy)
print("error with it:", f"{ampcompile.audit(model, dtype=torch.float16, policy=policy)(patches).error:.1e}")
assert "gram=fp32" in str(policy)

# %% [markdown]
# ## Fixed
# The same loop with the policy:

# %%
fixed, skipped, *_ = train(policy=policy)
print([round(loss, 2) for loss in fixed])
assert not any(skipped) and all(loss == loss for loss in fixed)

figure, axes = plt.subplots(figsize=(7, 3))
axes.plot(losses, "x-", label="float16")
axes.plot(fixed, ".--", label=f"float16, {policy}")
axes.axvline(8, color="grey", linewidth=0.5)
axes.set(xlabel="step", ylabel="loss")
axes.legend()
figure.tight_layout()

# %% [markdown]
# ## What to change
# - On a GPU from Ampere on, `"dtype": torch.bfloat16` has float32's range, and ends overflows of this kind.
# - In code of your own, `ampcompile.keep_fp32(model.gram)` says the same as the policy.
# - Begin again with a new scaler: the old one's scale has collapsed, and grows slowly.
# - Gradients that vanish rather than overflow: give the audit your scale, `loss_scale=2.0**16` ([audit](../audit.md)).
