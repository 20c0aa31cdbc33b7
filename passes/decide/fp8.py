"""Which linear products run in 8 bits, of those whose rule asks for it, and what hinders the others.

A head doesn't unless an entry of the policy names its module: rounding there reaches a loss, or whoever reads the
model's results, at once. A head is a product whose result nothing but a loss, a softmax or outputs of the graph read,
with no other floating tensor combined with it on the way.
"""

import re
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import guard_or_false

from ampcompile.dtypes import FP8_MULTIPLE, LOW, short_name
from ampcompile.errors import warn_user
from ampcompile.passes.analysis.products import bias_of, operands, result_width
from ampcompile.passes.analysis.readers import is_floating
from ampcompile.passes.graph import Decision, op_name
from ampcompile.rules.table import Rule
from ampcompile.torch_private import processor, storages

from .decisions import Call

_RECIPES = {
    "fp8": "e4m3 with one scale per tensor, gradients e5m2",
    "fp8_e4m3": "e4m3 with one scale per tensor, gradients too",
    "fp8_rowwise": "e4m3 with one scale per row, gradients too; the weight's gradient in 16 bits",
}


_LOSS = re.compile("loss|entropy|softmax|logsumexp|kl_div|broadcast_tensors")
"""Names of losses, of softmaxes, and of what `mse_loss` and others begin with."""


def decide_fp8(
    call: Call, decision: Decision, rule: Rule, low: torch.dtype, products: str, outermost: bool, gradients: bool
) -> Decision:
    """Complete the decision about a linear product that a rule wants in fp8: quantized, or the reason against it.

    `outermost`: whether outputs of its graph are the program's, and not results of a body that other nodes read.
    `gradients`: whether the graph may have a backward. A varying number of rows then gets two graphs: one for
    multiples of 16, one for the others.
    """
    device, hindrance = _of_device(call, products), _of_call(call, rule.fp8, low)
    if not hindrance and not rule.named and _is_head(call.node, outermost):
        hindrance = "a head, as nothing but a loss or outputs of the graph read it, that no entry names by its module"
    if device or hindrance:
        because = f"{decision.because}; {device or hindrance}: {short_name(low)}"
        return replace(decision, because=because, unquantized="" if device else hindrance)
    because, rows = f"{decision.because}; {_RECIPES[rule.fp8]}", prod(_operands(call)[0].shape[:-1])
    if gradients and rule.fp8 != "fp8_rowwise" and not guard_or_false(rows % FP8_MULTIPLE == 0):
        because += f"; the weight's gradient in 16 bits: {rows} rows are no multiple of {FP8_MULTIPLE}"
    return replace(decision, because=because, fp8=rule.fp8)


def _is_head(product: Node, outermost: bool) -> bool:
    pending = [product]
    while pending:
        value = pending.pop()
        for user in value.users:
            if user.op == "output":
                if not outermost:
                    return False
            elif _LOSS.search(op_name(user.target)) is None and is_floating(user):
                if any(other is not value and is_floating(other) for other in user.all_input_nodes):
                    return False
                pending.append(user)
    return True


def _of_device(call: Call, products: str) -> str:
    if call.device_type == "cpu":
        hindrance = "" if products == "torch" else 'a CPU has no units for it, products="torch" computes its numbers'
    elif call.device_type == "cuda":
        hindrance = processor.hinders_fp8(_operands(call)[0].device)
    else:
        hindrance = f"not on {call.device_type}"
    if hindrance:
        _warn_of_device(hindrance)
    return hindrance


@cache
def _warn_of_device(hindrance: str) -> None:
    """Once a process: each graph and product has the same reason."""
    warn_user(f"the policy asks for fp8; {hindrance}. Its products run in 16 bits.")


def _of_call(call: Call, recipe: str, low: torch.dtype) -> str:
    values = {name: _value(call, name) for name in call.arguments}
    x, weight = _operands(call)
    if not isinstance(x, torch.Tensor) or not isinstance(weight, torch.Tensor) or weight.dim() != 2 or x.dim() < 2:
        return "not rows times a matrix"
    if any(type(value) not in _PLAIN or value.layout is not torch.strided for value in (x, weight)):
        return "an operand is of a tensor subclass"
    if low not in LOW or any(value.dtype not in (*LOW, torch.float32) for value in (x, weight)):
        return "an operand isn't of a floating type up to 32 bits"
    if values.get("alpha", 1) != 1 or values.get("beta", 1) != 1:
        return "alpha or beta isn't 1"
    if (bias := bias_of(values)) is not None and bias.dim() != 1:
        return "what is added isn't a row"
    for name, size in zip(("K", "N"), (x.shape[-1], result_width(values)), strict=True):
        if not isinstance(size, int):
            return f"{name} varies"
        if size % FP8_MULTIPLE or not size:
            return f"{name} = {size} is no multiple of {FP8_MULTIPLE}"
    return "products with a scale per row give bf16" if recipe == "fp8_rowwise" and low == torch.float16 else ""


def _operands(call: Call) -> tuple[Any, Any]:
    return operands({name: _value(call, name) for name in call.arguments})


def _value(call: Call, name: str) -> Any:
    argument = call.arguments[name]
    return call.values[argument] if isinstance(argument, Node) else argument


_PLAIN = (torch.Tensor, torch.nn.Parameter, storages.FakeTensor)
