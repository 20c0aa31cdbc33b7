"""What passes share: regions, what may be cast, where a node came from."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ampcompile.passes.graph import (
    Regions,
    bodies,
    cast_of,
    device_type_of,
    graphs,
    is_castable,
    module_path,
    op_name,
    source_line,
)
from tests.compiling import HALF, LOW, amp

aten = torch.ops.aten


def test_regions_nest_per_device_and_a_copy_is_its_own():
    regions = Regions({"cpu": (True, LOW), "cuda": (False, HALF)})
    assert regions.precision("cpu") == LOW and regions.precision("cuda") is None and regions.precision("xpu") is None
    inner = regions.copy()
    inner.enter("cuda", LOW, True)
    inner.enter("cpu", None, False)
    assert inner.precision("cuda") == LOW and inner.precision("cpu") is None
    inner.enter("cpu", None, True)
    assert inner.precision("cpu") == LOW  # the dtype that was in force
    for _ in range(3):
        inner.leave()
    assert inner.key() == regions.key() and regions.precision("cpu") == LOW
    assert regions.off().precision("cpu") is None and regions.off().key() != regions.key()


CAST = {
    "float32": torch.ones(2),
    "float16": torch.ones(2, dtype=HALF),
    "a parameter": nn.Parameter(torch.ones(2, dtype=LOW)),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}
KEPT = {
    **{str(dtype): torch.ones(2, dtype=dtype) for dtype in (torch.float64, torch.complex64, torch.int64, torch.bool)},
    "8 bits": torch.ones(2).to(torch.float8_e5m2),
    "sparse": torch.eye(2).to_sparse(),
    "a subclass that holds other tensors": TwoTensor(torch.ones(2), torch.ones(2)),
    "a number": 1.0,
    "nothing": None,
}


@pytest.mark.parametrize("name", [*CAST, *KEPT])
def test_what_may_be_cast(name):
    assert is_castable((CAST | KEPT)[name]) is (name in CAST)


def test_an_accelerators_autocast_acts_before_the_cpus():
    cpu, meta = torch.ones(1), torch.ones(1, device="meta")
    assert device_type_of([1, cpu, meta]) == "meta" and device_type_of([cpu]) == "cpu"
    assert device_type_of([None, 2.0]) is None


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.named = nn.ModuleDict({"a": nn.Linear(4, 4)})

    def forward(self, x):
        return self.named["a"](self.layers[0](x)).sin()


def test_where_a_node_came_from():
    model = nn.Sequential(Inner())
    run, recorder = amp(model)
    run(torch.randn(2, 4))
    nodes = [n for n in recorder.graphs[0].graph.graph.nodes if n.op == "call_function" and not cast_of(n)]
    found = {(op_name(n.target), module_path(n)) for n in nodes}
    assert {("aten.linear", "0.layers.0"), ("aten.linear", "0.named.a"), ("aten.sin", "0")} <= found
    (sin,) = [n for n in nodes if n.target is aten.sin.default]
    file, _, line = source_line(sin).rpartition(":")
    assert file == __file__ and "named" in Path(file).read_text().splitlines()[int(line) - 1]


def test_bodies_are_the_graphs_that_are_called():
    from torch.utils.checkpoint import checkpoint

    run, recorder = amp(lambda x: checkpoint(torch.sin, x, use_reentrant=False) + torch.tensor([1.0]))
    run(torch.randn(2, requires_grad=True))
    ((node, body),) = bodies(recorder.graphs[0].graph)
    assert node.op == "get_attr" and isinstance(body, torch.fx.GraphModule)


def test_a_graph_and_its_bodies_are_walked_each_once_callers_first():
    from torch.fx import Graph, GraphModule

    def calling(**bodies):
        graph = Graph()
        x = graph.placeholder("x")
        for name in bodies:
            x = graph.call_function(torch.ops.higher_order.invoke_subgraph, (graph.get_attr(name), name, x))
        graph.output((x,))
        return GraphModule(bodies, graph)

    inner = calling()
    middle, last = calling(inner=inner), calling(shared=inner)
    whole = calling(middle=middle, again=middle, last=last)
    assert list(graphs(whole)) == [whole, middle, inner, last]
    seen = []
    for graph in graphs(whole):  # goes by what is there when it comes to it
        seen.append(graph)
        if graph is whole:
            whole.last = inner
    assert seen == [whole, middle, inner]
