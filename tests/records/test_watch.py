"""A graph is followed from pass to pass: what became of each cast, what is left, and under which autocast it ran."""

import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.records.casts import GraphRecord


def record(f, *args: Tensor, **options) -> GraphRecord:
    [graph] = ampcompile.explain(f, **options)(*args).graphs
    return graph


def double(x: Tensor) -> Tensor:
    return x @ x


def test_a_graph_says_under_which_autocast_it_was_traced() -> None:
    x = torch.randn(2, 2)
    assert record(double, x).precision == "cpu in bf16"
    assert record(double, x, dtype=torch.float16).precision == "cpu in f16"
    with torch.autocast("cpu", torch.float16):
        assert record(double, x).precision == "cpu in f16"
    with torch.autocast("cpu", enabled=False):
        assert record(double, x).precision == "cpu without autocast"
    assert record(double, x.to("meta")).precision == "meta without autocast"


def test_every_pass_since_the_casts_is_in_the_totals() -> None:
    found = record(double, torch.randn(2, 2, requires_grad=True))
    stages = [total.stage for total in found.totals]
    assert stages[:3] == ["eager autocast, forward", "eager autocast, backward", "insert_casts"]
    joint = [stage for stage in stages if stage.endswith("forward and backward")]
    assert joint[0] == "differentiated: forward and backward" and len(joint) > 3
    assert stages.index("insert_casts") < stages.index(joint[0]) == len(stages) - len(joint)
    done = [applied.name for applied in found.history]
    assert done.index("assign_precision") < done.index("insert_casts")
    assert [stage for stage in stages[2 : -len(joint)]] == done[done.index("insert_casts") :]


def test_inputs_that_dynamo_knows_as_parameters_or_buffers_are_weights() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 2))
            self.register_buffer("table", torch.randn(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight @ self.table

    assert [cast.of for cast in record(Both(), torch.randn(2, 2), outputs="autocast").casts] == [
        "input",
        "weight",
        "weight",
    ]
