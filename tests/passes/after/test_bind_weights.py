"""After differentiation a read of a copy is the copy, unless somebody could keep it."""

import pytest
import torch

from ampcompile.passes.after.bind_weights import BindWeights
from ampcompile.passes.weight_copy import weight_copy
from tests.passes.tidied import traced, words

CASES = {  # what a weight and its copy are read for, how many reads are bound, and the ops afterwards
    "a product": (lambda read, w, c: read(w, c) @ read(w, c).t(), 2, "t mm"),
    "returned": (lambda read, w, c: read(w, c), 1, "clone"),
    "a view is returned": (lambda read, w, c: read(w, c).t()[1:], 1, "t slice clone"),
    "a part is returned": (lambda read, w, c: read(w, c).split(2)[1], 1, "split getitem getitem clone"),
    "a view that no schema tells of is returned": (
        lambda read, w, c: torch.ops.aten._unsafe_view(read(w, c), [15]),
        1,
        "_unsafe_view clone",
    ),
    "no read": (lambda read, w, c: w @ c.t().float(), 0, "t > mm"),
}


@pytest.mark.parametrize("name", CASES)
def test_reads_give_the_copys_bits_and_what_is_returned_is_cloned(name: str) -> None:
    f, reads, ops = CASES[name]
    weight = torch.randn(3, 5)
    copy = weight.to(torch.bfloat16)
    gm = traced(lambda w, c: f(lambda w, c: weight_copy(w, c, c.dtype), w, c), weight, copy)
    assert (BindWeights().apply(gm), words(gm), BindWeights().apply(gm)) == (reads, ops, 0)
    gm.recompile()
    found = gm(weight, copy)
    assert torch.equal(found, f(lambda w, c: c, weight, copy))
    assert found.untyped_storage().data_ptr() != copy.untyped_storage().data_ptr()
