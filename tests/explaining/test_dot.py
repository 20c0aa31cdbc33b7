"""Graphviz's form: every op stands in its module's cluster, every cast is an edge that says its size."""

import re
import shutil
import subprocess

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.explaining.report import Report

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        torch._dynamo.graph_break()
        return (y @ y).cumsum(0)


@pytest.fixture
def report() -> Report:
    return ampcompile.explain(Model(), policy="op cumsum=fp32", outputs="autocast")(torch.randn(4, 4))


def test_ops_stand_in_their_modules(report: Report) -> None:
    lines = report.to_graphviz().splitlines()
    depth = 0
    stack: list[str] = []
    where = {}
    for line in lines:
        if line.startswith("subgraph"):
            stack.append(line.split('"')[1])
        elif line == "}" and stack:
            stack.pop()
        elif found := re.match(r'"([^"]+)" \[label="([^"\\]+)', line):
            where[found[1]] = (stack[-1] if stack else "", found[2])
        depth += line.count("{") - line.count("}")
    assert depth == 0
    assert where["0/linear"] == ("cluster_0.inner.0", "aten.linear")
    assert where["0/softmax"] == ("cluster_0.inner.1", "aten.softmax")
    assert where["1/matmul"] == ("cluster_1", "aten.matmul")


def test_casts_are_edges_with_sizes(report: Report) -> None:
    text = report.to_graphviz()
    edges = re.findall(r'^"([^"]+)" -> "([^"]+)"(.*);$', text, re.MULTILINE)
    declared = set(re.findall(r'^"([^"]+)" \[label', text, re.MULTILINE))
    assert {end for a, b, _ in edges for end in (a, b)} <= declared
    cast = {b: style for _, b, style in edges if "color=red" in style and "dashed" not in style}
    assert set(cast) == {"0/linear", "1/cumsum"}
    assert 'label="96 B"' in cast["1/cumsum"]
    assert sum("dashed" in style for *_, style in edges) == 2, "the weight and the bias"
    assert ("0/linear", "0/softmax", "") in edges


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz (Debian: apt install graphviz): no dot found")
def test_graphviz_draws_it(report: Report) -> None:
    drawn = subprocess.run(["dot", "-Tsvg"], input=report.to_graphviz(), text=True, capture_output=True, timeout=120)
    assert drawn.returncode == 0 and drawn.stderr == ""
    assert "aten.softmax" in drawn.stdout
