"""What is known of single ops: what their schemas say, and traits, each with the names of the ops that have it.

A name stands for all overloads of an op. Query with `has(node.target, TRAIT)`, which is False for all but ops. No other
file reads a schema.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from ampcompile.torch_private import pytree
from ampcompile.torch_private.dispatcher import OpOverload

# torch's libraries and ours: their ops are known without a rule, and run in the dtypes that arrive.
KNOWN_NAMESPACES = frozenset({"aten", "prims", "prim", "ampcompile", "_c10d_functional", "c10d_functional"})


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


# They change a dtype, and return their operand itself if it has that dtype. The user's casts stay as written.
CASTS = _aten("to _to_copy type_as")
# Casts, and the op into which torch decomposes them.
CONVERSIONS = CASTS | {"prims::convert_element_type"}
# The conversions that occur after differentiation.
CONVERSIONS_AFTER = CONVERSIONS - _aten("to type_as")

# They move their operand's numbers, or some of them, each once, to other places, and share its memory where they
# can. Their gradient only moves numbers back.
REARRANGES = _aten("""
t numpy_T mT adjoint transpose permute movedim swapaxes view _unsafe_view reshape flatten unflatten squeeze unsqueeze
slice narrow select diagonal split split_with_sizes chunk unbind tensor_split alias detach view_as
""")
# The same, and ops that copy or pad. Their gradient moves numbers back, or fills with zeros.
MOVES = REARRANGES | _aten("""
clone contiguous flip roll constant_pad_nd pad tril triu masked_fill pixel_shuffle pixel_unshuffle channel_shuffle
""")
# Products of rows with a matrix, which may be a weight.
LINEAR_PRODUCTS = _aten("linear addmm mm matmul")
# They repeat numbers, so their gradient is a sum, which is rounded in the type in which it is computed.
REPEATS = _aten("""
expand expand_as repeat repeat_interleave index_select gather index _unsafe_index embedding take take_along_dim
reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
""")
# After differentiation: attention on the CPU, in kernels of torch's own.
ATTENTION_AFTER = _aten("""
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
""")
# After differentiation: sums of products of their operands' numbers, rounded once, when the result is stored.
PRODUCTS_AFTER = (
    ATTENTION_AFTER
    | _aten("""
mm addmm bmm baddbmm addbmm mv addmv addr dot vdot linear convolution convolution_backward
""")
    | {"aten::_scaled_mm", "ampcompile::packed_conv", "ampcompile::packed_linear"}
)
# They return one of their operands, or change its sign. Narrowing first could turn a small number into a zero of either
# sign, and kernels differ in which of two equal zeros they return: these ops commute with exact casts only.
CHOOSES = _aten("relu neg abs clamp")
# After differentiation: they return one of their operands, or change its sign, and add no numbers but zeros.
CHOOSES_AFTER = _aten("relu neg abs maximum minimum threshold_backward where")
# After differentiation: their first operand with some numbers replaced, or changed, by those of others. Inductor writes
# into that operand where it can.
SCATTERS = _aten("""
slice_scatter select_scatter diagonal_scatter as_strided_scatter index_put _unsafe_index_put scatter scatter_add
scatter_reduce masked_scatter
""")
# They put several operands together, without changing a number.
JOINS = _aten("cat concat concatenate stack hstack vstack")
# Besides views, ops that return the numbers of a constant operand, rounded at most.
KEEPS_CONSTANTS = CASTS | _aten("lift_fresh_copy detach_ clone")
# After differentiation: copies that compute nothing, and so have no error of their own.
COPIES_AFTER = _aten("clone _unsafe_view view_copy lift_fresh_copy")

_READS_BITS = ("aten::view.dtype", "aten::view_copy.dtype", "prims::view_of_dtype")  # overloads, not all of an op's
# They turn floating numbers into integers, or into floating numbers with integer values.
ROUNDS_TO_INTEGERS = _aten("floor ceil round trunc floor_divide bucketize searchsorted item")
# They write numbers from their other arguments into their operand unchanged, so these numbers must fit its type.
WRITES_CONSTANTS = _aten("""
clamp_ clamp_max_ clamp_min_ copy_ fill_ hardtanh_ index_copy_ index_fill_ index_put_ masked_fill_ masked_scatter_ put_
scatter_ threshold_
""")

# Composite ops that return memory of their own; composite schemas don't rule out an alias.
GIVES_OWN_MEMORY = _aten("""
linear matmul conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d layer_norm batch_norm
group_norm instance_norm rms_norm softmax log_softmax cross_entropy_loss nll_loss nll_loss_nd embedding cat concat
scaled_dot_product_attention gelu silu max_pool1d max_pool2d max_pool3d avg_pool1d adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_avg_pool3d bilinear prelu tensordot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
""")
# The same for several operands; with one operand it may return a view.
GIVES_OWN_MEMORY_OF_SEVERAL = _aten("einsum")
# Not composite, with schemas that declare no alias, but they return a view of their operand, or the operand.
SHARES_UNSAID = _aten("_unsafe_view unsafe_split unsafe_split_with_sizes lift")

# They write into the arguments `STATISTICS`, in training at least; their schemas don't declare it.
UPDATES_STATISTICS = _aten("""
batch_norm instance_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _batch_norm_impl_index
batch_norm_update_stats batch_norm_gather_stats batch_norm_gather_stats_with_counts
""")
STATISTICS = frozenset({"running_mean", "running_var"})
# Norms that don't read the statistics if the argument named here is true.
STATISTICS_UNREAD_IF = {"aten::batch_norm": "training", "aten::instance_norm": "use_input_stats"}


def has(target: Any, trait: Set[str]) -> bool:
    """True if a node's target is an op with a trait."""
    return isinstance(target, OpOverload) and name_of(target) in trait


def is_view(target: Any) -> bool:
    """True if a node's target is an op that returns a view of its operand, or may, by its schema."""
    return isinstance(target, OpOverload) and target.is_view


def reads_bits(target: Any) -> bool:
    """True if an op reinterprets the bits of one type as numbers of another, as `view(dtype)` does."""
    return isinstance(target, OpOverload) and target.name() in _READS_BITS


def keeps_constants(op: OpOverload) -> bool:
    """True if an op returns the numbers of a constant operand, rounded at most."""
    return (op.is_view and not reads_bits(op)) or has(op, KEEPS_CONSTANTS)


def is_elementwise(target: Any) -> bool:
    """True if an op computes each number of its result from one number of each operand, in memory of its own."""
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags and not target.is_view


def draws_random_numbers(target: Any) -> bool:
    """True if an op draws random numbers, so that it returns others when it runs again."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


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


def named_operands(node: Node) -> Iterator[tuple[str, Node]]:
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
