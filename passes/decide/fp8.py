"""Which linear products can run in 8 bits, of those whose rule asks for it, and what hinders the others."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from ampcompile.dtypes import FP8_MULTIPLE, LOW, short_name
from ampcompile.errors import AmpWarning
from ampcompile.passes.analysis.linear_products import bias_of, operands, result_width
from ampcompile.passes.graph import Decision
from ampcompile.torch_private import storages

from .decisions import Call

UNITS = (8, 9)
"""The first compute capability with products of 8-bit floats: Ada; Hopper has 9.0."""


def decide_fp8(call: Call, decision: Decision, low: torch.dtype, products: str) -> Decision:
    """Complete the decision about a linear product that a rule wants in fp8: quantized, or the reason against it."""
    hindrance = _of_device(call, products) or _of_call(call, low)
    if hindrance:
        return replace(decision, because=f"{decision.because}; {hindrance}: {short_name(low)}")
    return replace(decision, because=f"{decision.because}; e4m3 with one scale per tensor, gradients e5m2", fp8=True)


def _of_device(call: Call, products: str) -> str:
    if call.device_type == "cpu":
        hindrance = "" if products == "torch" else 'a CPU has no units for it, products="torch" computes its numbers'
    elif call.device_type == "cuda":
        found = torch.cuda.get_device_capability()
        hindrance = (
            "" if found >= UNITS else f"this GPU, sm_{found[0]}{found[1]}, has no units for it, sm_89 is the first"
        )
    else:
        hindrance = f"not on {call.device_type}"
    if hindrance:
        _warn_of_device(hindrance)
    return hindrance


@cache
def _warn_of_device(hindrance: str) -> None:
    """Once a process: each graph and product has the same reason."""
    warnings.warn(f"the policy asks for fp8; {hindrance}. Its products run in 16 bits.", AmpWarning, stacklevel=2)


def _of_call(call: Call, low: torch.dtype) -> str:
    values = {name: _value(call, name) for name in call.arguments}
    x, weight = operands(values)
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
    return ""


def _value(call: Call, name: str) -> Any:
    argument = call.arguments[name]
    return call.values[argument] if isinstance(argument, torch.fx.Node) else argument


_PLAIN = (torch.Tensor, torch.nn.Parameter, storages.FakeTensor)
