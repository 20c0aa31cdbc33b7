"""What a cast and a step cost is seen in a profile by its name."""

import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.profiler import profile

import ampcompile


def regions(run: profile) -> dict[str, int]:
    """Our regions by name, with how often each was there."""
    return {event.key: event.count for event in run.key_averages() if event.key.startswith("amp: ")}


def test_a_training_step_shows_its_parts() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    run = torch.compile(model, backend="amp", options={"lower": "aot_eager", "dtype": torch.float16})
    optimizer, scaler = torch.optim.AdamW(model.parameters()), ampcompile.GradScaler("cpu")

    def step() -> None:
        scaler.scale(run(x).sum()).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    with profile() as first:
        step()
    assert {"amp: refresh copies of weights", "amp: GradScaler.step", "amp: GradScaler.update"} <= regions(first).keys()
    assert {"amp: check_grads", "amp: update_scale_", "amp: GradScaler.clip_grad_norm_"} <= regions(first).keys()


def test_casts_are_named_in_inductors_code() -> None:
    model, x = nn.Linear(8, 8), torch.randn(3, 8)

    def infer() -> Tensor:
        with torch.no_grad():
            return torch.compile(model, backend="amp", options={"weights": "every_call"})(x)

    with config.patch(fx_graph_cache=False):
        _, code = run_and_get_code(infer)
    assert any("Source Nodes" in line and "amp_cast_bf16" in line for each in code for line in each.splitlines())
