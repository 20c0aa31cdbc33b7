"""Small models compiled side by side, in one graph, and the errors of each one's gradients."""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.compiling import Recorder, compiled, draws, eager, error, gradients


class All(nn.Module):
    """The results of models, by name."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.names, self.models = [*models], nn.ModuleList(models.values())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: model(x) for name, model in zip(self.names, self.models, strict=True)}


def errors(
    models: Mapping[str, nn.Module], batches: Sequence[int] = (4,) * 8, **options: Any
) -> tuple[dict[str, tuple[float, float]], Recorder]:
    """Errors against float64 of each model's gradients, of ours and of eager autocast's, summed over draws."""
    model, sums = All(models), dict.fromkeys(models, (0.0, 0.0))
    exactly = copy.deepcopy(model).double()
    run, recorder = compiled(model, fullgraph=True, **options)

    def by_model(module: All, f: Any, x: Tensor) -> dict[str, list[Tensor | None]]:
        gradients(module, lambda _: sum(each.float().square().mean() for each in f(x).values()))
        return {n: [p.grad for p in part.parameters()] for n, part in zip(models, module.models, strict=True)}

    for batch, _ in zip(batches, draws(model, exactly), strict=True):
        x = torch.randn(batch, 8)
        exact = by_model(exactly, exactly, x.double())
        ours, theirs = by_model(model, run, x), by_model(model, partial(eager, model), x)
        sums = {n: (a + error(ours[n], exact[n]), b + error(theirs[n], exact[n])) for n, (a, b) in sums.items()}
    return sums, recorder


def less_exact(sums: Mapping[str, tuple[float, float]]) -> list[str]:
    """The models whose gradients are less exact than eager autocast's, by more than a tenth; or exact by mistake."""
    return [name for name, (ours, theirs) in sums.items() if not 0 < ours <= 1.1 * theirs]
