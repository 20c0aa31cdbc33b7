"""After differentiation, on CPUs: run products in float32, rounded as before, where 16-bit kernels are slower.

They are slower where the CPU only emulates the type, which takes 1.1 to 130 times as long, and for small products,
whose start takes longest. Operands are rounded already, and products of 11-bit mantissas are exact in float32: float32
kernels sum the same terms as units for the type, and one rounding at the end gives eager's dtype. Inductor fuses the
widening and the rounding with neighbouring ops; weights whose copies are held as float32 need no widening at all.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg
from torch.utils.flop_counter import flop_registry

from ampcompile.dtypes import LOW
from ampcompile.kernels import packed_linear
from ampcompile.kernels.packed_conv import PACKED_CONV
from ampcompile.kernels.packed_linear import PACKED_LINEAR
from ampcompile.passes.analysis.aliasing import is_row
from ampcompile.passes.analysis.commuting import CONVERT, look_through, rebuild, same_layout
from ampcompile.passes.analysis.op_traits import ATTENTION_AFTER, CONVERSIONS_AFTER, PRODUCTS_AFTER, REARRANGES, has
from ampcompile.passes.analysis.products import DENSE, WideProducts, is_dense, is_small, numbers_of
from ampcompile.passes.base import EachGraph
from ampcompile.passes.graph import insert_call, note, notes_of, replace_node
from ampcompile.torch_private import dispatcher, processor
from ampcompile.torch_private.pytree import tensors_in
from ampcompile.torch_private.tracing import product_hint

ATEN = torch.ops.aten
WIDE = torch.float32
ATTENTION_BACKWARD = ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
FEWEST_ROWS, SMALLEST = 8, 1 << 22
"""Rows, and multiplications, from which oneDNN's float32 product was measured to be faster than MKL's on an AMD
processor: up to 2.3 times with AVX-512, where MKL has AVX2 code alone, and 1.1 times with AVX2. On Intel's they are
equal, but for a transposed left matrix, as in gradients of weights, of which oneDNN takes 1.1 to 2.9 times as long."""


@dataclass(frozen=True)
class WidenProducts(EachGraph):
    """For a joint or inference graph; `wide`: the products to widen. Returns their number.

    A product that reads a weight's copy held as float32 is one of them.
    """

    wide: WideProducts
    name = "widen_products"
    exact = False  # float32 kernels add in another order than 16-bit kernels

    def rewrite(self, gm: GraphModule) -> int:
        widened = 0
        for node in list(gm.graph.nodes):
            if has(node.target, PRODUCTS_AFTER) and self._is_slow(node):
                widened += _widen(node)
        return widened

    def _is_slow(self, product: Node) -> bool:
        dtypes = {operand.meta["val"].dtype for operand in product.all_input_nodes if _is_low(operand)}
        if not dtypes:
            return False
        if has(product.target, ATTENTION_AFTER):
            return not dtypes.isdisjoint(self.wide.all | self.wide.dense) and _is_dense_attention(product)
        if not dtypes.isdisjoint(self.wide.all) or _reads_or_writes_float32(product):
            return True
        if product.target is ATEN.convolution_backward.default and torch.float16 in dtypes:
            return True  # oneDNN has no such kernel, and ATen's own takes 50 to 200 times as long
        dense = not dtypes.isdisjoint(self.wide.dense)
        count = _count(product) if dense or self.wide.small else None
        return count is not None and ((dense and is_dense(*count)) or (self.wide.small and is_small(*count)))


def _is_dense_attention(product: Node) -> bool:
    """True if attention takes longer to compute than its operands to be widened.

    Numbers of each side are read as often as the other side is long. torch's kernel starts fast in every type, emulates
    none, and is at most 1.6 times as fast in float32; one token's attention to 1,024 takes 2.4 to 9 times as
    long with keys and values widened.
    """
    first = product.target is ATTENTION_BACKWARD
    query, key = (operand.meta["val"] for operand in product.args[first : first + 2])
    queries, keys = product_hint(query.shape[-2]), product_hint(key.shape[-2])
    return queries is not None and keys is not None and queries * keys >= DENSE * (queries + keys)


def _is_low(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in LOW and value.device.type == "cpu"


def _reads_or_writes_float32(product: Node) -> bool:
    """True if a product of 16-bit operands reads a weight's copy held as float32, or has a float32 result."""
    if product.target in (PACKED_LINEAR, PACKED_CONV) and not _is_low(product.args[2]):
        return True
    if dispatcher.without_out_dtype(product.target, product.args)[0] is not product.target:
        return True
    return any(_held_in_float32(operand) for operand in product.all_input_nodes)


def _count(product: Node) -> tuple[int | torch.SymInt, int | torch.SymInt] | None:
    """A product's multiplications, and the elements of its operands and result; None without a formula."""
    formula = flop_registry.get(product.target.overloadpacket)
    if formula is None:
        return None
    args, kwargs = map_arg((product.args, product.kwargs), lambda operand: operand.meta["val"])
    result = product.meta["val"]
    return formula(*args, **kwargs, out_val=result) // 2, numbers_of((args, kwargs, result))


def _widen(node: Node) -> bool:
    """Replace `node` by the product in float32, unless its results would have another layout."""
    target, args = dispatcher.without_out_dtype(node.target, node.args)

    def wide_fake(operand: Node) -> Any:
        return operand.meta["val"].to(WIDE) if _is_low(operand) else operand.meta["val"]

    wide_fakes = target(*map_arg(args, wide_fake), **map_arg(node.kwargs, wide_fake))
    values = zip(tensors_in(node.meta["val"]), tensors_in(wide_fakes), strict=True)
    if target is node.target and not all(same_layout(before, after) for before, after in values):
        return False  # a product with a float32 result is always replaced: the CPU has no kernel for it
    graph = node.graph
    with graph.inserting_before(node):
        args, kwargs = map_arg((args, node.kwargs), _widened)
        if _suits_onednn(target, args, kwargs):
            target, args, kwargs = PACKED_LINEAR, _as_linear(args), {}
        new = graph.call_function(target, args, kwargs)
        new.meta = {**node.meta, "val": wide_fakes}
        note(new, widened=True)
        if isinstance(wide_fakes, torch.Tensor):
            node.replace_all_uses_with(_converted(new, node.meta["val"].dtype))
    for part in list(node.users):  # of a product with several results
        with graph.inserting_before(part):
            result = graph.call_function(operator.getitem, (new, part.args[1]))
            result.meta = {**part.meta, "val": wide_fakes[part.args[1]]}
            replace_node(part, _converted(result, part.meta["val"].dtype))
    graph.erase_node(node)
    return True


def _widened(operand: Node) -> Node:
    """An operand in float32: a weight's copy itself if it is held as float32, else a cast."""
    if not _is_low(operand):
        return operand
    held = _held_in_float32(operand)
    return _converted(operand, WIDE) if held is None else rebuild(held[1], held[0])


def _held_in_float32(operand: Node) -> tuple[Node, list[Node]] | None:
    """Of a 16-bit operand that reads a weight's copy held as float32: the copy, and the views; else None."""
    base, path = look_through(operand, lambda node: has(node.target, REARRANGES))
    if has(base.target, CONVERSIONS_AFTER) and notes_of(base.args[0]).rounded is base.meta["val"].dtype:
        return base.args[0], path
    return None


def _suits_onednn(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if oneDNN's float32 kernel supports a product, and is the faster one."""
    if target not in (ATEN.mm.default, ATEN.addmm.default) or not packed_linear.available(WIDE):
        return False
    if processor.suits_mkl():
        return False
    *added, a, b = args
    rows, depth = a.meta["val"].shape
    columns = b.meta["val"].shape[1]
    if kwargs or not all(is_row(bias, columns) for bias in added):
        return False  # oneDNN reads a bias as numbers side by side, one for each column
    return (product_hint(rows) or 0) >= FEWEST_ROWS and (product_hint(rows, depth, columns) or 0) >= SMALLEST


def _as_linear(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `PACKED_LINEAR` for those of an `mm` or `addmm`, with the second matrix transposed."""
    *added, a, b = args
    if b.target is ATEN.t.default or (b.target is ATEN.permute.default and b.args[1][0] % 2 == 1):
        transposed = b.args[0]  # a permutation that starts with dimension 0, or -2, transposes nothing
    else:
        transposed = insert_call(b.graph, ATEN.permute.default, b, [1, 0])
    return (a, transposed, transposed, *(added or [None]))


def _converted(node: Node, dtype: torch.dtype) -> Node:
    """`node` in a dtype, by a cast at the graph's insertion point if needed."""
    if node.meta["val"].dtype == dtype:
        return node
    cast = insert_call(node.graph, CONVERT, node, dtype)
    note(cast, widened=True)
    return cast
