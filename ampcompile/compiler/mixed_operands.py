"""While tracing for us, promote mixed floating dtypes of ops that refuse them under eager autocast.

Dynamo runs every op on fake tensors under autocast before it calls a backend, and raises eager autocast's errors
(`scatter` of a float32 source into a bfloat16 tensor). So this module gives those ops a kernel in the Python
dispatcher, which only tracing uses, never eager execution. The kernel applies the op's rule if the thread is in a call
of an amp-compiled callable, and calls the original kernel otherwise.
"""

from functools import cache
from typing import Any

import torch

from ampcompile.dtypes import FLOATS
from ampcompile.passes.graph import is_float_tensor, to_dtype
from ampcompile.rules import table as rules
from ampcompile.rules.table import Rule
from ampcompile.torch_private import autocast, dispatcher, pytree, tracing
from ampcompile.torch_private.dispatcher import OpOverload

from . import current_call


@cache
def install(device_type: str) -> int:
    """Install kernels for a device type's ops whose rule promotes, once per process; return the number of ops."""
    tracing.let_grouped_products_be_float32()
    promoting = {
        name: rule
        for name, rule in rules.table(device_type).items()
        if rule.category in ("promote", "follow_destination") and name.startswith("aten::")
    }
    return sum(_install(dispatcher.op_named(name), rule, device_type) for name, rule in promoting.items())


def _install(op: OpOverload, rule: Rule, device_type: str) -> bool:
    def promoted(*args: Any, **kwargs: Any) -> Any:
        assert as_before is not None
        if current_call.callable is None or not dispatcher.autocast_acts(device_type):
            return as_before(*args, **kwargs)
        arriving = [v.dtype for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        low = torch.get_autocast_dtype(device_type)
        if not _may_be_refused(arriving, low):
            return as_before(*args, **kwargs)
        dtype = rule.operand_dtype(arriving, low)
        with autocast.autocast_off():
            return op(*_cast(args, dtype), **_cast(kwargs, dtype))

    as_before = dispatcher.interpose(op, device_type, promoted)
    return as_before is not None


def _may_be_refused(arriving: list[torch.dtype], low: torch.dtype) -> bool:
    """True if eager autocast may refuse operands: their floating dtypes are mixed, or the other 16-bit type."""
    floating = FLOATS.intersection(arriving)
    return len(floating) > 1 or not floating <= {torch.float32, low}


def _cast(arguments: Any, dtype: torch.dtype | None) -> Any:
    return pytree.tree_map(lambda value: to_dtype(value, dtype) if is_float_tensor(value) else value, arguments)
