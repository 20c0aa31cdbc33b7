"""Copies on a GPU: no call waits; streams, captures."""

import gc

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ampcompile.weights import Binding, CopySpec, Form, free_copies, weight_stats
from benchmarks.counting import profiled
from tests.devices import waiting_for_nothing
from tests.models import Net
from tests.weights.bindings import bind

BF16 = torch.bfloat16


def fresh(binding: Binding, params: list[nn.Parameter]) -> bool:
    return all(torch.equal(c, p.detach().to(BF16)) for c, p in zip(binding.copies(params), params, strict=True))


def cuda_setting() -> tuple[list[nn.Parameter], Binding]:
    params = [nn.Parameter(torch.randn(size, device="cuda")) for size in ((512, 512), (100, 333), (7,))]
    return params, bind([BF16] * 3)


@pytest.mark.gpu
def test_no_call_waits_for_the_gpu() -> None:
    params, binding = cuda_setting()
    assert fresh(binding, params)
    x = torch.randn(3, 512, dtype=BF16, device="cuda", requires_grad=True)
    with waiting_for_nothing("cuda"):
        for step in range(4):
            loss = F.linear(x, binding.copies(params)[0]).sum()
            binding.copies(params)
            if step % 2:
                with torch.no_grad():
                    params[0].add_(1)
            binding.copies(params)
            loss.backward()
    assert fresh(binding, params)


@pytest.mark.gpu
def test_after_updates_the_set_goes_on_without_a_wait() -> None:
    params, binding = cuda_setting()
    assert fresh(binding, params)
    for written in ([0], [1, 2], [0, 1, 2], [], [0]):
        casts = weight_stats().casts
        with torch.no_grad():
            for i in written:
                params[i].mul_(-1.5)
        with waiting_for_nothing("cuda"):
            binding.copies(params)
        assert weight_stats().casts == casts + bool(written)
        assert fresh(binding, params)


@pytest.mark.gpu
def test_a_second_stream_waits_for_the_cast_of_the_first() -> None:
    params, binding = cuda_setting()
    assert fresh(binding, params)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for step in range(20):
        with torch.no_grad():
            params[0].add_(1)
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[step % 2]):
            torch.cuda._sleep(2_000_000)
            binding.copies(params)
        with torch.cuda.stream(streams[1 - step % 2]):
            got = [copy.clone() for copy in binding.copies(params)]
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        assert all(torch.equal(c, p.detach().to(BF16)) for c, p in zip(got, params, strict=True))


@pytest.mark.gpu
def test_a_captured_call_casts_at_each_replay() -> None:
    params, binding = cuda_setting()
    out = torch.empty(512, 512, dtype=BF16, device="cuda")
    out.copy_(binding.copies(params)[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(binding.copies(params)[0])
    for _ in range(3):
        with torch.no_grad():
            params[0].mul_(-0.5)
        graph.replay()
        assert torch.equal(out, params[0].detach().to(BF16))
        assert fresh(binding, params)


@pytest.mark.gpu
def test_a_captured_call_keeps_to_memory_of_its_own() -> None:
    params, binding = cuda_setting()
    x = torch.randn(512, dtype=BF16, device="cuda", requires_grad=True)
    out = torch.empty(512, 512, dtype=BF16, device="cuda")
    out.copy_(binding.copies(params)[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(binding.copies(params)[0])
    loss = (binding.copies(params)[0] @ x).sum()
    expected = params[0].detach().to(BF16).float().sum(0)
    with torch.no_grad():
        params[0].mul_(2)
    assert fresh(binding, params), "elsewhere: a backward waits"
    graph.replay()
    loss.backward()
    torch.testing.assert_close(x.grad.float(), expected, rtol=2**-6, atol=0.5)
    del loss, binding
    gc.collect()
    assert weight_stats().copies == 0
    others = [torch.zeros(512, 512, dtype=BF16, device="cuda") for _ in range(8)]  # where copies were
    with torch.no_grad():
        params[0].mul_(2)
    graph.replay()
    assert torch.equal(out, params[0].detach().to(BF16)) and not any(other.any() for other in others)


@pytest.mark.gpu
def test_a_captured_step_writes_copies_that_stay() -> None:
    from ampcompile.scaler.grad_scaler import GradScaler

    params, binding = cuda_setting()
    optimizer, scaler = torch.optim.AdamW(params, lr=0.1), GradScaler("cuda")
    scaler.scale(torch.ones((), device="cuda"))
    for param in params:
        param.grad = torch.randn_like(param) * 2.0**16
    binding.copies(params)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            scaler.step(optimizer)
            scaler.update()
            binding.copies(params)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaler.step(optimizer)
        scaler.update()
    places = [copy.data_ptr() for copy in binding.copies(params)]
    del binding
    free_copies(params)
    for replay in range(3):
        graph.replay()
        binding, casts = bind([BF16] * 3), weight_stats().casts
        assert fresh(binding, params)
        assert weight_stats().casts == casts + (replay == 0), "freed copies are cast once, and stay where they are"
        assert [copy.data_ptr() for copy in binding.copies(params)] == places
        del binding


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # torch's aot_eager gives it too
def test_make_graphed_callables() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).cuda()
    compiled = torch.compile(model, backend="amp", options={"lower": "aot_eager"})
    x = torch.randn(8, 64, device="cuda")
    compiled(x).sum().backward()
    graphed = torch.cuda.make_graphed_callables(Net(lambda m, x: m.inner(x), inner=compiled), (x,))
    for _ in range(3):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(-0.9)
        found = []
        for run in (graphed, compiled):
            model.zero_grad()
            result = run(x)
            result.square().sum().backward()
            found.append([result.detach().clone(), *(param.grad.clone() for param in model.parameters())])
        assert all(map(torch.equal, *found))


@pytest.mark.gpu
@pytest.mark.parametrize("quantized", [False, True])
def test_a_captured_call_casts_by_our_kernels(quantized: bool) -> None:
    forms = [Form(torch.float8_e4m3fn), Form(torch.float8_e4m3fn, by_rows=True)] if quantized else [Form(BF16)] * 2
    params = [nn.Parameter(torch.randn(size, device="cuda")) for size in ((64, 48), (144, 16))]
    binding = Binding([CopySpec(i, form) for i, form in enumerate(forms)])
    out = [copy.clone() for copy in binding.copies(params)]
    graph = torch.cuda.CUDAGraph()
    with profiled(torch.profiler.ProfilerActivity.CUDA) as names:  # of the capture or its first replay
        capture(graph, out, binding, params)
        graph.replay()
    launches = ["amp_magnitudes", "amp_quantize"] if quantized else ["amp_cast"]
    assert all(any(kernel in name for name in names) for kernel in launches)
    assert not any(word in name for name in names for word in ("where", "clamp", "amax", "isfinite"))
    for _ in range(2):
        with torch.no_grad():
            for param in params:
                param.mul_(-3)
        graph.replay()
        expected = [copy.view(torch.int8) for copy in binding.copies(params)]
        assert all(map(torch.equal, (each.view(torch.int8) for each in out), expected))


def capture(graph: torch.cuda.CUDAGraph, out: list[torch.Tensor], binding: Binding, params: list[nn.Parameter]) -> None:
    with torch.cuda.graph(graph):
        for to, copy in zip(out, binding.copies(params), strict=True):
            to.view(torch.int8).copy_(copy.view(torch.int8))
