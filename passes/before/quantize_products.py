"""Before differentiation: let the products that `assign_precision` has decided for fp8 multiply quantized operands.

`linear(x, to(weight, bf16))` becomes `fp8_linear(x, numbers, scale, weight, buffer)` of `kernels/fp8.py`: `quantize(x)`
gives the numbers and their scale, once for all products that read `x`, and `quantize_weight(weight)` the buffer, which
`hoist_weights` takes out of the graph as it does casts. A bias is added behind the product.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ampcompile.kernels.fp8 import BY_ROWS, FP8_LINEAR, QUANTIZE, QUANTIZE_WEIGHT
from ampcompile.passes.analysis.aliasing import Aliases
from ampcompile.passes.analysis.commuting import CAST
from ampcompile.passes.analysis.op_traits import REARRANGES, arguments_by_name, has
from ampcompile.passes.analysis.products import bias_of, operands
from ampcompile.passes.base import Pass
from ampcompile.passes.graph import Cast, call_on_values, cast_of, decision_of, erase_unread, graphs, note, op_name
from ampcompile.torch_private import tracing

ATEN = torch.ops.aten
SIZE = ATEN.sym_size.int


class _Graph:
    """One graph's products; `quantized`: the numbers and scales that several products may read, by what was cast."""

    def __init__(self, gm: GraphModule) -> None:
        self.graph, self.memory = gm.graph, Aliases(gm.graph)
        self.quantized: dict[Any, tuple[Node, Node]] = {}

    def replace(self, product: Node) -> None:
        """Put quantized operands before a product."""
        target: Any = product.target
        arguments = arguments_by_name(target, product.args, product.kwargs)
        x, matrix = operands(arguments)
        weight, transposed, path = _look_through(matrix, "weight" not in arguments)
        because, sizes = f"{op_name(target)} multiplies e4m3", x.meta["val"].shape
        recipe = decision_of(product).fp8
        by_rows = recipe == BY_ROWS
        with self.graph.inserting_before(product):
            rows = x if len(sizes) == 2 else self._call(product, ATEN.reshape.default, x, [-1, sizes[-1]])
            numbers, scale = self._quantize(x, rows, by_rows, product, because)
            buffer = self._call(product, QUANTIZE_WEIGHT, weight, by_rows)
            scales = "scales, one per row and column, are powers" if by_rows else "scale is a power"
            note(buffer, cast=Cast(op_name(target), f"{because}, the weight's {scales} of two"))
            result = self._call(product, FP8_LINEAR, rows, numbers, scale, weight, buffer, transposed, recipe)
            if rows is not x:
                leading = [n if isinstance(n, int) else self._call(product, SIZE, x, i) for i, n in enumerate(sizes)]
                result = self._call(
                    product, ATEN.reshape.default, result, [*leading[:-1], result.meta["val"].shape[-1]]
                )
            if (bias := bias_of(arguments)) is not None:
                result = self._call(product, ATEN.add.Tensor, result, bias)
        result.meta["amp"] = decision_of(product)
        product.replace_all_uses_with(result)
        erase_unread([*path, product])

    def _quantize(self, x: Node, rows: Node, by_rows: bool, product: Node, because: str) -> tuple[Node, Node]:
        """The numbers of `x` and their scale: those of another product, if nothing writes to what both cast."""
        source = x.args[0] if x.target is CAST and cast_of(x) is not None else x
        key = source, x.meta["val"].dtype, by_rows
        if key not in self.quantized:
            both = self._call(product, QUANTIZE, rows, by_rows)
            scaled = f"{'each row ' * by_rows}scaled by its largest magnitude"
            note(both, cast=Cast(op_name(product.target), f"{because}, {scaled}"))
            pair = self._call(product, operator.getitem, both, 0), self._call(product, operator.getitem, both, 1)
            if isinstance(source, Node) and self.memory.is_written(source):
                return pair
            self.quantized[key] = pair
        return self.quantized[key]

    def _call(self, product: Node, target: Any, *args: Any) -> Node:
        node = self.graph.call_function(target, args)
        node.meta = {key: value for key, value in product.meta.items() if key not in ("val", "amp", "amp_notes")}
        node.meta["val"] = call_on_values(node)
        return node


def _look_through(matrix: Node, transposed: bool) -> tuple[Node, bool, list[Node]]:
    """The matrix behind transpositions and our cast; whether its rows are features; the nodes passed, in order."""
    path: list[Node] = []
    while True:
        turns = _is_transposed(matrix)
        if not turns and (matrix.target is not CAST or cast_of(matrix) is None):
            return matrix, transposed, path
        path.insert(0, matrix)
        matrix, transposed = matrix.args[0], transposed ^ turns


def _is_transposed(view: Node) -> bool:
    if not has(view.target, REARRANGES) or not isinstance(view.args[0], Node):
        return False
    before, after = view.args[0].meta["val"], view.meta["val"]
    if not isinstance(before, torch.Tensor) or before.dim() != 2 or before.shape[::-1] != after.shape:
        return False
    return bool(before.stride()[::-1] == after.stride() != before.stride())


@dataclass(frozen=True)
class QuantizeProducts(Pass):
    """Returns the number of products. `gathered`: the weights that FSDP gathers, True for those that may be in fp8.

    Where there are some, a product that can't read gathered bytes isn't quantized.
    """

    gathered: Mapping[Node, bool]
    name = "quantize_products"
    exact = False
    fate = "quantized"

    def apply(self, gm: GraphModule) -> int:
        nodes = [node for part in graphs(gm) for node in part.graph.nodes]
        for product in nodes if self.gathered else ():
            decision = decision_of(product)
            if decision.fp8 and (hindrance := self._hindrance(decision.fp8)):
                because = f"{decision.because}; {hindrance}"
                product.meta["amp"] = replace(decision, fp8="", because=because, unquantized=hindrance)
            if hindrance := decision_of(product).unquantized:
                matrix = operands(arguments_by_name(product.target, product.args, product.kwargs))[1]
                note(_look_through(matrix, True)[0], unquantized=hindrance)  # a shard policy says so of the weight
        products = [node for node in nodes if decision_of(node).fp8]
        with tracing.on_fakes_of(gm):
            of_graphs = {product.graph: _Graph(product.graph.owning_module) for product in products}
            for product in products:
                of_graphs[product.graph].replace(product)
        return len(products)

    def _hindrance(self, recipe: str) -> str:
        if not all(self.gathered.values()):
            return "shard_policy was told fp8=False"
        return "FSDP gathers weights, and no gathered byte has scales of columns" if recipe == BY_ROWS else ""
