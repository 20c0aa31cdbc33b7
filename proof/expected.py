"""Known failures and their reasons. The list may only shrink: an entry whose cases hold is an error."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from proof.results import Failure, Verdict


class Expected(NamedTuple):
    """Failures of one kind in the groups of a part that begin with a name."""

    part: str
    name: str
    kind: str
    reason: str
    without_units: torch.dtype | None = None
    """The type without units for which a CPU has this failure, if others don't."""

    def covers(self, part: str, group: str, failure: Failure) -> bool:
        """True if the failure is this one."""
        return (part, failure.kind) == (self.part, self.kind) and f"{group}, ".startswith(f"{self.name}, ")


PINV = "its kernel multiplies matrices, which eager autocast lowers once more; compiled, it stays one op, in float32"
APART = "computed in float32, and taken apart by torch while it is traced: other operations, which round otherwise"
NEIGHBOUR = (
    "on a CPU without units for float16 its products are computed in float32 and rounded once, and an intermediate "
    "number is rounded to its other neighbour; on a CPU with units the bits are eager's"
)
READ = "an index that is a tensor is looked at while the graph is traced; Dynamo then runs the call as it is"
RESIZED = "eager gives the written operand another shape; Dynamo's fake tensors refuse"
FUSED_ADD = "Dynamo takes it apart, and the product of two 16-bit operands is rounded before it is added"
NO_FUNCTIONAL = "torch's functionalization takes its in-place form for an operator that isn't torch's"
UNREAD = "a layer whose result nobody reads: its weights get zeros from AOTAutograd, and nothing from eager autograd"
STRIDES = "AOTAutograd's backward views a tensor that has other strides when it runs than it had while it was traced"
PICKED = "boxes are picked by `nonzero`, whose size depends on numbers; Dynamo then runs that part as it is"
EXPECTED: tuple[Expected, ...] = (
    Expected("ops", "linalg.pinv", "dtypes", PINV),
    Expected("ops", "linalg.pinv.hermitian", "dtypes", PINV),
    Expected("ops", "linalg.multi_dot", "values", NEIGHBOUR, without_units=torch.float16),
    Expected("ops", "nn.functional.linear_cross_entropy", "values", NEIGHBOUR, without_units=torch.float16),
    Expected("ops", "nn.functional.interpolate.linear", "values", APART),
    Expected("ops", "linalg.cond", "values", APART),
    Expected("ops", "narrow", "refused", READ),
    Expected("ops", "index_fill", "refused", READ),
    Expected("mixed", "index_fill", "refused", READ),
    Expected("in_place", "addbmm", "raises", RESIZED),
    Expected("in_place", "addcmul", "values", FUSED_ADD),
    *(Expected("in_place", f"polygamma.polygamma_n_{n}", "raises", NO_FUNCTIONAL) for n in range(5)),
    Expected("ops", "index_put", "refused", READ),
    Expected("ops", "tensor_split", "refused", READ),
    Expected("models", "vilt", "zeros", UNREAD),
    Expected("models", "llava", "zeros", UNREAD),
    Expected("models", "torchvision fcos", "refused", PICKED),
    Expected("models", "qwen3-next", "raises", STRIDES),
)


def explain_failures(part: str, found: Iterable[Verdict]) -> Iterable[tuple[str, Failure, Expected | None]]:
    """Every failure of a part: its group, and the entry that it is expected by."""
    for verdict in found:
        for failure in verdict.failures:
            fitting = (entry for entry in EXPECTED if entry.covers(part, verdict.group, failure))
            yield verdict.group, failure, next(fitting, None)
