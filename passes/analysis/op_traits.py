"""What is known about single ops: for each trait the names of the ops that have it, and why. Looks at no graph.

A name stands for all overloads of an op. `has(node.target, TRAIT)` asks; it is False for whatever is no op.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch

from ampcompile.torch_private.types import OpOverload

from .schema import name_of


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


# They change a dtype, and give their operand itself where that has nothing to do. A user's are never second-guessed.
CASTS = _aten("to _to_copy type_as")
# With what torch's decompositions make of them.
CONVERSIONS = CASTS | {"prims::convert_element_type"}
# The ones that graphs have after differentiation.
CONVERSIONS_AFTER = CONVERSIONS - _aten("to type_as")

# They put the numbers of their operand, or some of them, each once, in other places, and share its memory where they
# can. Their gradient only puts numbers back in place.
REARRANGES = _aten("""
t numpy_T mT adjoint transpose permute movedim swapaxes view _unsafe_view reshape flatten unflatten squeeze unsqueeze
slice narrow select diagonal split split_with_sizes chunk unbind tensor_split alias detach view_as
""")
# The same, and some that copy or fill up. Their gradient moves numbers back, or fills with zeros.
MOVES = REARRANGES | _aten("""
clone contiguous flip roll constant_pad_nd pad tril triu masked_fill pixel_shuffle pixel_unshuffle channel_shuffle
""")
# Their gradient adds numbers up, and sums are rounded in the type they are taken in.
REPEATS = _aten("""
expand expand_as repeat repeat_interleave index_select gather index _unsafe_index embedding take take_along_dim
reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
""")
# After differentiation: attention on the CPU, in kernels of torch's own.
ATTENTION_AFTER = _aten("""
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
""")
# After differentiation: sums of products of their operands' numbers, rounded once where their results are stored.
PRODUCTS_AFTER = (
    ATTENTION_AFTER
    | _aten("""
mm addmm bmm baddbmm addbmm mv addmv addr dot vdot linear convolution convolution_backward
""")
    | {"ampcompile::packed_conv", "ampcompile::packed_linear"}
)
# They give one of their operands, or change its sign. Narrowing first could turn a small number into a zero of either
# sign, and which zero a choice between equals returns is up to the kernel: they commute with exact casts only.
CHOOSES = _aten("relu neg abs clamp")
# After differentiation: they give one of their operands, or change its sign, and none of their own numbers but zeros.
CHOOSES_AFTER = _aten("relu neg abs maximum minimum threshold_backward where")
# A fused op may read its operand from before them: what rearranges, copied or not, but not what ends a gradient.
FUSED_THROUGH = (REARRANGES | _aten("clone contiguous")) - _aten("detach")
# Of these, those that keep numbers in order: where the last dimension keeps its size, its rows stay whole.
KEEPS_ORDER = _aten("view _unsafe_view reshape flatten contiguous clone alias")
# Of these, those that drop numbers along the dimension that is their second argument.
DROPS = _aten("slice select")
# They put several operands together, without changing a number.
JOINS = _aten("cat concat concatenate stack hstack vstack")
# Besides views, what gives the numbers of a known constant, rounded at most.
KEEPS_CONSTANTS = CASTS | _aten("lift_fresh_copy detach_ clone")
# After differentiation: copies that compute nothing, and so have no error of their own.
COPIES_AFTER = _aten("clone _unsafe_view view_copy lift_fresh_copy")

_READS_BITS = ("aten::view.dtype", "aten::view_copy.dtype", "prims::view_of_dtype")  # overloads, not all of an op's
# They make integers, or what stands for integers, of floating numbers.
ROUNDS_TO_INTEGERS = _aten("floor ceil round trunc floor_divide bucketize searchsorted item")
# They write numbers from their other arguments into their operand as they are, so that these must fit its type.
WRITES_CONSTANTS = _aten("""
clamp_ clamp_max_ clamp_min_ copy_ fill_ hardtanh_ index_copy_ index_fill_ index_put_ masked_fill_ masked_scatter_ put_
scatter_ threshold_
""")

# Composite ops that give memory of their own, though their schema could as well be silent about an alias.
GIVES_OWN_MEMORY = _aten("""
linear matmul conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d layer_norm batch_norm
group_norm instance_norm rms_norm softmax log_softmax cross_entropy_loss nll_loss nll_loss_nd embedding cat concat
scaled_dot_product_attention gelu silu max_pool1d max_pool2d max_pool3d avg_pool1d adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_avg_pool3d bilinear prelu tensordot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
""")
# The same of several operands; of one it may give a view.
GIVES_OWN_MEMORY_OF_SEVERAL = _aten("einsum")
# No composite ops, and their schemas say nothing of memory, but they give a view of their operand, or the operand.
SHARES_UNSAID = _aten("_unsafe_view unsafe_split unsafe_split_with_sizes lift")

# They write into the arguments `STATISTICS`, in training at least; their schemas don't say so.
UPDATES_STATISTICS = _aten("""
batch_norm instance_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _batch_norm_impl_index
batch_norm_update_stats batch_norm_gather_stats batch_norm_gather_stats_with_counts
""")
STATISTICS = frozenset({"running_mean", "running_var"})
# Norms that don't read them where the argument named here is true.
STATISTICS_UNREAD_IF = {"aten::batch_norm": "training", "aten::instance_norm": "use_input_stats"}


def has(target: Any, trait: Set[str]) -> bool:
    """Whether a node's target is an op with a trait."""
    return isinstance(target, OpOverload) and name_of(target) in trait


def is_view(target: Any) -> bool:
    """Whether a node's target is an op whose schema says that it gives a view of its operand, or may."""
    return isinstance(target, OpOverload) and target.is_view


def reads_bits(target: Any) -> bool:
    """Whether an op gives the bits of one type as numbers of another: a view that makes other numbers."""
    return isinstance(target, OpOverload) and target.name() in _READS_BITS


def keeps_constants(op: OpOverload) -> bool:
    """Whether an op gives the numbers of a constant that it reads, rounded at most."""
    return (op.is_view and not reads_bits(op)) or has(op, KEEPS_CONSTANTS)


def is_elementwise(target: Any) -> bool:
    """Whether an op computes each number of its result from one number of each operand, in memory of its own."""
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags and not target.is_view


def draws_random_numbers(target: Any) -> bool:
    """Whether an op gives other numbers when it runs again."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
