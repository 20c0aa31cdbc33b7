"""What is counted is what happened."""

import pytest
import torch
import torch._functorch.config
import torch._inductor.config

from benchmarks.counting import CastsRun, casts_compiled, graphs_compiled, host_syncs


def test_casts_of_eager_autocast() -> None:
    layer, x = torch.nn.Linear(8, 4, bias=False), torch.randn(2, 8)
    with CastsRun() as mode:
        with torch.autocast("cpu", torch.bfloat16):
            loss = layer(x).float().sum()
        loss.backward()
    # x, the weight and the result; backward, the result's gradient and the weight's.
    assert mode.casts.count == 5
    assert mode.casts.bytes == 6 * (2 * 8 + 4 * 8 + 2 * 4 + 2 * 4 + 4 * 8)


def test_conversions_that_keep_the_dtype_are_no_casts() -> None:
    with CastsRun() as mode:
        torch.randn(3).to(torch.float32, copy=True)
        torch.arange(3).to(torch.float32)
    assert mode.casts.count == 0


@torch._inductor.config.patch(fx_graph_cache=False)  # what is cached isn't lowered again
@torch._functorch.config.patch(enable_autograd_cache=False)
def test_casts_and_graphs_that_inductor_compiles() -> None:
    def two_casts(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x.bfloat16(), x.bfloat16().t()).float()

    before, x = graphs_compiled(), torch.randn(5, 5)
    with casts_compiled() as casts:
        torch.compile(two_casts)(x)
    assert graphs_compiled() == before + 1
    assert casts.count in (2, 3)  # Inductor may see that both casts of x are one
    assert casts.bytes == casts.count * 25 * 6
    with casts_compiled() as none:
        torch.compile(lambda x: x + 1)(x)
    assert none.count == 0


@pytest.mark.parametrize("reads", [0, 1, 3])
def test_host_syncs_on_a_cpu(reads: int) -> None:
    x = torch.randn(4)
    assert host_syncs(lambda: [x.sum().item() for _ in range(reads)], "cpu") == reads


@pytest.mark.gpu
@pytest.mark.parametrize("reads", [0, 1, 3])
def test_host_syncs_and_launches_on_a_gpu(reads: int) -> None:
    from benchmarks.counting import device_seconds, kernel_launches

    x = torch.randn(4, device="cuda")
    assert host_syncs(lambda: [x.sum().item() for _ in range(reads)], "cuda") == reads
    assert kernel_launches(lambda: [x.add_(1) for _ in range(5)]) == 5
    assert 0 < device_seconds(lambda: x.add_(1)) < 1e-3 < device_seconds(lambda: torch.cuda._sleep(20_000_000)) < 1
