"""The made-up GPU finds what a real one lets pass now and then: missing waits, memory that is freed too early."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from softgpu import choice

pytestmark = pytest.mark.skipif(not choice.is_made_up(), reason="needs the made-up GPU, whose errors these are")


@triton.jit
def double(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, 2 * tl.load(x + at))


def by_triton(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    double[(1,)](x, y, x.numel())
    return y


def by_op(x: Tensor) -> Tensor:
    return 2 * x


@pytest.fixture
def side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@pytest.mark.parametrize("launch", [by_op, by_triton])
def test_a_read_waits_for_the_write(launch, side):
    x = torch.ones(64, device="cuda")
    with (
        pytest.raises(RuntimeError, match=r"reads what .*fill_.* writes on stream 0, and no event"),
        torch.cuda.stream(side),
    ):
        launch(x)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = launch(x)
    with pytest.raises(RuntimeError, match=r"on stream 0 reads what .* writes on stream"):
        y.sum()
    torch.cuda.current_stream().wait_stream(side)
    assert y.sum().item() == 128


@pytest.mark.parametrize("launch", [by_op, by_triton])
def test_a_write_waits_for_the_read(launch, side):
    x = torch.ones(64, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch(x)
        done = side.record_event()
    with pytest.raises(RuntimeError, match=r"fill_.* on stream 0 writes what .* reads on stream"):
        x.fill_(3)
    done.wait()
    x.fill_(3)


def test_parts_of_one_memory_need_no_waits(side):
    x = torch.empty(64, device="cuda")
    with torch.cuda.stream(side):
        x[:32].fill_(1)
    x[32:].fill_(2)
    with pytest.raises(RuntimeError, match="no event"):
        x[31:].fill_(2)


@pytest.mark.parametrize("wait", ["synchronize", "item", "query", "device"])
def test_what_the_host_has_waited_for_is_there_for_all(wait, side):
    with torch.cuda.stream(side):
        x = torch.ones(8, device="cuda")
        event = side.record_event()
        if wait == "item":
            x.sum().item()
    if wait == "query":
        assert [event.query(), event.query()] == [False, True], "an event takes its time"
    if wait in ("synchronize", "device"):
        (side if wait == "synchronize" else torch.cuda).synchronize()
    assert by_op(x)[0] == 2


@pytest.mark.parametrize("kept", [False, True])
def test_memory_that_another_stream_works_on_isnt_freed(kept, side):
    x = torch.ones(64, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        by_op(x)
    if kept:
        x.record_stream(side)
    del x
    if kept:
        torch.ones(64, device="cuda")
        return
    with pytest.raises(RuntimeError, match=r"was freed while aten::mul.* used it"):
        torch.ones(64, device="cuda")


def test_new_memory_holds_no_numbers():
    assert torch.empty(9, device="cuda").isnan().all() and torch.empty(3, 3, device="cuda").t().isnan().all()


def test_a_capture_runs_nothing_and_a_replay_all():
    x = torch.ones(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = by_triton(by_op(x))
        x.add_(1)
    assert (x == 1).all() and y.isnan().all()
    for turn in (4, 8):
        graph.replay()
        assert (y == turn).all()
    assert (x == 3).all()


def test_a_capture_keeps_what_batch_norm_counts():
    x, mean, var = torch.ones(4, 2, device="cuda"), torch.zeros(2, device="cuda"), torch.ones(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.nn.functional.batch_norm(x, mean, var, training=True, momentum=0.5)
    assert mean.tolist() == [0, 0] and var.tolist() == [1, 1]
    graph.replay()
    assert mean.tolist() == [0.5, 0.5] and var.tolist() == [0.5, 0.5]


def test_a_capture_draws_no_numbers_and_replays_those_of_ops():
    def drawn(x):
        return F.dropout(x, 0.5), torch.rand(3, device="cuda")

    x, host = torch.ones(64, device="cuda"), torch.get_rng_state()
    torch.cuda.manual_seed(3)
    expected = [each for _ in range(2) for each in drawn(x)]
    torch.cuda.manual_seed(3)
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        results = drawn(x)
    for _ in range(2):
        graph.replay()
        found += [each.clone() for each in results]
    assert all(map(torch.equal, found, expected)) and torch.equal(torch.get_rng_state(), host)


def parts(pool: object) -> list[tuple[int, str]]:
    return sorted(
        (block["size"], block["state"]) for each in torch.cuda.memory_snapshot(pool) for block in each["blocks"]
    )


def captured(call, *args, **how):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **how):
        return graph, call(*args)


@pytest.mark.parametrize("launch", [by_op, by_triton])
def test_a_pool_hands_out_again_what_is_free_within_a_capture_and_by_the_next(launch, side):
    def chain(x):
        for _ in range(4):
            x = launch(x)
        return x

    x, pool = torch.ones(512, device="cuda"), torch.cuda.graph_pool_handle()
    one, y = captured(chain, x, pool=pool, stream=side)
    assert parts(pool) == [(2048, "active_allocated"), (2048, "inactive")]
    del y
    other, z = captured(launch, x[:128], pool=pool, stream=side)
    assert parts(pool) == [(512, "active_allocated"), (1536, "inactive"), (2048, "inactive")]
    other.replay()
    assert (z == 2).all()
    one.replay()
    assert (z != 2).all(), "one graph writes over another's"
    third, y = captured(chain, x, pool=pool, stream=side)
    assert y.data_ptr() != z.data_ptr(), "z lives"
    del one, other, third, y
    assert parts(pool) == [(512, "active_allocated"), (1536, "inactive")], "z lives there"
    del z
    assert not parts(pool)


def test_memory_of_a_pool_isnt_handed_out_while_another_stream_works_on_it(side):
    def beside(x, kept):
        y, main = x + 1, torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            z = y + 1
        if kept:
            y.record_stream(side)
        address = y.data_ptr()
        del y
        with nullcontext() if kept else pytest.raises(RuntimeError, match=r"aten::mul.* writes what aten::add.* reads"):
            assert (x * 3).data_ptr() != address
        main.wait_stream(side)
        return z

    x = torch.ones(64, device="cuda")
    captured(beside, x, True)
    captured(beside, x, False)


def test_what_the_allocator_counts_is_as_torch_counts_it():
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    x = torch.ones(300, device="cuda")
    del x
    x = torch.ones(1 << 19, device="cuda")
    after = torch.cuda.memory_stats()
    more = {name: after[name] - before[name] for name in after}
    assert more["allocated_bytes.all.current"] == more["allocated_bytes.all.peak"] == x.nbytes
    assert more["allocated_bytes.small_pool.freed"] == 1536 and more["requested_bytes.small_pool.freed"] == 1200
    assert more["allocation.large_pool.allocated"] == 1
    assert torch.cuda.memory_reserved() == sum(each["total_size"] for each in torch.cuda.memory_snapshot())
    assert "Allocated memory" in torch.cuda.memory_summary()


@pytest.mark.parametrize("launch", [by_op, by_triton])
def test_a_graph_keeps_none_of_its_inputs(launch):
    x = torch.ones(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(x)
    graph.replay()
    del x
    with pytest.raises(RuntimeError, match="reads memory that was freed since the capture"):
        graph.replay()


def test_a_replay_waits_for_what_its_inputs_wait_for(side):
    x = torch.ones(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        by_op(x)
    x.fill_(2)
    with (
        pytest.raises(RuntimeError, match=r"a CUDA graph's aten::mul.* reads what aten::fill_"),
        torch.cuda.stream(side),
    ):
        graph.replay()


def test_what_no_capture_allows(side):
    x = torch.ones(64, device="cuda")
    with (
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        x.sum().item()
    with pytest.raises(RuntimeError, match="unjoined work"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            by_op(x)
    event = torch.cuda.current_stream().record_event()
    with pytest.raises(RuntimeError, match="uncaptured work"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        event.wait()


def test_two_devices_have_memory_and_streams_of_their_own():
    one, other = torch.ones(4, device="cuda:0"), torch.full((4,), 2.0, device="cuda:1")
    with pytest.raises(RuntimeError, match="same device"):
        one + other
    with pytest.raises(RuntimeError, match="same device"):
        one + torch.ones(4)
    with torch.cuda.device(1):
        assert torch.empty(1, device="cuda").device.index == torch.cuda.current_stream().device.index == 1
        with pytest.raises(RuntimeError, match="illegal memory access"):
            by_triton(one)
    assert (one + other.to("cuda:0")).tolist() == [3] * 4
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device="cuda:2")


@pytest.mark.parametrize("op", [F.silu, F.mish])
def test_what_a_gpu_has_a_kernel_for_is_one_op(op):
    x = torch.randn(64).bfloat16()
    gradient = lambda x: torch.autograd.grad(op(x).sum(), x)
    given = x.cuda().requires_grad_()
    assert torch.equal(gradient(given)[0].cpu(), gradient(x.requires_grad_())[0])
    assert f"aten.{op.__name__}_backward" in make_fx(gradient)(given).code


def test_a_wait_of_the_host_is_seen():
    x = torch.ones(4, device="cuda")
    for call in (x.sum().item, x.nonzero, x.cpu, lambda: x[x > 0]):
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError, match="synchronizing"):
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        call()


def test_subprocesses_have_it_too():
    code = "import torch; print(torch.ones(2, device='cuda').sum().item(), torch.cuda.get_device_name())"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "2.0 NVIDIA H200\n"


def test_what_is_asked_of_pytest():
    assert choice.asks_for_gpus(["-x", "-m", "gpu"]) and choice.asks_for_gpus(["tests", "-mgpu and not slow"])
    assert choice.asks_for_gpus(["-m", "gpu or emulated"])
    assert not choice.asks_for_gpus(["-m", "not gpu"]) and not choice.asks_for_gpus(["tests/weights/test_gpu.py"])
