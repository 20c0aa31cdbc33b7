"""Copies on a GPU: the host waits for nothing; streams wait for the casts that they read; replays cast."""

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ampcompile.weights import Form, free_copies, weight_stats, writable_copies
from ampcompile.weights.store import store
from tests.devices import delay, profiled, waiting_for_nothing
from tests.models import Net
from tests.weights.bindings import bind, lines_of

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


class Model:
    """Weights, and a graph that reads their copies."""

    def __init__(self) -> None:
        self.params = [nn.Parameter(torch.randn(size, device="cuda")) for size in ((512, 512), (100, 333), (7,))]
        self.binding = bind([BF16] * 3)

    def read(self, stream: torch.cuda.Stream | None = None) -> list[Tensor]:
        """What a call on a stream reads."""
        with torch.cuda.stream(stream):
            return [copy.clone() for copy in self.binding.copies(self.params)]

    def shows(self, read: list[Tensor]) -> bool:
        """True if these are the weights' numbers."""
        return len(read) == 3 and all(map(torch.equal, read, (p.detach().to(BF16) for p in self.params)))

    def right(self) -> bool:
        return self.shows(self.binding.copies(self.params))

    def update(self, *which: int) -> None:
        with torch.no_grad():
            for i in which or range(3):
                self.params[i].mul_(-1.5)


def streams(count: int) -> list[torch.cuda.Stream]:
    """Streams that come after all that was launched so far."""
    found = [torch.cuda.Stream() for _ in range(count)]
    for stream in found:
        stream.wait_stream(torch.cuda.current_stream())
    return found


def join(streams: list[torch.cuda.Stream]) -> None:
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)


def test_no_call_waits_for_the_gpu() -> None:
    model = Model()
    assert model.right()
    x = torch.randn(3, 512, dtype=BF16, device="cuda", requires_grad=True)
    for written in ([0], [1, 2], [0, 1, 2], [], [0]):
        casts = weight_stats().casts
        with waiting_for_nothing("cuda"):
            loss = F.linear(x, model.binding.copies(model.params)[0]).sum()
            if written:
                model.update(*written)
            model.binding.copies(model.params)
            loss.backward()
        assert weight_stats().casts == casts + bool(written)
        assert model.right()


def test_a_call_waits_for_nobody_elses_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, beside, waits = Model(), Model(), streams(2), list[object]()
    first.read(beside[0])
    monkeypatch.setattr(torch.cuda.Event, "wait", lambda *given: waits.append(given))
    second.read(beside[1])
    assert not waits
    first.binding.copies(first.params)
    assert waits
    monkeypatch.undo()
    join(beside)


def test_memory_waits_for_every_stream_that_used_it() -> None:
    model, beside = Model(), streams(4)
    model.read(beside[0])
    for before, stream in itertools.pairwise(beside[:3]):
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            model.update()
        model.read(stream)  # casts in place, in memory that is the first stream's
    model.read(beside[3])  # casts nothing
    del model.binding
    gc.collect()
    with torch.cuda.stream(beside[0]):
        torch.empty(512, 512, dtype=BF16, device="cuda").zero_()
    join(beside)


def test_a_step_that_may_be_skipped_follows_the_cast_and_is_followed() -> None:
    model, beside = Model(), streams(3)
    for stream in beside:
        model.read(stream)
    join(beside)
    model.update(0)
    beside = streams(3)
    with torch.cuda.stream(beside[0]):
        delay("cuda")
    model.read(beside[0])
    with torch.cuda.stream(beside[1]):
        lent = writable_copies(model.params)
        assert len(lent.by_kernel) == 3
        lent.mark_written()  # the device decided to write nothing
    found = model.read(beside[2])
    join(beside)
    assert model.shows(found)


def test_a_cast_follows_the_one_before() -> None:
    model, beside = Model(), streams(2)
    with torch.cuda.stream(beside[0]):
        delay("cuda")
        model.binding.copies(model.params)
    assert model.params[0].data is not model.params[0]  # a doubt, which a GPU's host can't resolve by a comparison
    found = model.read(beside[1])
    join(beside)
    assert model.shows(found)


def test_a_captured_call_keeps_to_memory_of_its_own() -> None:
    model = Model()
    x = torch.randn(512, dtype=BF16, device="cuda", requires_grad=True)
    out, graph = model.read()[0], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        own = model.binding.copies(model.params)
        out.copy_(own[0])
    assert not any(copy.requires_grad for copy in own)
    assert not {copy.data_ptr() for copy in own} & {copy.data_ptr() for copy in model.binding.copies(model.params)}
    del own
    loss = (model.binding.copies(model.params)[0] @ x).sum()
    expected = model.params[0].detach().to(BF16).float().sum(0)
    model.update(0)
    assert model.right(), "elsewhere: a backward waits"
    graph.replay()
    loss.backward()
    torch.testing.assert_close(x.grad.float(), expected, rtol=2**-6, atol=0.5)
    del loss, model.binding
    gc.collect()
    assert weight_stats().copies == 0
    others = [torch.zeros(512, 512, dtype=BF16, device="cuda") for _ in range(8)]  # where copies were
    model.update(0)
    graph.replay()
    assert torch.equal(out, model.params[0].detach().to(BF16)) and not any(other.any() for other in others)


def test_tied_weights_have_one_copy_in_a_capture_and_a_first_call_may_be_one() -> None:
    assert Model().right()  # its kernels are loaded before the capture
    gc.collect()
    weight, other, binding, graph = *Model().params[:2], bind([BF16] * 3), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, tied, apart = binding.copies([weight, weight, other])
    graph.replay()
    assert first is tied and torch.equal(first, weight.detach().to(BF16)) and apart is not first
    assert weight_stats().copies == 0


def test_a_captured_step_writes_copies_that_stay() -> None:
    from ampcompile.scaler.grad_scaler import GradScaler

    model = Model()
    params = model.params
    optimizer, scaler = torch.optim.AdamW(params, lr=0.1), GradScaler("cuda")
    scaler.scale(torch.ones((), device="cuda"))
    for param in params:
        param.grad = torch.randn_like(param) * 2.0**16
    assert model.right()
    (stream,) = streams(1)
    with torch.cuda.stream(stream):
        for _ in range(2):
            scaler.step(optimizer)
            scaler.update()
            model.binding.copies(params)
    join([stream])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaler.step(optimizer)
        scaler.update()
    places = [copy.data_ptr() for copy in model.binding.copies(params)]
    x = torch.randn(512, dtype=BF16, device="cuda", requires_grad=True)
    waiting = (model.binding.copies(params)[0] @ x).sum()
    model.update()
    assert model.right()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        waiting.backward()
    del waiting, model.binding
    free_copies(params)
    for replay in range(3):
        graph.replay()
        model.binding, casts = bind([BF16] * 3), weight_stats().casts
        assert model.right()
        assert weight_stats().casts == casts + (replay == 0), "freed copies are cast once, and stay where they are"
        assert [copy.data_ptr() for copy in model.binding.copies(params)] == places
        del model.binding
    memory = weakref.ref(params[0].untyped_storage())
    del optimizer, scaler, param
    params.clear()
    gc.collect()
    assert memory() is None and weight_stats().copies == 0 and not store.captured


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


@pytest.mark.parametrize("quantized", [False, True])
def test_a_captured_call_casts_by_our_kernels(quantized: bool) -> None:
    forms = [Form(torch.float8_e4m3fn), Form(torch.float8_e4m3fn, by_rows=True)] if quantized else [Form(BF16)] * 2
    params = [nn.Parameter(torch.randn(size, device="cuda")) for size in ((64, 48), (144, 16))]
    binding = bind(forms)
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


def capture(graph: torch.cuda.CUDAGraph, out: list[Tensor], binding: Any, params: list[nn.Parameter]) -> None:
    with torch.cuda.graph(graph):
        for to, copy in zip(out, binding.copies(params), strict=True):
            to.view(torch.int8).copy_(copy.view(torch.int8))


def test_a_call_runs_the_same_lines_for_many_weights_as_for_few() -> None:
    """After a call, after a step that wrote the copies on the same stream, and after an order with another one."""

    def lines(count: int) -> list[int]:
        params, (other,) = [nn.Parameter(torch.randn(2, 2, device="cuda")) for _ in range(count)], streams(1)
        binding = bind([BF16] * count)
        binding.copies(params)
        found = [lines_of(lambda: binding.copies(params))]
        lent = writable_copies(params)
        assert len(lent.by_kernel) == count
        torch.autograd.graph.increment_version(params)
        lent.mark_written()
        found.append(lines_of(lambda: binding.copies(params)))
        with torch.cuda.stream(other):
            binding.copies(params)
            found.append(lines_of(lambda: binding.copies(params)))
        return [*found, lines_of(lambda: binding.copies(params))]

    few, many = lines(3), lines(60)
    assert few == many and len(set(few)) == 1 and few[0] < 30
