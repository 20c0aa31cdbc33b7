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
        arriving = [tensor.dtype for tensor in pytree.tensors_in(args, kwargs)]
        low = torch.get_autocast_dtype(device_type)
        if len(floating := FLOATS.intersection(arriving)) < 2 and floating <= {torch.float32, low}:
            return as_before(*args, **kwargs)  # eager autocast takes one dtype of these two
        dtype = rule.operand_dtype(arriving, low)

        def cast(value: Any) -> Any:
            return to_dtype(value, dtype) if is_float_tensor(value) else value

        with autocast.autocast_off():
            args, kwargs = pytree.tree_map(cast, (args, kwargs))
            return op(*args, **kwargs)

    as_before = dispatcher.interpose(op, device_type, promoted)
    return as_before is not None
