"""Decide which dtype every op runs in. Writes `node.meta["amp"]`, a `Decision` with its reason, and nothing else.

Mixed precision is one question asked of every op: in which dtype should its operands arrive? Eager autocast asks
it in the dispatcher, at every call, of five lists. Here it is asked once, of a graph in which each node is an op
as the user called it, and the answer is kept where it can be read.

The pass walks the graph in order with a fake tensor for every value. At each op it looks at three things. The
region: is autocast on here, for this device, and with which low-precision dtype? The user's `torch.autocast`
blocks are nodes of the graph and are followed like brackets. The rule: what the policy says of this op, of the
module it was called in, or what the device's table says. The operands: the dtypes that actually arrive, after
everything decided so far. Running the op on the fakes, with its operands cast as decided, gives the dtypes that
the next ops see; so a decision made here moves on through the graph as it would at run time.

Most ops have no rule. They run in whatever arrives, and torch's own promotion decides. An op that appears in no
table and belongs to somebody else's library is marked unknown, for `explain` to list.

One thing is decided against eager autocast: the range guard. A finite constant which the low-precision type would
turn into infinity (a mask of -1e9 in float16) keeps its op in float32, where eager raises or overflows. With
`range_guards=False` eager's decisions are taken to the letter.

Casting per use, not per value, is deliberate: two uses of one weight get two casts, each cast passes its own
gradient back, and the gradients are summed in float32. The casts are merged after differentiation, when that no
longer changes a digit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node, map_arg
from torch.utils import _pytree as pytree

from ampcompile import compat
from ampcompile.dtypes import FLOATS, short_name, widest
from ampcompile.errors import BannedOpError
from ampcompile.policy import Policy
from ampcompile.rules import Rule

from . import higher_order
from .graph import (
    ENTER,
    EXIT,
    Decision,
    Regions,
    castable,
    device_type_of,
    module_path,
    op_name,
    set_arguments,
    source_line,
)
from .range_guards import out_of_range

_CASTS = frozenset({"aten::to", "aten::_to_copy", "aten::type_as", "aten::copy_"})
_BORN_KNOWN = frozenset({"aten", "prims", "prim", "ampcompile", "_c10d_functional", "c10d_functional"})
HOPS = higher_order.HOPS


class _Walk:
    """One graph with its values; bodies of higher-order ops are walks of their own."""

    def __init__(self, policy: Policy, regions: Regions, range_guards: bool) -> None:
        self.policy, self.regions, self.range_guards = policy, regions, range_guards
        self.decided = 0

    def run(self, gm: GraphModule, inputs: list[Any]) -> Any:
        self.gm, self.values = gm, dict[Node, Any]()
        arriving = iter(inputs)
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                decision = Decision("graph input", next(arriving))
            elif node.op == "get_attr":
                decision = Decision("constant", self._constant(node))
            elif node.op == "output":
                decision = Decision("graph output", self._arguments(node.args[0]))
            elif node.target is ENTER:
                device_type, dtype, enabled = node.args[:3]
                self.regions.enter(device_type, dtype, enabled)
                decision = Decision("autocast region begins")
            elif node.target is EXIT:
                self.regions.leave()
                decision = Decision("autocast region ends")
            else:
                decision = self._call(node)
                self.decided += bool(decision.operands)
            node.meta["amp"] = decision
            self.values[node] = decision.result
        return decision.result

    def _call(self, node: Node) -> Decision:
        if node.op == "call_module":
            regions = self.regions.copy()
            result = self.gm.get_submodule(str(node.target)).run(regions, *self._arguments(node.args))
            return Decision("left to the dispatcher's own autocast", result, regions=regions, known=False)
        if isinstance(node.target, HigherOrderOperator):
            return self._higher_order(node, node.target)
        if isinstance(node.target, OpOverload):
            return self._op(node, node.target)
        return self._carried_out(node, Decision("not an op on tensors"))

    def _op(self, node: Node, op: OpOverload) -> Decision:
        tensors = [self.values[n] for n in node.all_input_nodes if isinstance(self.values[n], torch.Tensor)]
        device_type = device_type_of(tensors)
        low = self.regions.precision(device_type) if device_type else None
        if low is None or not any(map(castable, tensors)):
            because = "autocast is off here" if low is None and device_type else "no floating operands"
            return self._carried_out(node, Decision(because))
        assert device_type is not None
        if op._schema.name in _CASTS:
            return self._carried_out(node, Decision("a cast or copy the user wrote stays as it is"))
        rule = self.policy.rule_for(op, device_type, module_path(node))
        decision = self._by_rule(node, op, rule, tensors, low)
        if self.range_guards:
            decision = self._guarded(node, op, decision)
        return self._carried_out(node, decision)

    def _by_rule(self, node: Node, op: OpOverload, rule: Rule | None, tensors: list[Any], low: torch.dtype) -> Decision:
        if rule is None:
            known = op.namespace in _BORN_KNOWN
            return Decision(
                "no rule: runs in the dtypes that arrive" if known else "unknown to the policy", known=known
            )
        if rule.category == "banned":
            raise BannedOpError(
                f"{op_name(op)} at {source_line(node) or 'an unknown line'} is unsafe in mixed precision "
                f"({rule.because}). Use its numerically safe form, as torch.nn.functional.binary_cross_entropy_with_"
                "logits, or call it inside torch.autocast(device_type, enabled=False)."
            )
        arriving = [tensor.dtype for tensor in tensors]
        if rule.asks_float32(arriving):
            return self._asking_float32(node, op, rule)
        dtype = rule.operand_dtype(arriving, low)
        if dtype is None:
            return Decision(rule.because)
        followers = self._followers(node, op, rule, dtype)
        operands = {
            n: followers.get(n, dtype)
            for n in node.all_input_nodes
            if castable(self.values[n]) and self.values[n].dtype != followers.get(n, dtype)
        }
        return Decision(rule.because, operands=operands, narrow=low if rule.category == "fp32_inside" else None)

    def _asking_float32(self, node: Node, op: OpOverload, rule: Rule) -> Decision:
        if rule.redispatch:
            namespace, _, name = rule.redispatch.partition("::")
            packet, _, overload = name.partition(".")
            target = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
            return Decision(rule.because, target=target, arguments={"dtype": torch.float32})
        if self._bound(node, op).get("dtype") is not None:
            return Decision("the user asked for a dtype")
        return Decision(rule.because, arguments={"dtype": torch.float32})

    def _followers(self, node: Node, op: OpOverload, rule: Rule, dtype: torch.dtype) -> dict[Node, torch.dtype]:
        """Operands that take the dtype another one ends up in, as attention's mask takes the query's."""
        bound, found = self._bound(node, op), {}
        for name, leader in rule.follows:
            argument, lead = bound.get(name), bound.get(leader)
            if isinstance(argument, Node) and isinstance(lead, Node) and isinstance(self.values[lead], torch.Tensor):
                found[argument] = dtype if castable(self.values[lead]) else self.values[lead].dtype
        return found

    def _guarded(self, node: Node, op: OpOverload, decision: Decision) -> Decision:
        dtypes = {n: decision.operands.get(n, v.dtype) for n in node.all_input_nodes if castable(v := self.values[n])}
        low = widest(dtypes.values())
        constant = out_of_range(op, self._bound(node, op), low)
        if constant is None or low is None:
            return decision
        name, value, clamped = constant
        if op._schema.is_mutable:
            because = f"range guard: {name}={value:g} doesn't fit {short_name(low)}, whose largest number is taken"
            return replace(decision, because=because, arguments={name: clamped})
        because = f"range guard: {name}={value:g} doesn't fit {short_name(low)}"
        operands = {n: torch.float32 for n in dtypes if self.values[n].dtype != torch.float32}
        return Decision(because, operands=operands)

    def _higher_order(self, node: Node, hop: HigherOrderOperator) -> Decision:
        decision = Decision("its bodies are rewritten")
        if hop is HOPS.flex_attention and (low := self.regions.precision(self.values[node.args[0]].device.type)):
            operands = {n: low for n in node.args[:3] if castable(self.values[n]) and self.values[n].dtype != low}
            decision = Decision("attention runs in low precision", operands=operands)
        args, kwargs = self._arguments((node.args, node.kwargs), decision.operands)
        outputs: list[Any] = []
        walked: list[GraphModule] = []
        for body, graph in higher_order.each_body(hop, args):
            regions = self.regions.copy() if body.autocast else self.regions.off()
            walk = _Walk(self.policy, regions, self.range_guards)
            outputs.append(walk.run(graph, body.inputs(args, kwargs, outputs)))
            walked.append(graph)
            self.decided += walk.decided
        return replace(decision, result=self._hop_result(node, hop, args, kwargs, walked, outputs))

    def _hop_result(
        self, node: Node, hop: Any, args: Any, kwargs: Any, walked: list[GraphModule], outputs: list[Any]
    ) -> Any:
        if hop in (HOPS.tag_activation_checkpoint, HOPS.invoke_subgraph):
            return outputs[0]
        if hop is HOPS.autograd_function_apply:
            return outputs[0][0]
        if hop is HOPS.cond:  # both branches give one dtype: the widest
            pairs = zip(*map(pytree.tree_leaves, outputs), strict=True)
            dtypes = [_common(pair) for pair in pairs]
            for graph in walked:
                _require_outputs(graph, dtypes, "both branches of a cond give the same dtype")
            leaves, spec = pytree.tree_flatten(node.meta["val"])
            return pytree.tree_unflatten([_as(v, d) for v, d in zip(leaves, dtypes, strict=True)], spec)
        if hop is HOPS.while_loop:
            dtypes = [v.dtype if isinstance(v, torch.Tensor) else None for v in pytree.tree_leaves(args[2])]
            _require_outputs(walked[1], dtypes, "a value carried round a while_loop keeps its dtype")
            leaves, spec = pytree.tree_flatten(node.meta["val"])
            return pytree.tree_unflatten([_as(v, d) for v, d in zip(leaves, dtypes, strict=True)], spec)
        return higher_order.call_on_fakes(hop, args, kwargs)

    def _carried_out(self, node: Node, decision: Decision) -> Decision:
        """The decision with the fake value that comes of it."""
        args, kwargs = self._arguments((node.args, node.kwargs), decision.operands)
        target = decision.target or node.target
        if decision.arguments:
            args, kwargs = set_arguments(target, args, kwargs, decision.arguments)
        if node.op == "call_method":
            result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            result = target(*args, **kwargs)
        if decision.narrow is not None and castable(result):
            result = result.to(decision.narrow)
        return replace(decision, result=result)

    def _arguments(self, structure: Any, casts: Mapping[Node, torch.dtype] | None = None) -> Any:
        return map_arg(structure, lambda n: _as(self.values[n], (casts or {}).get(n)))

    def _bound(self, node: Node, op: OpOverload) -> dict[str, Any]:
        return dict(zip((a.name for a in op._schema.arguments), node.args, strict=False)) | dict(node.kwargs)

    def _constant(self, node: Node) -> Any:
        value = getattr(self.gm, str(node.target)) if "." not in str(node.target) else node.meta.get("val")
        return node.meta["val"] if isinstance(value, torch.Tensor) and "val" in node.meta else value


def _as(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if dtype is not None and isinstance(value, torch.Tensor) and value.dtype != dtype else value


def _common(values: tuple[Any, ...]) -> torch.dtype | None:
    dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor)}
    return widest(dtypes) if len(dtypes) > 1 and dtypes <= FLOATS else None


def _require_outputs(graph: GraphModule, dtypes: list[torch.dtype | None], because: str) -> None:
    output = graph.graph.output_node()
    leaves = pytree.tree_leaves(output.args[0], is_leaf=lambda x: isinstance(x, Node))
    values = pytree.tree_leaves(output.meta["amp"].result)
    operands = {
        leaf: dtype
        for leaf, value, dtype in zip(leaves, values, dtypes, strict=True)
        if dtype is not None and isinstance(leaf, Node) and value.dtype != dtype
    }
    output.meta["amp"] = replace(output.meta["amp"], because=because, operands=operands)


@dataclass(frozen=True)
class AssignPrecision:
    """`regions`: the autocast state around the graph. Returns the number of ops with an operand to cast."""

    policy: Policy
    regions: Regions
    range_guards: bool = True
    name = "assign_precision"
    exact = True

    def apply(self, gm: GraphModule) -> int:
        inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        walk = _Walk(self.policy, self.regions.copy(), self.range_guards)
        grad = torch.is_grad_enabled()
        with compat.on_fakes_of(gm):
            walk.run(gm, inputs)
        torch.set_grad_enabled(grad)
        return walk.decided
