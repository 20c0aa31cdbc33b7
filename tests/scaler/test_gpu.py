"""On a GPU: no host sync, few launches, the whole step in a CUDA graph, the numbers of torch, several devices."""

import math
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import nn

import ampcompile
from ampcompile import weights
from ampcompile.errors import OptimizerError
from ampcompile.kernels.check_grads import check_grads
from ampcompile.kernels.masters import read_master
from ampcompile.optim.keep_masters import keep_masters
from ampcompile.scaler.grad_scaler import GradScaler
from ampcompile.weights.step import QUANTIZED
from softgpu import choice
from tests.devices import captured, waiting_for_nothing
from tests.scaler.cases import assert_close, assert_equal, assert_quantized, fill, scaled
from tests.scaler.test_no_sync import as_the_page_does, as_usual, batches_of, watched
from tests.weights.bindings import bind

pytestmark = pytest.mark.gpu
SHAPES = [(513, 1027), (7,), (64, 64, 3, 3), (), (100_003,)]
KINDS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "AdamW tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1, device="cuda"), capturable=True),
}


def weights_on(device: str = "cuda") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES]


def iteration(scaler, optimizer, how: str = "clip_grad_norm_") -> None:
    """By a scaler of ours, or of torch's, which unscales and clips in two calls."""
    if "clip" not in how:
        scaler.unscale_(optimizer) if how == "unscale_" else None
    elif isinstance(scaler, GradScaler):
        getattr(scaler, how)(optimizer, 0.5)
    else:
        scaler.unscale_(optimizer)
        getattr(nn.utils, how)(optimizer.param_groups[0]["params"], 0.5)
    scaler.step(optimizer)
    scaler.update()


def launched(call) -> list[str]:
    """The names of what the GPU ran."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["clip_grad_norm_", "clip_grad_value_", "unscale_", "step"])
def test_training_equals_torchs_without_a_sync(kind, how):
    results = []
    for make in (GradScaler, torch.amp.GradScaler):
        params = weights_on()
        # With a tensor as learning rate torch corrects biases in float32: 1 - 0.999 is off by 5e-5 of itself.
        exact = "AdamW fused" if make is torch.amp.GradScaler and kind == "AdamW tensor lr" else kind
        optimizer, scaler = KINDS[exact](params), scaled(make, "cuda", growth_interval=3)
        for seed in range(8):
            fill(params, seed, 2.0**16, math.nan if seed in (2, 5) else None)
            with waiting_for_nothing("cuda") if make is GradScaler else nullcontext():
                iteration(scaler, optimizer, how)
                skipped = scaler.last_step_skipped if make is GradScaler else None
            assert skipped is None or (skipped.is_cuda and skipped.item() == (seed in (2, 5)))
        results.append((params, scaler.state_dict()))
    assert_close(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["remainder", "float32"])
def test_16_bit_parameters_have_the_bits_of_float32_masters(kind, how):
    narrow = [nn.Parameter(param.detach().bfloat16()) for param in weights_on()]
    wide = [nn.Parameter(param.detach().float()) for param in narrow]
    optimizers = [KINDS[kind](params) for params in (narrow, wide)]
    keep_masters(optimizers[0], how)
    masters = optimizers[0]._ampcompile_step.masters
    scalers = [scaled(device="cuda") for _ in optimizers]
    for seed in range(6):
        fill(narrow, seed, 2.0**16, math.nan if seed == 2 else None)
        for param, weight in zip(narrow, wide, strict=True):
            weight.grad = param.grad.float()
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            with waiting_for_nothing("cuda"):
                iteration(scaler, optimizer)
    states = [optimizers[0].state[param] for param in narrow]
    weights = [read_master(p, *masters.kept(state)) for p, state in zip(narrow, states, strict=True)]
    assert_equal([weight.detach() for weight in weights], [weight.detach() for weight in wide])


def test_random_rounding_has_the_bits_of_the_cpus():
    results = []
    for device in ("cpu", "cuda"):
        params = [nn.Parameter(torch.ones(n, dtype=torch.bfloat16, device=device)) for n in (100_003, 7, 8192)]
        optimizer = torch.optim.SGD(params, lr=1.0)
        keep_masters(optimizer, "stochastic", seed=2**35 + 1)
        for _ in range(2):
            for param in params:
                param.grad = torch.full_like(param, -0.3 * 2**-7)
            optimizer.step()
        results.append([param.detach().cpu() for param in params])
    assert_equal(*results)


def test_an_iteration_is_four_launches_and_allocates_nothing():
    params = weights_on()
    optimizer, scaler = torch.optim.AdamW(params), scaled(device="cuda")
    binding = bind([torch.bfloat16] * len(params))
    binding.copies(params)
    fill(params, 0, 2.0**16)
    for _ in range(3):
        iteration(scaler, optimizer)
    before = torch.cuda.memory_allocated()
    kernels = launched(lambda: iteration(scaler, optimizer))
    assert len(kernels) <= 4, kernels
    assert torch.cuda.memory_allocated() == before
    casts = weights.weight_stats().casts
    assert all(torch.equal(c, p.detach().bfloat16()) for c, p in zip(binding.copies(params), params, strict=True))
    assert weights.weight_stats().casts == casts


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no fp8 units")
@pytest.mark.parametrize("kind", ["SGD", "AdamW fused", "AdamW tensor lr"])
def test_quantized_weights_are_written_with_the_step_in_two_launches_more(kind):
    large = (96, 1024) if choice.is_made_up() else (1024, 4096)
    params = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in ((64, 96), large, (48, 16), (7, 9))]
    slots, binding = [*params[:3], params[2]], bind([QUANTIZED.dtype] * 3 + [torch.bfloat16])
    optimizer, scaler = KINDS[kind](params), scaled(device="cuda", growth_interval=3)
    fill(params, 0, 2.0**16)
    for _ in range(2):
        binding.copies(slots)
        iteration(scaler, optimizer)
    casts, kernels = weights.weight_stats().casts, launched(lambda: iteration(scaler, optimizer))
    assert len(kernels) <= 6 + (kind == "AdamW tensor lr"), kernels
    places = [copy.data_ptr() for copy in binding.copies(slots)]
    for seed in range(9):
        fill(params, seed, 2.0**16, math.inf if seed in (2, 7) else None)
        if seed < 5:
            with waiting_for_nothing("cuda"):
                iteration(scaler, optimizer)
        if seed == 5:
            replay = captured(lambda: iteration(scaler, optimizer), "cuda", warm_up=0)
        if seed >= 5:
            replay()
        assert [copy.data_ptr() for copy in binding.copies(slots)] == places
        assert_quantized([p.detach().cpu() for p in params[:3]], [c.cpu() for c in binding.copies(slots)[:3]])
        assert weights.weight_stats().casts == casts


@pytest.mark.parametrize(
    ("kind", "steps"), [("SGD", 1), ("AdamW fused", 1), ("AdamW tensor lr", 1), ("AdamW fused", 2)]
)
def test_one_step_or_two_in_a_cuda_graph_whose_buffers_are_its_own(kind, steps):
    """Nothing that eager steps keep is read by a replay: it may go, and its memory be written by others."""
    results = []
    for graph in (True, False):
        params = weights_on()
        optimizer, scaler = KINDS[kind](params), scaled(device="cuda", growth_interval=2)
        fill(params, 0, 2.0**16)

        def call(scaler=scaler, optimizer=optimizer):
            for _ in range(steps):
                iteration(scaler, optimizer)

        call()
        run = captured(call, "cuda", warm_up=0) if graph else call
        if graph and steps == 2:
            optimizer._ampcompile_step.workspaces.clear()
            others = [torch.full((1 << size,), math.nan, device="cuda") for size in range(22) for _ in range(4)]
            assert others[0].isnan()
        for seed in range(6):
            fill(params, seed, 2.0**16, math.inf if seed == 3 else None)
            if isinstance(optimizer.param_groups[0]["lr"], torch.Tensor):
                optimizer.param_groups[0]["lr"].mul_(0.9)
            run()
            if seed == 2:  # eager steps in between leave the graph's addresses alone
                other = weights_on()
                fill(other, 1, 2.0**16)
                scaler.step(torch.optim.AdamW(other))
                scaler.update()
        results.append((params, scaler.get_scale(), scaler._get_growth_tracker()))
    assert_close(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


def test_a_capture_without_a_step_before_it_says_what_to_do():
    params = weights_on()
    optimizer, scaler = torch.optim.SGD(params, lr=0.1), scaled(device="cuda")
    fill(params, 0, 2.0**16)
    with pytest.raises(OptimizerError, match="run the step"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        scaler.step(optimizer)


def test_bfloat16_gradients_are_unscaled():
    param = nn.Parameter(torch.ones(1000, device="cuda", dtype=torch.bfloat16))
    param.grad = torch.full_like(param, 2.0**17)
    scaled(device="cuda").unscale_(torch.optim.SGD([param], lr=0.1))
    assert (param.grad == 2).all()


def test_the_sum_over_programs_is_complete_and_the_same_every_time():
    """A program that summed up before the others had stored their part would show here, now and then."""
    # The made-up GPU runs programs one after the other, a million numbers in some seconds.
    size, times = (2**14, 3) if choice.is_made_up() else (2**20, 2000)
    grads = [torch.randn(size + 17, device="cuda") for _ in range(8)]
    expected = torch.cat(grads).double().norm().float()
    workspace: dict = {}
    norms = {check_grads(grads, None, None, 1.0, workspace).norm.item() for _ in range(times)}
    assert len(norms) == 1
    torch.testing.assert_close(torch.tensor(norms.pop()), expected.cpu())
    for position in torch.randint(0, size, (times // 10 or 1,)).tolist():
        kept, grads[3][position] = grads[3][position].item(), math.nan
        assert check_grads(grads, None, None, 1.0, workspace).found_inf.item() == 1
        grads[3][position] = kept
        assert check_grads(grads, None, None, 1.0, workspace).found_inf.item() == 0


def test_two_devices_decide_together():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    params = [*weights_on("cuda:0"), *weights_on("cuda:1")]
    optimizer, scaler = torch.optim.AdamW(params), scaled(device="cuda")
    for bad in (math.inf, None):
        fill(params, 0, 2.0**16, bad)
        before = [param.detach().clone() for param in params]
        total = torch.stack([p.grad.double().norm().cpu() for p in params]).norm() / scaler.get_scale()
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        changed = [not torch.equal(param, old) for param, old in zip(params, before, strict=True)]
        assert all(changed) if bad is None else not any(changed)
        if bad is None:
            assert norm.item() == pytest.approx(total.item(), rel=1e-5)


@pytest.mark.slow
def test_a_tensor_of_more_than_two_to_the_32_elements():
    size = 2**32 + 5
    if torch.cuda.get_device_properties(0).total_memory < 14 * size:
        pytest.skip("needs 60 GB of GPU memory")
    param = nn.Parameter(torch.ones(size, device="cuda"))
    param.grad = torch.zeros(size, device="cuda")
    param.grad[-1] = 2.0**16
    scaler, optimizer = scaled(device="cuda"), torch.optim.SGD([param], lr=0.5)
    assert scaler.clip_grad_norm_(optimizer, 1e9).item() == 1
    scaler.step(optimizer)
    assert param[-1].item() == 0.5 and param[0].item() == param[2**31].item() == 1


@pytest.mark.parametrize("bad", [(), (3, 7)])
def test_the_pages_schedule_and_average_wait_for_nothing(bad):
    model = nn.Linear(4, 3).cuda()
    other = deepcopy(model)
    batches = watched(batches_of(bad, "cuda"), waiting_for_nothing("cuda"))
    found = as_the_page_does(model, batches, GradScaler())
    rate, averaged = as_usual(other, batches_of(bad, "cuda"), torch.amp.GradScaler())
    assert found["steps_taken"].item() == 8 - len(bad)
    assert found["optimizer"].param_groups[0]["lr"].item() == pytest.approx(rate, rel=1e-6)
    assert_close(list(model.parameters()), list(other.parameters()))
    assert_close(list(found["averaged"].module.parameters()), list(averaged.module.parameters()))


@pytest.mark.gpu
def test_a_number_for_the_scale_within_a_captured_step_is_refused():
    param, scaler = nn.Parameter(torch.zeros(1, device="cuda")), scaled(device="cuda", init_scale=2.0)
    optimizer = ampcompile.optim.SGD([param], lr=1.0)

    def step(x):
        scaler.scale((param * x).sum()).backward()
        scaler.step(optimizer)
        scaler.update(4.0)
        optimizer.zero_grad()

    run, x = ampcompile.capture_step(step, optimizer), torch.ones(1, device="cuda")
    for _ in range(3):
        run(x)
    for _ in range(2):
        with pytest.raises(
            ampcompile.CaptureError, match=r"found update\(4.0\) in a captured step, expected a scale that"
        ):
            run(x)
    assert param.item() == -3
