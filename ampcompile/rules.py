"""Which dtype each op runs in: autocast's tables for the installed torch, our additions, and custom ops."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch
from torch._ops import OpOverload

from ampcompile import rules_accelerator, rules_cpu, rules_ours
from ampcompile.dtypes import FLOATS, widest
from ampcompile.errors import RuleError
from ampcompile.rules_group import Group

CATEGORIES: Mapping[str, str] = MappingProxyType(
    {
        "lower_precision_fp": "every floating operand is cast to the low type",
        "fp32": "every floating operand is cast to float32",
        "fp32_set_opt_dtype": "nothing is cast; argument `dtype` becomes float32 unless the user gave one",
        "fp32_append_dtype": "nothing is cast; the overload `redispatch` is called with `dtype=float32`",
        "promote": "floating operands are cast to the widest among them",
        "follow_destination": "floating operands are cast to the dtype of the first, which is written in place",
        "fp32_inside": "every floating operand is cast to float32, every floating result to the low type",
        "as_arrives": "nothing is cast",
        "banned": "raises, as in eager autocast",
    }
)
REGISTRABLE = ("lower_precision_fp", "fp32", "promote")
_DEVICE_NAMES = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS", "mtia": "MTIA", "maia": "MAIA"}


@dataclass(frozen=True)
class Rule:
    """What happens to an op's floating operands, and why. float64 operands are never cast (see `FLOATS`)."""

    category: str
    because: str
    dtype: torch.dtype | None = None
    """Stands in for the low type where a rule names one of its own (`lower_precision_fp` only)."""
    follows: tuple[tuple[str, str], ...] = ()
    """(argument, leader): the argument is cast to the dtype the leader ends up in, even if that is float64."""
    redispatch: str = ""
    """`fp32_append_dtype` only: the overload that takes the dtype, as `aten::norm.ScalarOpt_dtype`."""

    def operand_dtype(self, arriving: Sequence[torch.dtype], low: torch.dtype) -> torch.dtype | None:
        """The dtype to cast operands to whose dtype is in `FLOATS`, or None to leave all as they arrive.

        `arriving`: dtypes of the tensor operands in the schema's order, tensor lists flattened.
        """
        match self.category:
            case "lower_precision_fp":
                return self.dtype or low
            case "fp32" | "fp32_inside":
                return torch.float32
            case "promote":
                return widest(arriving)
            case "follow_destination":
                return arriving[0] if arriving and arriving[0].is_floating_point else None
            case _:
                return None

    def asks_float32(self, arriving: Sequence[torch.dtype]) -> bool:
        """Whether the op is called with `dtype=float32` (the two categories that cast inside the kernel)."""
        return self.category in ("fp32_set_opt_dtype", "fp32_append_dtype") and arriving[0] in FLOATS


@cache
def table(device_type: str) -> Mapping[str, Rule]:
    """Every rule of a device type for the installed torch, by op name; empty for devices without autocast."""
    rules: dict[str, Rule] = {}
    label = _DEVICE_NAMES.get(device_type, device_type)
    for group in (*rules_cpu.GROUPS, *rules_accelerator.GROUPS):
        if device_type in group.devices and _is_current(group):
            because = f"on autocast's {group.category} list ({label}): {group.because}"
            rules |= dict.fromkeys(group.names(), _rule(group, because))
    for group in rules_ours.GROUPS:
        if device_type in group.devices:
            because = f"on ampcompile's {group.category} list: {group.because}"
            rules = dict.fromkeys(group.names(), _rule(group, because)) | rules
    return MappingProxyType(rules)


def _is_current(group: Group) -> bool:
    version = torch.__version__
    return (group.since is None or version >= group.since) and (group.before is None or version < group.before)


def _rule(group: Group, because: str) -> Rule:
    return Rule(group.category, because, follows=group.follows, redispatch=group.redispatch)


_registered: dict[str, Rule] = {}


def register_op(op: OpOverload | str, rule: str) -> None:
    """Give a custom op a rule, in every graph compiled from now on in this process.

    `op`: an OpOverload, `"ns::name"` (all its overloads) or `"ns::name.overload"`; it need not exist yet.
    `rule`: `"lower_precision_fp"`, `"fp32"` or `"promote"`. Raises RuleError for anything else.
    """
    name = op.name() if isinstance(op, OpOverload) else op
    if not isinstance(name, str) or name.count("::") != 1 or not all(name.split("::")):
        raise RuleError(
            f"register_op got {op!r} as an op; expected an OpOverload such as torch.ops.ns.name.default, "
            'or its name as "ns::name" or "ns::name.overload".'
        )
    if rule not in REGISTRABLE:
        raise RuleError(f"register_op got {rule!r} as the rule of {name}; expected one of {', '.join(REGISTRABLE)}.")
    _registered[name] = Rule(rule, f"registered by ampcompile.register_op as {rule}")


def registry_key() -> str:
    """What `register_op` was told so far, for compile-cache keys."""
    return ",".join(f"{name}={rule.category}" for name, rule in sorted(_registered.items()))


def rule_for(op: OpOverload, device_type: str) -> Rule | None:
    """The rule of an op on a device type; None: it runs in whatever dtype arrives."""
    name = op.name()
    return _registered.get(name) or _registered.get(name.partition(".")[0]) or table(device_type).get(name)


_REVEALING = frozenset(
    f"aten::{name}"
    for name in (
        "einsum inner tensordot linalg_multi_dot chain_matmul matrix_power linalg_matrix_power kron cov corrcoef "
        "lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data "
        "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell hstack vstack dstack column_stack row_stack "
        "cross_entropy_loss nll_loss_nd rms_norm bilinear outer ger linalg_matmul linalg_norm linalg_norm.ord_str "
        "instance_norm"
    ).split()
)


def composite_needs_decomposition(op: OpOverload, device_type: str) -> bool:
    """Whether an op without a rule hides ops that have one, so that eager autocast decides inside it."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        return False
    if rule_for(op, device_type) is not None:
        return False
    return op.namespace != "aten" or op.name() in _REVEALING
