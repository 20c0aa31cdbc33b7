"""Whole models as a GPU runs them: some training steps on the made-up GPU, no further from float64 than a CPU's.

Losses and gradients of amp through Inductor, its kernels as PTX, with clipping and the scaler's step. In 16 bits they
are compared with eager autocast's on a CPU, in fp8 with those of the same recipe whose products are torch's.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.dtypes import FP8
from benchmarks.paper.cases import Case
from tests.compiling import error, gradients, keep_small_values_too

pytestmark = pytest.mark.emulated
STEPS, CALLS = 4, 128
LIMIT = 1.1
BF16, F16 = torch.bfloat16, torch.float16
MODELS = {
    "GPT": ("tiny GPT 124M", 2, 32),
    "BERT": ("tiny BERT", 2, 16),
    "ViT": ("tiny ViT", 8, 32),  # of each image one row reaches the loss
    "UNet": ("tiny UNet", 4, 16),
    "MoE": ("tiny MoE", 2, 16),
    "SwiGLU": ("tiny SwiGLU", 2, 32),
}
Run = Callable[..., Tensor]


class Trained:
    """What some training steps gave: each loss, and each gradient as it was before clipping."""

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], device: str, scaled: bool, compiled: Any = None
    ) -> None:
        model = copy.deepcopy(model).to(device)
        run: Run = compiled(model) if compiled else model
        # By default Adam moves a weight by all of the rate for the sign of a gradient that is next to nothing.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
        kind: Any = ampcompile.GradScaler if compiled else torch.amp.GradScaler
        scaler = kind(device, enabled=scaled, init_scale=2.0**10)
        # Before the first step, of many batches: a few losses may be near the exact ones by chance.
        self.losses = [run(*(x.to(device) for x in batch)).detach().double().cpu() for batch in batches]
        self.gradients: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
        for batch in batches[:STEPS]:
            loss = run(*(x.to(device) for x in batch))
            scaler.scale(loss).backward()
            self.losses.append(loss.detach().double().cpu())
            for name, parameter in model.named_parameters():
                self.gradients[name].append(parameter.grad.double().cpu() / scaler.get_scale())
            if compiled:
                scaler.clip_grad_norm_(optimizer, 1.0)
            else:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    def distances(self, exact: "Trained") -> dict[str, tuple[float, int]]:
        """From the exact numbers, over all steps: of all gradients together, of the losses, of each gradient.

        Beside each stands how many numbers it is of.
        """
        rows = {name: (self.gradients[name], exact.gradients[name]) for name in self.gradients}
        together = [*zip(*rows.values(), strict=True)]
        rows = {"all gradients": tuple([x for xs in side for x in xs] for side in together), **rows}
        rows = {"the loss": (self.losses, exact.losses), **rows}
        norms = lambda xs: torch.stack([x.norm() for x in xs]).norm()
        return {
            name: (
                float(norms([a - b for a, b in zip(*pair, strict=True)]) / norms(pair[1]).clamp_min(1e-30)),
                sum(x.numel() for x in pair[0]),
            )
            for name, pair in rows.items()
        }


def setting(name: str) -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    """A model and its batches."""
    model, inputs = Case(*MODELS[name], training=True).build()
    return model, [inputs, *(tuple(map(another, inputs)) for _ in range(CALLS - 1))]


def another(x: Tensor) -> Tensor:
    """An input like this one."""
    return torch.randn_like(x) if x.is_floating_point() else torch.randint_like(x, int(x.max()) + 1)


def doubled(batches: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
    return [tuple(x.double() if x.is_floating_point() else x for x in batch) for batch in batches]


def by_amp(**options: Any) -> Callable[[nn.Module], Run]:
    return lambda model: torch.compile(model, backend="amp", options=options)


def by_autocast(device: str, dtype: torch.dtype, how: Callable[[nn.Module], Run]) -> Callable[[nn.Module], Run]:
    """A model whose calls run under autocast."""

    def wrap(model: nn.Module) -> Run:
        run = how(model)

        def call(*inputs: Tensor) -> Tensor:
            with torch.autocast(device, dtype):
                return run(*inputs)

        return call

    return wrap


Distances = dict[str, tuple[float, int]]


def further(ours: Distances, theirs: Distances) -> list[str]:
    """What is further from the exact numbers than allowed.

    The distance of few numbers varies by chance, by a share of one over the root of their count, or less: where four
    times that is more than the limit leaves, it is left to single gradients and losses. To all together it never is.
    A gradient of which theirs is further than zero is noise, as a key's bias has: it counts among all together.
    """
    found = []
    for name, (distance, count) in ours.items():
        limit = LIMIT if name == "all gradients" else max(LIMIT, 1 + 4 * count**-0.5)
        peer = theirs[name][0]
        if not (peer > 1 or distance <= limit * peer):
            found.append(f"{name}: {distance:.3g}, {peer:.3g}")
    return found


def show(title: str, peers: dict[str, Distances]) -> None:
    print(title, *peers, sep=", ")
    first, *_ = peers.values()
    for name in first:
        print("  ", name, *(f"{peer[name][0]:.3g}" for peer in peers.values()))


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("name", MODELS)
def test_16_bits(name: str, dtype: torch.dtype) -> None:
    model, batches = setting(name)
    exact = Trained(model.double(), doubled(batches), "cpu", scaled=False)
    model, scaled = model.float(), dtype is F16
    autocast = by_autocast("cpu", dtype, lambda model: model)
    theirs = Trained(model, batches, "cpu", scaled, autocast).distances(exact)
    ours = Trained(model, batches, "cuda", scaled, by_amp(dtype=dtype)).distances(exact)
    shown = {"amp": ours, "CPU autocast": theirs}
    # The experts cast to bfloat16 themselves; stock autocast to float16 mixes no two 16-bit types in their backward.
    if name != "MoE" or dtype is not F16:
        torch._dynamo.reset()
        stock = by_autocast("cuda", dtype, torch.compile)
        shown["stock Inductor"] = Trained(model, batches, "cuda", scaled, stock).distances(exact)
    show(f"{name} {dtype}", shown)
    assert not further(ours, theirs)


@pytest.mark.parametrize("recipe", FP8)
def test_fp8(recipe: str) -> None:
    model, batches = setting("SwiGLU")
    exact = Trained(model.double(), doubled(batches), "cpu", scaled=False)
    model, options = model.float(), {"dtype": BF16, "policy": f"op linear={recipe}"}
    theirs = Trained(model, batches, "cpu", False, by_amp(**options, products="torch")).distances(exact)
    torch._dynamo.reset()
    ours = Trained(model, batches, "cuda", False, by_amp(**options)).distances(exact)
    show(recipe, {"amp": ours, "amp on a CPU": theirs})
    assert not further(ours, theirs)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")  # torch's CPU kernel of mse_loss
def test_kept_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are as near as on a CPU; what forward leaves allocated is what the list says, each value rounded up."""
    keep_small_values_too(monkeypatch)
    model, batch = Case("tiny UNet", 4, 64, training=True).build()
    exact = gradients(copy.deepcopy(model).double(), lambda twin: twin(*(x.double() for x in batch)))
    errors, left, peaks = [], [], []
    for device, options in (
        ("cpu", {"saved": "fp8", "lower": "aot_eager", "products": "torch"}),
        ("cuda", {}),
        ("cuda", {"saved": "fp8"}),
    ):
        torch._dynamo.reset()
        twin, inputs = copy.deepcopy(model).to(device), [x.to(device) for x in batch]
        says = ampcompile.explain(twin, dtype=BF16, **options)(*inputs).saved_totals.backward
        run = by_amp(dtype=BF16, **options)(twin)
        ours = gradients(twin, lambda _, run=run, inputs=inputs: run(*inputs))
        errors.append(error([gradient.cpu() for gradient in ours], exact))
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss = run(*inputs)
            left.append(torch.cuda.memory_allocated() - before)
            loss.backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
            del loss  # its node holds the model's weights
            assert says <= left[-1] <= 1.01 * says
    print(errors, left, peaks)
    assert errors[2] <= LIMIT * errors[0]
    assert left[1] <= 0.6 * left[0] and peaks[1] <= 0.8 * peaks[0]
