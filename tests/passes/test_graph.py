"""What passes share: regions, what may be cast, where a node came from."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ampcompile.passes.graph import is_castable
from tests.compiling import HALF, LOW

aten = torch.ops.aten


CAST = {
    "float32": torch.ones(2),
    "float16": torch.ones(2, dtype=HALF),
    "a parameter": nn.Parameter(torch.ones(2, dtype=LOW)),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}
KEPT = {
    **{str(dtype): torch.ones(2, dtype=dtype) for dtype in (torch.float64, torch.complex64, torch.int64, torch.bool)},
    "8 bits": torch.ones(2).to(torch.float8_e5m2),
    "sparse": torch.eye(2).to_sparse(),
    "a subclass that holds other tensors": TwoTensor(torch.ones(2), torch.ones(2)),
    "a number": 1.0,
    "nothing": None,
}


@pytest.mark.parametrize("name", [*CAST, *KEPT])
def test_what_may_be_cast(name):
    assert is_castable((CAST | KEPT)[name]) is (name in CAST)
