"""Which cross entropies read 16-bit logits, and how views between the two are repeated on something else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from ampcompile.passes.fuse.losses import find_16_bit_source, keep_rows_whole, losses, repeat_views
from ampcompile.passes.fuse.matching import is_low
from ampcompile.torch_private import tracing
from tests.passes.captured import captured, settled

TARGET = torch.arange(12) % 5


def low(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def found(f: Any, *args: Tensor) -> list[Any]:
    return list(losses(settled(captured(f, *args, dtype=None))))


def exponent(f: object, *args: Tensor) -> Node:
    """The node whose exponential `f` takes."""
    (node,) = settled(captured(f, *args)).graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)  # type: ignore[arg-type]
    return node.args[0]  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_value_is_followed_through_views_to_its_cast(dtype: torch.dtype) -> None:
    found = find_16_bit_source(exponent(lambda x: x[1:].float().reshape(-1)[:2].exp(), torch.randn(3, 4).to(dtype)))
    assert found is not None
    low, path = found
    assert [str(node.target) for node in path] == ["aten.to.dtype", "aten.reshape.default", "aten.slice.Tensor"]
    assert low.target is torch.ops.aten.slice.Tensor and is_low(low)


@pytest.mark.parametrize("view", [lambda x: x.mT, lambda x: x.swapaxes(0, 1), lambda x: x.diagonal(), lambda x: x.T])
def test_views_are_views_however_they_are_spelled(view: Callable[[Tensor], Tensor]) -> None:
    found = find_16_bit_source(exponent(lambda x: view(x.float()).exp(), torch.randn(4, 4).to(torch.bfloat16)))
    assert found is not None and len(found[1]) == 2


def read_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    return wide.view(-1).exp(), wide


NO_SOURCE: dict[str, tuple[Callable[[Tensor], Any], torch.dtype]] = {
    "read twice": (read_twice, torch.bfloat16),
    "float32 already": (lambda x: x.float().exp(), torch.float32),
    "float64": (lambda x: x.double().exp(), torch.bfloat16),
    "an addition": (lambda x: (x.float() + 1).exp(), torch.bfloat16),
    "detached, which ends a gradient": (lambda x: x.float().detach().exp(), torch.bfloat16),
    "repeated, whose gradient is a sum": (lambda x: x.float().expand(2, 3, 4).exp(), torch.bfloat16),
    "other numbers": (lambda x: x.float().view(torch.int32).float().exp(), torch.bfloat16),
}


@pytest.mark.parametrize("name", NO_SOURCE)
def test_what_isnt_such_a_value(name: str) -> None:
    f, dtype = NO_SOURCE[name]
    assert find_16_bit_source(exponent(f, torch.randn(3, 4).to(dtype))) is None


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


OTHERS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "written": (written, (12, 5)),
    "reused": (reused, (12, 5)),
    "probabilities": (lambda x: F.cross_entropy(x.float(), torch.rand(12, 5)), (12, 5)),
    "more dimensions": (lambda x: F.cross_entropy(x.float(), TARGET.view(3, 4)), (3, 5, 4)),
    "one row": (lambda x: F.cross_entropy(x.float(), torch.tensor(2)), (5,)),
    "float64": (lambda x: F.cross_entropy(x.double(), TARGET), (12, 5)),
    "16 bits": (lambda x: F.cross_entropy(x, TARGET), (12, 5)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_left_alone(name: str) -> None:
    f, shape = OTHERS[name]
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


def path_of(f: Any, x: Tensor) -> list[Node]:
    """The nodes between a value and the exponential of what `f` makes of it."""
    graph = settled(captured(lambda x: f(x).exp(), x, dtype=None)).graph
    return [node for node in graph.nodes if node.op == "call_function"][:-1]


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
    assert keep_rows_whole(path_of(f, low(3, 4, 5))) == whole


@pytest.mark.parametrize(("dim", "whole"), [(0, True), (1, True), (2, False), (-1, False), (-2, True)])
def test_a_number_of_each_row_is_no_row_even_if_there_are_as_many(dim: int, whole: bool) -> None:
    assert keep_rows_whole(path_of(lambda x: x.select(dim, 1), low(5, 5, 5))) == whole, "by size alone all would be"
