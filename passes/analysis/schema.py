"""The only reader of op schemas: an op's name, its arguments by name, those it writes and those it aliases."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from torch.fx import Node

from ampcompile.torch_private import pytree
from ampcompile.torch_private.dispatcher import OpOverload

# torch's libraries and ours: their ops are known without a rule, and run in the dtypes that arrive.
KNOWN_NAMESPACES = frozenset({"aten", "prims", "prim", "ampcompile", "_c10d_functional", "c10d_functional"})


def name_of(op: OpOverload) -> str:
    """The name that all overloads of an op share, as `aten::to`."""
    name: str = op._schema.name
    return name


@cache
def arguments_of(op: OpOverload) -> tuple[Any, ...]:
    """The schema's arguments, each with `name`, `type`, `kwarg_only`, `alias_info`, `default_value` ..."""
    return tuple(op._schema.arguments)


@cache
def written_arguments(op: OpOverload) -> frozenset[str]:
    """The names of the arguments that an op writes into, as far as its schema declares them."""
    return frozenset(a.name for a in arguments_of(op) if a.alias_info is not None and a.alias_info.is_write)


@cache
def aliased_arguments(op: OpOverload) -> frozenset[str]:
    """The names of the arguments whose memory a result may share, written arguments included."""
    return frozenset(a.name for a in arguments_of(op) if a.alias_info is not None)


def writes(op: OpOverload) -> bool:
    """True if an op writes into some argument."""
    return bool(op._schema.is_mutable)


@cache
def computes(op: OpOverload) -> bool:
    """False for views, mutations and size queries, which need the operand itself; True for other ops."""
    returns_tensors = any("Tensor" in str(value.type) for value in op._schema.returns)
    return returns_tensors and not op.is_view and not writes(op)


def arguments_by_name(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments given in a call, by the names in the schema; without defaults that the call relies on."""
    return dict(zip((a.name for a in arguments_of(op)), args, strict=False)) | dict(kwargs)


def operands(node: Node) -> Iterator[tuple[str, Node]]:
    """Yield a call's operand nodes, lists flattened, each with its argument's name, in the call's order."""
    assert isinstance(node.target, OpOverload)
    for name, value in arguments_by_name(node.target, node.args, node.kwargs).items():
        for leaf in pytree.tree_leaves(value, is_leaf=lambda x: isinstance(x, Node)):
            if isinstance(leaf, Node):
                yield name, leaf


def set_arguments(
    op: OpOverload, args: Any, kwargs: Any, new: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with some replaced or added by name, also where they were given by position."""
    names = [a.name for a in arguments_of(op) if not a.kwarg_only]
    values, kwargs = list(args), dict(kwargs)
    for name, value in new.items():
        if name in names and names.index(name) < len(values):
            values[names.index(name)] = value
        else:
            kwargs[name] = value
    return tuple(values), kwargs
