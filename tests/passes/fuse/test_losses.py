"""Which cross entropies read 16-bit logits, and how views between the two are repeated on something else."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from ampcompile.passes.fuse.losses import keep_rows_whole, losses, repeat_views
from ampcompile.torch_private import tracing
from tests.passes.captured import captured, settled

TARGET = torch.arange(12) % 5


def low(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def found(f: Any, *args: Tensor) -> list[Any]:
    return list(losses(settled(captured(f, *args, dtype=None))))


def test_its_arguments_are_read_by_place_and_by_name() -> None:
    (plain,) = found(lambda x: F.cross_entropy(x.float(), TARGET), low(12, 5))
    assert plain.kind == ("mean", -100, 0.0) and plain.weight is None and plain.logits.op == "placeholder"
    (full,) = found(
        lambda x, w: F.cross_entropy(x.float(), TARGET, w, ignore_index=2, reduction="sum", label_smoothing=0.1),
        low(12, 5),
        torch.rand(5),
    )
    assert full.kind == ("sum", 2, 0.1) and full.weight is not None


def written(x: Tensor) -> Tensor:
    wide = x.float()
    x.zero_()
    return F.cross_entropy(wide, TARGET)


def reused(x: Tensor) -> Tensor:
    wide = x.float()
    return F.cross_entropy(wide, TARGET) + wide.sum()


@pytest.mark.parametrize(
    ("f", "shape"),
    [
        (written, (12, 5)),
        (reused, (12, 5)),
        (lambda x: F.cross_entropy(x.float(), torch.rand(12, 5)), (12, 5)),
        (lambda x: F.cross_entropy(x.float(), TARGET.view(3, 4)), (3, 5, 4)),
        (lambda x: F.cross_entropy(x.float(), torch.tensor(2)), (5,)),
        (lambda x: F.cross_entropy(x.double(), TARGET), (12, 5)),
        (lambda x: F.cross_entropy(x, TARGET), (12, 5)),
    ],
    ids=["written", "reused", "probabilities", "more dimensions", "one row", "float64", "16 bits"],
)
def test_others_are_left_alone(f: Any, shape: tuple[int, ...]) -> None:
    assert found(f, low(*shape)) == []


def shifted(x: Tensor) -> Tensor:
    return F.cross_entropy(x[:, :-1].float().view(-1, 5), TARGET[:9])


def test_views_are_repeated_without_the_cast() -> None:
    (loss,) = found(shifted, low(3, 4, 5))
    graph = loss.node.graph
    source = loss.path[0].args[0].args[0]
    views = [loss.logits, *loss.path]
    assert keep_rows_whole(views)
    with tracing.on_fakes_of(graph.owning_module), graph.inserting_before(loss.node):
        again = repeat_views(views, source)
    # What could be seen as rows when it was float32, and dense, must be copied now.
    assert again.target is torch.ops.aten.reshape.default and again.meta["val"].shape == (9, 5)
    x = low(3, 4, 5)
    assert torch.equal(_value(again, source, x), x[:, :-1].reshape(-1, 5))


def _value(node: Any, source: Node, x: Tensor) -> Any:
    if node is source:
        return x
    return node.target(_value(node.args[0], source, x), *node.args[1:], **node.kwargs)


@pytest.mark.parametrize(
    ("f", "whole"),
    [
        (lambda x: x[1:].reshape(-1, 5), True),
        (lambda x: x[1].contiguous(), True),
        (lambda x: x.flatten(0, 1), True),
        (lambda x: x.flatten(1, 2), False),
        (lambda x: x.reshape(-1, 10)[:, :5], False),
        (lambda x: x.transpose(0, 2).reshape(-1, 3)[:, 1:], False),
        (lambda x: x[..., 1:].reshape(-1, 4), False),
    ],
)
def test_rows_are_known_to_stay_whole(f: Any, whole: bool) -> None:
    graph = settled(captured(lambda x: f(x).exp(), low(3, 4, 5), dtype=None)).graph
    path = [node for node in graph.nodes if node.op == "call_function"][:-1]
    assert keep_rows_whole(path) == whole
