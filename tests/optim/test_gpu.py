"""On a GPU: no host sync in a step of ours, torch's numbers through its scaler, step counts where torch has them."""

import copy
import math

import pytest
import torch
from torch import nn

import ampcompile
from tests.devices import waiting_for_nothing
from tests.scaler.cases import assert_close, fill, scaled

pytestmark = pytest.mark.gpu
NAMES = ("SGD", "Adam", "AdamW")


def made(optim, name, dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to("cuda", dtype)) for shape in ((51, 27), (7,), ())]
    return getattr(optim, name)(params, lr=0.1, **({"momentum": 0.9} if name == "SGD" else {}), **options), params


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_loop_waits_for_nothing(name):
    (mine, params), (theirs, others) = made(ampcompile.optim, name), made(torch.optim, name)
    for seed in range(4):
        fill(params, seed)
        fill(others, seed)
        with waiting_for_nothing("cuda"):
            norm = mine.clip_grad_norm_(0.5)
            mine.step()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(others, 0.5))
        theirs.step()
    assert_close(params, others)
    if name != "SGD":
        assert mine.state[params[0]]["step"].is_cuda
        for saved in (mine.state_dict(), theirs.state_dict()):
            assert saved["state"][0]["step"].is_cpu and saved["state"][0]["step"] == 4
        mine.step()
        assert all(state["step"].is_cpu for state in copy.deepcopy(mine).state.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fused", [None, True])
def test_torchs_scaler_gives_torchs_numbers(name, fused):
    results = []
    for optim in (ampcompile.optim, torch.optim):
        optimizer, params = made(optim, name, fused=fused)
        scaler = scaled(torch.amp.GradScaler, "cuda", init_scale=16.0, growth_interval=2)
        for seed in range(7):
            optimizer.zero_grad(set_to_none=seed % 3 == 0)
            fill(params, seed, scaler.get_scale(), math.nan if seed in (2, 5) else None)
            if seed in (1, 3, 5, 6):  # the fifth isn't taken, which torch's scaler tells nobody: the sixth clips anew
                scaler.unscale_(optimizer)
                if optim is torch.optim:
                    nn.utils.clip_grad_norm_(params, 0.5)
                else:
                    optimizer.clip_grad_norm_(0.5)
            if fused and optim is ampcompile.optim:
                with waiting_for_nothing("cuda"):
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
        results.append((params, scaler.state_dict()))
    assert_close(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_a_file_made_on_the_cpu_goes_on_with_the_masters_of_a_gpu():
    optimizers = [made(ampcompile.optim, "AdamW", dtype=torch.bfloat16, masters="remainder") for _ in range(2)]
    for optimizer, params in optimizers:
        optimizer.state_dict_device = "cpu"
        fill(params, 0)
        optimizer.step()
    (first, params), (other, others) = optimizers
    fill(params, 1)
    first.step()
    file = copy.deepcopy(first.state_dict())
    assert all(value.is_cpu for state in file["state"].values() for value in state.values())
    other.load_state_dict(file)
    for param, value in zip(others, params, strict=True):
        param.data.copy_(value.data)
    for optimizer, given in optimizers:
        fill(given, 2)
        optimizer.step()
    states = first.state_dict(), other.state_dict()
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert all(other.state[param]["remainder"].is_cuda for param in others)


@pytest.mark.parametrize("how", ["bfloat16", "8bit"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_coded_states_wait_for_nothing_and_are_resumed(name, how):
    """As on the CPU, where a skipped step changes no byte, and a file has torch's moments."""
    (optimizer, params), (other, others) = (states_made(name, how) for _ in range(2))
    for seed in range(2):
        fill(params, seed)
        with waiting_for_nothing("cuda"):
            optimizer.step()
    held = {key: value for key, value in optimizer.state[params[0]].items() if key != "step"}
    assert all("code" in key and value.is_cuda for key, value in held.items())
    before = copy.deepcopy(list(optimizer.state[params[0]].values()))
    optimizer.grad_scale, optimizer.found_inf = torch.ones((), device="cuda"), torch.ones((), device="cuda")
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf
    assert all(map(torch.equal, before, optimizer.state[params[0]].values()))
    saved = copy.deepcopy(optimizer.state_dict())
    assert {"exp_avg", "momentum_buffer"} & saved["state"][0].keys()
    other.load_state_dict(saved)
    for mine, its in zip(params, others, strict=True):
        its.data.copy_(mine)
    for each in (params, others):
        fill(each, 7)
    optimizer.step()
    other.step()
    assert all(map(torch.equal, params, others))
    assert all(torch.equal(value, other.state[others[0]][key]) for key, value in held.items())


def states_made(name, how):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).cuda()) for shape in ((64, 67), (32, 128), (7,))]
    settings = {"momentum": 0.995} if name == "SGD" else {}
    return getattr(ampcompile.optim, name)(params, lr=0.1, states=how, fused=True, **settings), params


@pytest.mark.parametrize(
    ("how", "masters"), [("bfloat16", None), ("8bit", None), ("bfloat16", "remainder"), ("8bit", "remainder8")]
)
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_replays_draw_other_roundings_at_each_step(name, how, masters):
    """Those of single steps, also after a step that was skipped and under another rate."""
    results = []
    for captured in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 128)).cuda()
        model.to(torch.float32 if masters is None else torch.bfloat16)
        settings = {"momentum": 0.995} if name == "SGD" else {}
        optim = getattr(ampcompile.optim, name)
        optimizer = optim(model.parameters(), lr=0.1, states=how, masters=masters, fused=True, **settings)
        scaler = ampcompile.GradScaler("cuda", init_scale=16.0, growth_interval=4)

        def step(x, model=model, optimizer=optimizer, scaler=scaler):
            optimizer.zero_grad()
            scaler.scale(model(x).float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

        train = ampcompile.capture_step(step, optimizer, warm_up=2) if captured else step
        for turn in range(9):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + turn)
            x = torch.randn(8, 128, generator=torch.Generator().manual_seed(turn)).to("cuda", model[0].weight.dtype)
            train(x / 0 if turn == 5 else x)
        states = [value for state in optimizer.state.values() for value in state.values() if value is not None]
        results.append([*model.parameters(), *states])
        assert not captured or train.captured
    for mine, its in zip(*results, strict=True):
        assert torch.equal(mine, its)
