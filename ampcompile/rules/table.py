"""The dtype that each op runs in: autocast's lists for the installed torch, our additions to them, and custom ops."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch

from ampcompile.dtypes import FLOATS, named, short_name, widest
from ampcompile.errors import OptionError
from ampcompile.passes.analysis.op_traits import name_of
from ampcompile.torch_private import dispatcher
from ampcompile.torch_private.dispatcher import OpOverload

from . import autocast_lists, ours
from .autocast_lists import Category, Group
from .ours import CONTENTS

REGISTRABLE: tuple[Category, ...] = ("lower_precision_fp", "fp32", "promote")
_LABELS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS", "mtia": "MTIA", "maia": "MAIA"}


@dataclass(frozen=True)
class Rule:
    """The treatment of an op's floating operands, and the reason.

    Only operands whose dtype is in `FLOATS` are ever cast, and none that the op writes into.
    """

    category: Category
    because: str
    dtype: torch.dtype | None = None  # `lower_precision_fp` only: this low dtype, instead of the region's
    follows: tuple[tuple[str, str], ...] = ()  # (argument, leader): it takes the leader's final dtype, even float64
    keeps: tuple[str, ...] = ()  # arguments that stay as they arrive
    drops: tuple[str, ...] = ()  # arguments that repeat what may be cast: they become None if anything is
    # `fp32_append_dtype` only: the overload to call, as `aten::norm.ScalarOpt_dtype`; it lacks the op's defaults.
    redispatch: str = ""
    fp8: str = ""  # of linear products: the recipe by which operands are quantized, where that is possible
    named: bool = False  # True if the entry with that recipe matches the module itself, as a head needs

    def operand_dtype(self, arriving: Sequence[torch.dtype], low: torch.dtype) -> torch.dtype | None:
        """Return the dtype that operands are cast to, or None to leave them as they arrive.

        `arriving`: dtypes of all tensor operands in the schema's order, tensor lists flattened.
        """
        match self.category:
            case "lower_precision_fp":
                return self.dtype or low
            case "fp32" | "fp32_inside" | "fp32_round_trip":
                return torch.float32
            case "promote":
                return widest(arriving)
            case "follow_destination":
                return arriving[0] if arriving[0].is_floating_point else None
            case _:
                return None

    def result_dtype(self, arriving: Sequence[torch.dtype], low: torch.dtype) -> torch.dtype | None:
        """Return the dtype that results in `FLOATS` are cast to, or None to leave them as they are computed."""
        match self.category:
            case "fp32_inside":
                return low
            case "fp32_round_trip":
                return next((dtype for dtype in arriving if dtype in FLOATS), None)
            case _:
                return None

    def asks_float32(self, arriving: Sequence[torch.dtype]) -> bool:
        """Return True if the op is called with `dtype=float32`: its kernel casts, and only operands in `FLOATS`."""
        return self.category in ("fp32_set_opt_dtype", "fp32_append_dtype") and arriving[0] in FLOATS


@cache
def table(device_type: str) -> Mapping[str, Rule]:
    """Every rule of a device type for the installed torch, by op name; empty for devices without autocast lists."""
    label = _LABELS.get(device_type, device_type)
    added = _rules(ours.GROUPS, device_type, "on ampcompile's {} list")
    autocasts = _rules(autocast_lists.GROUPS, device_type, f"on autocast's {{}} list ({label})")
    return MappingProxyType(added | autocasts)


def _rules(groups: Sequence[Group], device_type: str, list_name: str) -> dict[str, Rule]:
    return {
        op: Rule(
            group.category,
            f"{list_name.format(group.category)}: {group.because}",
            follows=group.follows,
            keeps=group.keeps,
            drops=group.drops,
            redispatch=group.redispatch,
        )
        for group in groups
        if device_type in group.devices and group.since <= dispatcher.TORCH < group.before
        for op in group.names()
    }


_registered: dict[str, Rule] = {}


def register_op(op: OpOverload | str, rule: str) -> None:
    """Give a custom op a rule, for every graph compiled from now on in this process.

    `op`: an OpOverload, `"ns::name"` (all its overloads) or `"ns::name.overload"`; it need not exist yet.
    `rule`: `"lower_precision_fp"` or `"low"`, `"fp32"` or another name of float32, or `"promote"`. Raises OptionError
    for anything else.

    >>> ampcompile.register_op("mylib::attention", "lower_precision_fp")
    """
    name = op.name() if isinstance(op, OpOverload) else op
    if not isinstance(name, str) or not re.fullmatch(r"\w+::\w+(\.\w+)?", name):
        raise OptionError(
            f"register_op got {op!r} as the op; expected its name as 'ns::name' or 'ns::name.overload', "
            "or an OpOverload such as torch.ops.ns.name.default."
        )
    if name.startswith("aten::") and not any(
        name in (op_name, op_name.partition(".")[0]) for op_name in dispatcher.all_op_names()
    ):
        raise OptionError(f"register_op found no op {name} in this torch; expected one of its ops, or one of your own.")
    meant = "lower_precision_fp" if rule == "low" else "fp32" if named(rule) is torch.float32 else rule
    category = next((category for category in REGISTRABLE if category == meant), None)
    if category is None:
        raise OptionError(f"register_op got the rule {rule!r} for {name}; expected one of {', '.join(REGISTRABLE)}.")
    _registered[name] = Rule(category, f"registered as {rule} with ampcompile.register_op")


def rule_for(op: OpOverload, device_type: str) -> Rule | None:
    """Return the rule of an op on a device type; None: it runs in whatever dtype arrives.

    `register_op` overrides `torch.library.register_autocast`, which overrides the table.
    """
    name = op.name()
    registered = _registered.get(name) or _registered.get(name_of(op))
    if registered is not None or op.namespace == "aten":
        return registered or table(device_type).get(name)
    return _registered_with_torch(op, device_type) or table(device_type).get(name) or _unreadable(op, device_type)


def _registered_with_torch(op: OpOverload, device_type: str) -> Rule | None:
    dtype = dispatcher.registered_autocast_dtype(op, device_type)
    if dtype is None:
        return None
    because = f"registered for {short_name(dtype)} with torch.library.register_autocast"
    return Rule("fp32", because) if dtype == torch.float32 else Rule("lower_precision_fp", because, dtype=dtype)


def _unreadable(op: OpOverload, device_type: str) -> Rule | None:
    if not dispatcher.has_autocast_kernel(op.name(), device_type):
        return None
    return Rule("as_arrives", "has an autocast kernel that can't be read: say what it does with ampcompile.register_op")


def composite_needs_decomposition(op: OpOverload, device_type: str) -> bool:
    """Return True if an op must be decomposed, because eager autocast has rules for ops inside it, not for it.

    That is so for a composite op (one with a CompositeImplicitAutograd kernel) without a rule of its own, if an op
    inside has one (`CONTENTS`), and for every such composite of another library, whose contents are unknown.
    """
    if not dispatcher.is_composite(op) or rule_for(op, device_type) is not None:
        return False
    return op.namespace != "aten" or _contains_a_rule(op.name(), device_type)


def _contains_a_rule(name: str, device_type: str) -> bool:
    return any(
        inner in table(device_type) or inner in _registered or _contains_a_rule(inner, device_type)
        for inner in CONTENTS.get(name, ())
    )
