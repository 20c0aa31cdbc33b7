"""Decide which dtype every op runs in. Writes `node.meta["amp"]`, a `Decision` with its reason, and nothing else.

Mixed precision answers one question for every op: in which dtype should its operands arrive? Eager autocast looks
the answer up in five lists, in the dispatcher, at every call. This pass decides once, on a graph in which each node
is an op as the user called it, and stores the decision on the node, where `explain` can read it.

The pass walks the graph in order with a fake tensor for every value. At each op it looks at three things. The
region: is autocast on here, for this device, and with which low-precision dtype? The user's `torch.autocast`
blocks are pairs of enter and exit nodes in the graph. The rule: the policy's for this op or for the module it was
called in, else that of the device's table. The operands: the dtypes that actually arrive, after all earlier
decisions. Running the op on the fakes, with its operands cast as decided, gives the dtypes that the next ops
receive; so dtypes propagate through the graph as they do at run time.

Most ops have no rule. They run in the dtypes that arrive, under torch's own type promotion. An op without a rule
from another library is marked unknown, and `explain` lists it.

One decision differs from eager autocast: the range guard. A finite constant which the low-precision type would
turn into infinity or zero (a mask of -1e9, an epsilon of 1e-8 in float16) keeps its op in float32, where eager
raises, overflows or divides by zero. With `range_guards=False` all decisions are eager's.

Casting per use, not per value, is deliberate: two uses of one weight get two casts, each cast passes its own
gradient back, and the gradients are summed in float32. The casts are merged after differentiation, when that no
longer changes a digit.

The bodies of higher-order ops are walked where they are called, with the dtypes of that call. A body shared by
calls that differ is decided once for each, on copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg

from ampcompile.errors import warn_user
from ampcompile.passes.analysis import higher_order
from ampcompile.passes.analysis.op_traits import CASTS, KNOWN_NAMESPACES, has, keeps_constants, set_arguments, writes
from ampcompile.passes.base import Pass
from ampcompile.passes.graph import (
    ENTER,
    EXIT,
    Decision,
    Regions,
    copy_graph,
    decision_of,
    device_type_of,
    held_tensors,
    is_castable,
    module_path,
    notes_of,
    placeholders,
    to_dtype,
)
from ampcompile.policy import Policy
from ampcompile.torch_private import pytree, tracing
from ampcompile.torch_private.dispatcher import HigherOrderOperator, OpOverload

from .decisions import Call, DtypeMemo, decide, prefer_traced
from .fp8 import decide_fp8
from .range_guards import guard, lengths

HOPS = higher_order.HOPS


class _Walk:
    """A walk over one graph in order, with its values; each body has a walk of its own."""

    def __init__(self, parent: AssignPrecision | _Walk, gm: GraphModule, regions: Regions) -> None:
        self.policy: Policy = parent.policy
        self.range_guards: bool = parent.range_guards
        self.products: str = parent.products
        self.walks: dict[GraphModule, dict[Any, _Walk]] = parent.walks if isinstance(parent, _Walk) else {}
        self.outermost = not isinstance(parent, _Walk)
        self.gradients: bool = parent.gradients if isinstance(parent, _Walk) else torch.is_grad_enabled()
        self.memo: DtypeMemo = parent.memo if isinstance(parent, _Walk) else DtypeMemo()
        self.gm, self.regions = gm, regions
        self.values: dict[Node, Any] = {}
        self.constants: dict[Node, float] = {}  # the largest finite magnitude in each constant tensor
        self.lengths = lengths(gm.graph) if self.range_guards else set()
        self.output: Any = None

    def run(self, inputs: list[Any]) -> None:
        arriving = iter(pytree.tree_leaves(inputs))  # a size that a custom function saves arrives as a tuple
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                decision = Decision("graph input", prefer_traced(node, next(arriving)))
                if (constant := notes_of(node).constant) is not None:
                    self.constants[node] = constant
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
            elif changes_state(node):
                decision = Decision("sets a mode, computes no value")
            else:
                decision = self._call(node)
            node.meta["amp"] = decision
            self.values[node] = decision.result
        self.output = decision.result

    def _call(self, node: Node) -> Decision:
        if node.op == "call_module":
            regions, part = self.regions.copy(), self.gm.get_submodule(str(node.target))
            if self.policy != Policy() and (entries := self.policy.entries_about(part.calls())):
                warn_user(
                    "in a transform of torch.func, or an operation that amp leaves alone, autocast's rules hold "
                    f"and the policy isn't followed: {', '.join(entries)}. Put ampcompile.precision on functions or "
                    "modules that are to run in another dtype."
                )
            result = part.run_on_fakes(regions, self._arguments(node.args))
            return Decision("left to the dispatcher's own autocast", result, regions=regions, known=False)
        if isinstance(node.target, HigherOrderOperator):
            return self._higher_order(node, node.target)
        if isinstance(node.target, OpOverload):
            return self._op(node, node.target)
        return self._leave_as_is(node, Decision("not an op on tensors"))

    def _op(self, node: Node, op: OpOverload) -> Decision:
        self._follow_constants(node, op)
        tensors = [self.values[n] for n in node.all_input_nodes if isinstance(self.values[n], torch.Tensor)]
        device_type = device_type_of(tensors)
        low = self.regions.precision(device_type) if device_type else None
        if device_type is None or low is None or not any(map(is_castable, tensors)):
            because = "autocast is off here" if low is None and device_type else "no floating operands"
            return self._leave_as_is(node, Decision(because))
        if has(op, CASTS):
            return self._leave_as_is(node, Decision("a cast that the user wrote stays as it is"))
        call = Call(node, op, self.values, device_type)
        rule = self.policy.rule_for(op, device_type, module_path(node))
        if rule is not None:
            decision = decide(call, rule, low)
            if rule.fp8:
                decision = decide_fp8(call, decision, rule, low, self.products, self.outermost, self.gradients)
        elif op.namespace in KNOWN_NAMESPACES:
            decision = Decision("autocast leaves it alone: runs in the dtypes that arrive")
        else:
            decision = Decision("unknown to the policy", known=False)
        if self.range_guards:
            decision = guard(call, decision, self.constants, self.lengths)
        untouched = rule is None and not decision.operands and not decision.arguments
        return self._leave_as_is(node, decision) if untouched else self._carry_out(node, decision)

    def _follow_constants(self, node: Node, op: OpOverload) -> None:
        source = next(iter(node.all_input_nodes), node)
        if keeps_constants(op):
            if source in self.constants:
                self.constants[node] = self.constants[source]
        elif writes(op) and source in self.constants:
            self.constants.clear()  # values that alias it change too

    def _higher_order(self, node: Node, hop: HigherOrderOperator) -> Decision:
        decision = Decision("its bodies are rewritten")
        if hop is HOPS.flex_attention and (low := self.regions.precision(self.values[node.args[0]].device.type)):
            operands = {n: low for n in node.args[:3] if is_castable(self.values[n]) and self.values[n].dtype != low}
            decision = Decision("attention runs in low precision", operands=operands)
        args, kwargs = self._arguments((node.args, node.kwargs), decision.operands)
        walks: list[_Walk] = []
        copies: dict[Node, GraphModule] = {}
        for body, attribute in higher_order.each_body(hop, node.args):
            regions = self.regions.copy() if body.autocast else self.regions.off()
            inputs = body.inputs(args, [walk.output for walk in walks])
            walks.append(self._body(self.values[attribute], inputs, regions, node))
            if walks[-1].gm is not self.values[attribute]:
                copies[attribute] = walks[-1].gm
        agreed = higher_order.agreed_outputs(hop, args, [walk.output for walk in walks])
        outputs = [walk.set_output_dtypes(dtypes) for walk, dtypes in zip(walks, agreed, strict=True)]
        result = higher_order.fake_result(hop, args, kwargs, outputs, node.meta.get("val"))
        return replace(decision, bodies=copies, result=result)

    def _body(self, gm: GraphModule, inputs: list[Any], regions: Regions, node: Node) -> _Walk:
        """Walk a body, or a copy if it has decisions for other dtypes; only calls of `invoke_subgraph` share a walk."""
        dtypes = tuple(value.dtype if isinstance(value, torch.Tensor) else None for value in inputs)
        key = (dtypes, regions.key(), None if node.target is HOPS.invoke_subgraph else node)
        walks = self.walks.setdefault(gm, {})
        if key not in walks:
            walks[key] = _Walk(self, copy_graph(gm) if walks else gm, regions)
            walks[key].run(inputs)
        return walks[key]

    def set_output_dtypes(self, dtypes: list[torch.dtype | None]) -> Any:
        """Cast the graph's outputs to these dtypes (None: as they are) and return the fake outputs."""
        node = self.gm.graph.output_node()
        nodes = pytree.tree_leaves(node.args[0])
        wanted = [(n, to) for n, to in zip(nodes, dtypes, strict=True) if isinstance(n, Node) and to is not None]
        casts = {n: to for n, to in wanted if self.values[n].dtype != to}
        if casts:
            because = "every branch, and every round of a loop, gives the same dtypes"
            self.output = pytree.tree_map(lambda n: to_dtype(self.values.get(n, n), casts.get(n)), node.args[0])
            node.meta["amp"] = Decision(because, self.output, operands=casts)
        return self.output

    def _leave_as_is(self, node: Node, decision: Decision) -> Decision:
        """Complete the decision for an unchanged call; if its operands are unchanged too, its traced value is valid."""
        if "val" in node.meta and all(self.values[n] is n.meta.get("val") for n in node.all_input_nodes):
            return replace(decision, result=node.meta["val"])
        return self._carry_out(node, decision)

    def _carry_out(self, node: Node, decision: Decision) -> Decision:
        """Complete a decision with the fake value that the call then gives."""

        def compute() -> Any:
            args, kwargs = self._arguments((node.args, node.kwargs), decision.operands)
            target = decision.target or node.target
            if decision.arguments:
                args, kwargs = set_arguments(target, args, kwargs, decision.arguments)
            if node.op == "call_method":
                result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                result = target(*args, **kwargs)
            if decision.narrow is None:
                return result
            return pytree.tree_map(lambda v: to_dtype(v, decision.narrow) if is_castable(v) else v, result)

        return replace(decision, result=self.memo.result(node, decision, self.values, compute))

    def _arguments(self, structure: Any, casts: Mapping[Node, torch.dtype] | None = None) -> Any:
        return map_arg(structure, lambda n: to_dtype(self.values[n], (casts or {}).get(n)))

    def _constant(self, node: Node) -> Any:
        value = getattr(self.gm, str(node.target))
        if not isinstance(value, torch.Tensor):
            return value
        if node.target not in held_tensors(self.gm):
            self.constants[node] = tracing.largest_magnitude(value)
        return node.meta["val"]


@dataclass(frozen=True)
class AssignPrecision(Pass):
    """`regions`: the autocast state around the graph; `products`: the option. Returns the number of ops with an operand
    to cast."""

    policy: Policy
    regions: Regions
    range_guards: bool = True
    products: str = "auto"
    name = "assign_precision"

    def apply(self, gm: GraphModule) -> int:
        walk = _Walk(self, gm, self.regions.copy())
        with tracing.on_fakes_of(gm), torch.no_grad():
            walk.run([node.meta["val"] for node in placeholders(gm)])
        walked = [walk, *(other for walks in walk.walks.values() for other in walks.values())]
        return sum(bool(decision_of(node).operands) for w in walked for node in w.gm.graph.nodes)


def changes_state(node: Node) -> bool:
    """True if a captured node only sets a mode: grad mode, inference mode, the choice of attention kernels."""
    of_op = isinstance(node.target, OpOverload | HigherOrderOperator)
    return node.op == "call_function" and not of_op and node.meta.get("val", node) is None
