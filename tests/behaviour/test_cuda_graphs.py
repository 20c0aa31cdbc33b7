"""Training in CUDA graphs: `mode="reduce-overhead"` and `capture_step`, beside the same steps launched one by one.

On the CPU, where that mode changes nothing but how copies are kept, the same lines run without graphs. Here Inductor's
code runs on a GPU; tests/scaler/test_captured_copies.py has more programs that are captured.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from tests.compiling import error
from tests.devices import DEVICES, waiting_for_nothing
from tests.ranks import run_ranks

WIDTH, STEPS = 64, 12
BF16, F16 = torch.bfloat16, torch.float16
GRAPHS = {"mode": "reduce-overhead"}
gpu = pytest.mark.gpu


def built(device: str) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH)) for _ in "ab"]
    return nn.Sequential(*blocks).to(device)


def compiled(model: nn.Module, device: str, **options: Any) -> Callable[[Tensor], Tensor]:
    lower = {"lower": "aot_eager"} if device == "cpu" else {}
    return torch.compile(model, backend="amp", dynamic=False, options={"dtype": BF16, **lower, **options})


class Loop:
    """Training steps, with whatever stands between them in real loops."""

    def __init__(self, device: str, options: dict[str, Any], **how: Any) -> None:
        self.model, self.device, self.how = built(device), device, how
        self.dtype: torch.dtype = how.get("dtype", BF16)
        self.run = compiled(self.model, device, dtype=self.dtype, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, fused=True)
        self.scaler = ampcompile.GradScaler(device, enabled=self.dtype == F16, init_scale=2.0**10, growth_interval=4)
        self.average = copy.deepcopy(self.model)
        self.average_run = compiled(self.average, device, dtype=self.dtype, **options)
        self.said: list[Tensor] = []
        if not how.get("set_to_none", True):  # else the first ones lie in a graph's memory, which it writes again
            for param in self.model.parameters():
                param.grad = torch.zeros_like(param)

    def batch(self, turn: int) -> Tensor:
        rows = (16, 24)[turn % 2] if self.how.get("two_shapes") else 16
        generator = torch.Generator().manual_seed(turn)
        x = torch.randn(rows, WIDTH, generator=generator)
        if self.how.get("overflows") and turn in (5, 8):
            x[0, 0] = torch.inf
        return x.to(self.device)

    def step(self, x: Tensor) -> Tensor:
        parts = x.chunk(self.how.get("accumulate", 1))
        torch.compiler.cudagraph_mark_step_begin()  # once a step: gradients stay valid until the next
        for part in parts:
            loss = (self.run(part) - part.roll(1, 1)).square().mean() / len(parts)
            self.scaler.scale(loss).backward()
        self.scaler.clip_grad_norm_(self.optimizer, 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=self.how.get("set_to_none", True))
        return loss.detach().clone()

    def after(self, turn: int) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        if self.how.get("average"):
            with torch.no_grad():
                for mean, param in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    mean.lerp_(param, 0.3)
                self.said.append(self.average_run(self.batch(100)).clone())
        if self.how.get("evaluate") and turn % 3 == 2:
            with torch.no_grad():
                self.said.append(self.run(self.batch(100)).clone())

    def go(self) -> list[Tensor]:
        """What the steps said, and the weights afterwards."""
        for turn in range(STEPS):
            self.said.append(self.step(self.batch(turn)))
            self.after(turn)
        weights = [param.detach().clone() for param in self.model.parameters()]
        return [*self.said, *weights, torch.tensor(self.scaler.get_scale())]


WAYS = {
    "plain": {},
    "set_to_none=False": {"set_to_none": False},
    "accumulation in float16, some steps skipped": {"accumulate": 2, "dtype": F16, "overflows": True},
    "all of it": {"dtype": F16, "accumulate": 2, "evaluate": True, "average": True, "two_shapes": True},
}


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Equal where one isn't finite, and close elsewhere: products may add up in another order."""
    pairs = [(f.float(), e.float()) for f, e in zip(found, expected, strict=True)]
    finite = [e.isfinite() for _, e in pairs]
    assert all(torch.equal(f.isfinite(), each) for (f, _), each in zip(pairs, finite, strict=True))
    kept = [(f.where(each, 0), e.where(each, 0)) for (f, e), each in zip(pairs, finite, strict=True)]
    return error([f for f, _ in kept], [e.double() for _, e in kept]) < 5e-3


@pytest.mark.parametrize(
    ("device", "way"), [("cpu", "all of it"), *(pytest.param("cuda", way, marks=gpu) for way in WAYS)]
)
def test_training_with_mode_reduce_overhead(device: str, way: str) -> None:
    assert same(Loop(device, GRAPHS, **WAYS[way]).go(), Loop(device, {}, **WAYS[way]).go())


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_compiled_one_by_one_share_their_graph(device: str) -> None:
    def trained(options: dict[str, Any]) -> list[Tensor]:
        loop = Loop(device, options)
        blocks = [compiled(block, device, **options) for block in loop.model]
        loop.run = lambda x: blocks[1](blocks[0](x).clone())
        return loop.go()

    assert same(trained(GRAPHS), trained({}))


@gpu
@pytest.mark.parametrize("way", ["plain", "accumulation in float16, some steps skipped"])
def test_graphs_are_replayed_and_no_copy_moves(way: str) -> None:
    loop = Loop("cuda", GRAPHS, **WAYS[way])
    for turn in range(6):
        loop.step(loop.batch(turn))
    casts = ampcompile.weight_stats().casts
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        loop.step(loop.batch(9))
    assert sum(event.name == "cudaGraphLaunch" for event in profile.events()) >= 2, "forward, backward"
    assert ampcompile.weight_stats().casts == casts, "the step writes the copies where the graph reads them"


@gpu
def test_fsdp2_by_block(tmp_path: Path) -> None:
    run_ranks("tests.behaviour.graphed_shards", folder=tmp_path, timeout=240, size=1)


@pytest.mark.parametrize("device", DEVICES)
def test_a_whole_step_in_one_graph_for_each_shape(device: str) -> None:
    """Weights are averaged and evaluated outside of it."""
    expected = Loop(device, {}, **WAYS["all of it"]).go()
    loop = Loop(device, {}, **WAYS["all of it"])
    step, of_shape = loop.step, dict[torch.Size, Any]()

    def train(x: Tensor) -> Tensor:
        if x.shape not in of_shape:
            of_shape[x.shape] = ampcompile.capture_step(step, loop.optimizer)
        return of_shape[x.shape](x).clone()

    loop.step = train
    assert same(loop.go(), expected)
    assert [each.captured for each in of_shape.values()] == [device == "cuda"] * 2


@gpu
def test_a_replay_launches_no_kernel_by_itself_and_waits_for_nothing() -> None:
    loop = Loop("cuda", {}, dtype=F16)
    train = ampcompile.capture_step(loop.step, loop.optimizer)
    batches = [loop.batch(turn) for turn in range(6)]
    for x in batches[:5]:
        train(x)
    with waiting_for_nothing("cuda"):
        train(batches[5])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        train(batches[5])
    names = [event.name for event in profile.events()]
    assert names.count("cudaGraphLaunch") == 1 and names.count("cudaLaunchKernel") <= 2


@gpu
def test_a_step_that_waits_for_the_gpu_is_refused() -> None:
    loop = Loop("cuda", {})

    def step(x: Tensor) -> float:
        return loop.step(x).item()

    train = ampcompile.capture_step(step, loop.optimizer)
    with pytest.raises(ampcompile.CaptureError, match="waits for the GPU"):
        for turn in range(4):
            train(loop.batch(turn))
