"""Random chains: fusing changes no bit of results or gradients, and none is further from float64 than eager autocast."""

import random
import uuid
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ampcompile.compiler import lower
from ampcompile.passes import pipeline
from ampcompile.passes.graph import graphs
from ampcompile.torch_private import dispatcher, lowering
from benchmarks.numbers import relative_error
from tests.behaviour.chains import INPUTS, Chain, together
from tests.compiling import HALF, HIGH, LOW, same_bits

COUNT = 30
"""Chains in one graph: each then compiles in a second or two."""
ALONE = {"max_fusion_size": 1, "pattern_matcher": False}


@dataclass(frozen=True)
class WriteAll:
    """Has every 16-bit value of a graph written to memory."""

    name = "write_all"
    exact = True
    fate = ""

    def apply(self, gm: GraphModule) -> int:
        nodes = [node for graph in graphs(gm) for node in graph.graph.find_nodes(op="call_function") if is_low(node)]
        for node in nodes:
            node.meta[lowering.WRITTEN] = True
        return len(nodes)


def is_low(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (LOW, HALF)
