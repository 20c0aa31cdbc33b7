"""Compiled models on several streams and in the user's own CUDA graphs; on the CPU, the same lines with stand-ins."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from tests.compiling import LOW, error
from tests.devices import DEVICES, captured, delay, streams

WIDTH = 64


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def mlp(device: str) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH)).to(device)


def compiled(model: nn.Module, device: str) -> Callable[[Tensor], Tensor]:
    lower = {"lower": "aot_eager"} if device == "cpu" else {}
    return torch.compile(model, backend="amp", options={"dtype": LOW, **lower})


def write(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / 8)


def close_to_autocast(found: Tensor, model: nn.Module, x: Tensor) -> bool:
    """As close to float64 as eager autocast is; the old weights are far away."""
    with torch.no_grad(), torch.autocast(x.device.type, LOW):
        expected = model(x)
    exact = copy.deepcopy(model).double()(x.double())
    return error([found], [exact]) < 1.3 * error([expected], [exact])


@pytest.mark.parametrize("lower", ["inductor", "aot_eager"])
def test_two_models_on_three_streams_read_their_latest_weights(device: str, lower: str) -> None:
    """The copies of the first are cast on one stream, the second's on another, and each is read on the others."""
    api = streams(device)
    models, x = [mlp(device) for _ in range(2)], torch.randn(16, WIDTH, device=device)
    runs = [torch.compile(m, backend="amp", options={"dtype": LOW, "lower": lower}) for m in models]
    lanes = [api.Stream() for _ in range(3)]
    with torch.no_grad():
        for run in runs:
            run(x)
        for turn in range(12):
            for model in models:
                write(model)
            found = []
            for lane in lanes:
                lane.wait_stream(api.current_stream())
            for shift in range(3):
                for i, run in enumerate(runs):
                    with api.stream(lanes[(turn + i + shift) % 3]):
                        if shift == 0:
                            delay(device)
                        found.append((i, run(x).clone()))
            for lane in lanes:
                api.current_stream().wait_stream(lane)
            assert all(close_to_autocast(out, models[i], x) for i, out in found)


def test_a_captured_call_reads_the_weights_of_each_replay(device: str) -> None:
    """Also after what makes an eager call take a fresh buffer: an update while a backward is still to come."""
    model, x = mlp(device), torch.randn(16, WIDTH, device=device)
    run = compiled(model, device)
    out = torch.empty(16, WIDTH, device=device)

    def call() -> None:
        with torch.no_grad():
            out.copy_(run(x))

    run(x).sum().backward()  # compiled for training too
    replay = captured(call, device)
    for turn in range(4):
        write(model)
        if turn == 2:
            pending = run(x).sum()
            write(model)
            run(x)
            pending.backward()
        replay()
        assert close_to_autocast(out, model, x)


def trained(device: str, in_a_graph: bool) -> tuple[nn.Module, float]:
    """A model after eight steps, and the scale."""
    torch.manual_seed(0)
    model, (x, target) = mlp(device), torch.randn(2, 16, WIDTH, device=device)
    run = compiled(model, device)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), ampcompile.GradScaler(device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        loss = (run(x) - target).square().mean()
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    done = 3 if in_a_graph else 0  # a capture runs nothing; the calls before it do
    again = captured(step, device, done) if in_a_graph else step
    for _ in range(8 - done):
        again()
    return model, scaler.get_scale()


def test_a_captured_training_step_trains_as_an_eager_one(device: str) -> None:
    (ours, scale), (theirs, expected) = trained(device, True), trained(device, False)
    pairs = [p.detach() for p in ours.parameters()], [p.detach().double() for p in theirs.parameters()]
    assert error(*pairs) < 1e-3 and scale == expected
