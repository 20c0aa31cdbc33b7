"""The table of op traits: every name is an op's, and the ops do what their trait says."""

import pytest
import torch
import torch.nn.functional as F

from ampcompile.passes.analysis import op_traits
from ampcompile.passes.analysis.op_traits import (
    GIVES_OWN_MEMORY,
    GIVES_OWN_MEMORY_OF_SEVERAL,
    JOINS,
    REARRANGES,
    SHARES_UNSAID,
    STATISTICS,
    UPDATES_STATISTICS,
    aliased_arguments,
    arguments_of,
    has,
    keeps_constants,
    reads_bits,
    written_arguments,
)

ATEN = torch.ops.aten
SETS = {name: table for name, table in vars(op_traits).items() if isinstance(table, frozenset)}
TABLES = {name: SETS[name] for name in sorted(SETS.keys() - {"STATISTICS", "KNOWN_NAMESPACES"})}  # the others name ops


def overloads(name):
    namespace, _, packet = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), packet)
    return [getattr(packet, overload) for overload in packet.overloads()]


@pytest.mark.parametrize("table", TABLES)
def test_every_name_is_that_of_an_op(table):
    for name in TABLES[table] - {"aten::rms_norm"}:  # torch's own since 2.4
        assert all(has(op, TABLES[table]) for op in overloads(name)) and overloads(name)


X = torch.arange(64.0).view(4, 4, 4)
REARRANGED = {
    "t": lambda x: x[0].t(),
    "numpy_T": lambda x: x[0].T,
    "mT": lambda x: x.mT,
    "adjoint": lambda x: x.adjoint(),
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "movedim": lambda x: x.movedim(0, 2),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "view": lambda x: x.view(2, 32),
    "_unsafe_view": lambda x: ATEN._unsafe_view(x, [2, 32]),
    "reshape": lambda x: x.reshape(64),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(0, (2, 2)),
    "squeeze": lambda x: x[:1].squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "slice": lambda x: x[1:3],
    "narrow": lambda x: x.narrow(0, 1, 2),
    "select": lambda x: x[1],
    "diagonal": lambda x: x.diagonal(),
    "split": lambda x: x.split(2)[1],
    "split_with_sizes": lambda x: x.split([1, 3])[1],
    "chunk": lambda x: x.chunk(2)[1],
    "unbind": lambda x: x.unbind()[1],
    "tensor_split": lambda x: x.tensor_split(2)[1],
    "alias": lambda x: ATEN.alias(x),
    "detach": lambda x: x.detach(),
    "view_as": lambda x: x.view_as(torch.empty(64)),
}


def test_what_rearranges_shares_memory_and_takes_each_number_once_at_most():
    assert {f"aten::{name}" for name in REARRANGED} == REARRANGES
    for name, rearranged in REARRANGED.items():
        assert rearranged(X).untyped_storage().data_ptr() == X.untyped_storage().data_ptr(), name
        found = rearranged(X).flatten()
        assert len(found.unique()) == len(found), name


ROWS = torch.arange(8.0).view(2, 4)
ONES = {n: torch.ones(1, 1, *[1] * n) for n in (1, 2, 3)}
GATES = {n: (torch.zeros(4 * n, 4), torch.zeros(4 * n, 4)) for n in (1, 3, 4)}
INDICES = torch.tensor([0, 1])
# Called so that the result could be the operand itself.
OWN_MEMORY = {
    "linear": lambda x: F.linear(x, torch.eye(4)),
    "matmul": lambda x: torch.matmul(x, torch.eye(4)),
    "conv1d": lambda x: F.conv1d(x[:1, None], ONES[1]),
    "conv2d": lambda x: F.conv2d(x[None, None], ONES[2]),
    "conv3d": lambda x: F.conv3d(x[None, None, None], ONES[3]),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x[:1, None], ONES[1]),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x[None, None], ONES[2]),
    "conv_transpose3d": lambda x: F.conv_transpose3d(x[None, None, None], ONES[3]),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
    "group_norm": lambda x: F.group_norm(x, 1),
    "instance_norm": lambda x: F.instance_norm(x[None]),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "bilinear": lambda x: F.bilinear(x, x, torch.ones(4, 4, 4)),
    "prelu": lambda x: F.prelu(x, torch.ones(1)),
    "tensordot": lambda x: torch.tensordot(x, torch.tensor(1.0), 0),
    "lstm_cell": lambda x: torch.lstm_cell(x, (x, x), *GATES[4])[1],
    "gru_cell": lambda x: torch.gru_cell(x, x, *GATES[3]),
    "rnn_tanh_cell": lambda x: torch.rnn_tanh_cell(x, x, *GATES[1]),
    "rnn_relu_cell": lambda x: torch.rnn_relu_cell(x, x, *GATES[1]),
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(0),
    "cross_entropy_loss": lambda x: F.cross_entropy(x, INDICES, reduction="none"),
    "nll_loss": lambda x: F.nll_loss(x, INDICES, reduction="none"),
    "nll_loss_nd": lambda x: ATEN.nll_loss_nd(x, INDICES, None, 0),
    "embedding": lambda x: F.embedding(INDICES, x),
    "cat": lambda x: torch.cat([x]),
    "concat": lambda x: torch.concat([x]),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "gelu": F.gelu,
    "silu": F.silu,
    "max_pool1d": lambda x: F.max_pool1d(x, 1),
    "max_pool2d": lambda x: F.max_pool2d(x[None], 1),
    "max_pool3d": lambda x: F.max_pool3d(x[None, None], 1),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 1),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x, 4),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x[None], (2, 4)),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x[None, None], (1, 2, 4)),
}


def test_ops_that_give_own_memory_do_so_even_where_they_have_nothing_to_do():
    assert {f"aten::{name}" for name in OWN_MEMORY} == GIVES_OWN_MEMORY
    for name, f in OWN_MEMORY.items():
        own = f(ROWS).untyped_storage().data_ptr()
        assert own != ROWS.untyped_storage().data_ptr(), name


@pytest.mark.parametrize("norm", [ATEN.batch_norm.default, ATEN.instance_norm.default, ATEN.native_batch_norm.default])
def test_norms_update_statistics_that_their_schemas_call_read(norm):
    mean, variance, more = torch.zeros(4), torch.ones(4), [True, 0.5, 1e-5, False][: len(arguments_of(norm)) - 5]
    norm(X, None, None, mean, variance, *more)
    assert mean.any() and not variance.equal(torch.ones(4))
    assert has(norm, UPDATES_STATISTICS) and not written_arguments(norm)
    assert {a.name for a in arguments_of(norm)} >= STATISTICS


def test_einsum_gives_own_memory_of_several_operands_but_not_of_one():
    assert {"aten::einsum"} == GIVES_OWN_MEMORY_OF_SEVERAL
    found = {"ij->ji": [], "ij,jk->ik": [torch.eye(4)], "ij,->ij": [torch.tensor(1.0)], "ij,k->ji": [torch.ones(1)]}
    for equation, others in found.items():
        result = torch.einsum(equation, ROWS, *others)
        assert (result.untyped_storage().data_ptr() == ROWS.untyped_storage().data_ptr()) == (not others), equation


def test_ops_that_share_memory_and_dont_say_so():
    found = {
        "_unsafe_view": ATEN._unsafe_view(ROWS, [8]),
        "unsafe_split": torch.unsafe_split(ROWS, 1)[1],
        "unsafe_split_with_sizes": torch.unsafe_split_with_sizes(ROWS, [1, 1])[1],
        "lift": ATEN.lift(ROWS),
    }
    assert {f"aten::{name}" for name in found} == SHARES_UNSAID
    for name, value in found.items():
        assert value.untyped_storage().data_ptr() == ROWS.untyped_storage().data_ptr(), name
        assert not aliased_arguments(overloads(f"aten::{name}")[0])


def test_joined_parts_are_the_parts():
    for name in JOINS:
        (op,) = (op for op in overloads(name) if op._overloadname == "default")
        joined = op([ROWS, ROWS + 1])
        assert joined.flatten().sort().values.equal(torch.cat([ROWS, ROWS + 1]).flatten().sort().values)


def test_a_view_of_bits_makes_other_numbers():
    assert all(map(reads_bits, (ATEN.view.dtype, ATEN.view_copy.dtype, torch.ops.prims.view_of_dtype.default)))
    assert not reads_bits(ATEN.view.default) and not reads_bits(ATEN.to.dtype)
    assert all(map(keeps_constants, (ATEN.view.default, ATEN.to.dtype, ATEN.expand.default)))
    assert not keeps_constants(ATEN.view.dtype) and not keeps_constants(ATEN.add.Tensor)
