"""What the fuse passes share: which values they see through, and when a fusion pays."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from ampcompile.config import Options
from ampcompile.kernels import usable
from ampcompile.passes.fuse import matching
from ampcompile.passes.pipeline import fusion
from tests.passes.captured import captured, settled

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def exponent(f: object, *args: Tensor) -> Node:
    """The node whose exponential `f` takes."""
    (node,) = settled(captured(f, *args)).graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)  # type: ignore[arg-type]
    return node.args[0]  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_value_is_followed_through_views_to_its_cast(dtype: torch.dtype) -> None:
    found = matching.find_16_bit_source(
        exponent(lambda x: x[1:].float().reshape(-1)[:2].exp(), torch.randn(3, 4).to(dtype))
    )
    assert found is not None
    low, path = found
    assert [str(node.target) for node in path] == ["aten.to.dtype", "aten.reshape.default", "aten.slice.Tensor"]
    assert low.target is torch.ops.aten.slice.Tensor and matching.is_low(low)


@pytest.mark.parametrize("view", [lambda x: x.mT, lambda x: x.swapaxes(0, 1), lambda x: x.diagonal(), lambda x: x.T])
def test_views_are_views_however_they_are_spelled(view: Callable[[Tensor], Tensor]) -> None:
    found = matching.find_16_bit_source(exponent(lambda x: view(x.float()).exp(), torch.randn(4, 4).to(torch.bfloat16)))
    assert found is not None and len(found[1]) == 2


def reused(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    return wide.view(-1).exp(), wide


@pytest.mark.parametrize(
    ("f", "dtype"),
    [
        (reused, torch.bfloat16),
        (lambda x: x.float().exp(), torch.float32),
        (lambda x: x.double().exp(), torch.bfloat16),
        (lambda x: (x.float() + 1).exp(), torch.bfloat16),
        (lambda x: x.float().detach().exp(), torch.bfloat16),  # it ends a gradient
        (lambda x: x.float().expand(2, 3, 4).exp(), torch.bfloat16),  # its gradient is a sum
        (lambda x: x.float().view(torch.int32).float().exp(), torch.bfloat16),
    ],
    ids=["reused", "float32 already", "float64", "an addition", "detached", "repeated", "other numbers"],
)
def test_what_isnt_such_a_value(f: object, dtype: torch.dtype) -> None:
    assert matching.find_16_bit_source(exponent(f, torch.randn(3, 4).to(dtype))) is None


def test_counts_decide_unless_the_user_does(monkeypatch: pytest.MonkeyPatch) -> None:
    auto, asked = matching.FusionCost("auto"), matching.FusionCost("norm+linear")
    assert auto.considers("norm") and asked.considers("norm") and not asked.considers("cross_entropy")
    assert asked.pays(CPU, 0, 10) and asked.pays(CUDA, None, None)
    assert (
        auto.pays(CUDA, 25, 100)
        and not auto.pays(CUDA, 24, 100)
        and not auto.pays(CUDA, 0, 0)
        and not auto.pays(CUDA, None, 100)
    )
    assert not auto.pays(CPU, 100, 100)
    assert not auto.pays(CUDA, 0, 100, freed=10**12)  # there is no GPU whose memory it would be a part of
    monkeypatch.setattr(matching, "memory_of", lambda device: 10**13)
    assert auto.pays(CUDA, 0, 100, freed=10**12) and not auto.pays(CUDA, 0, 100, freed=10**12 - 1)
    monkeypatch.setattr(matching, "usable", lambda: False)
    assert not auto.pays(CUDA, 100, 100) and not asked.pays(CUDA, 100, 100) and asked.pays(CPU, 100, 100)


def test_nothing_is_looked_for_on_the_cpu_by_default() -> None:
    assert fusion(Options(), "cpu") == ()
    assert fusion(Options(fuse="none"), "cuda") == fusion(Options(fuse="norm", lower="eager"), "cuda") == ()


def test_a_bodys_fusions_are_found() -> None:
    def checkpointed(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=False)

    graph = settled(captured(checkpointed, torch.randn(3)))
    inner = [g for g in matching.graphs(graph) if g is not graph]
    assert len(inner) == 1
    node = inner[0].graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)[0]
    node.meta[matching.FUSION] = record = matching.Fusion("norm", "aten.exp", 8)
    assert list(matching.fusions(graph)) == [(node, record)]
    assert usable.usable()
