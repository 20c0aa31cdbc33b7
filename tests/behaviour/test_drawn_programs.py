"""Random programs with keyword arguments beside products, and with writes in place: as near to float64 as eager's."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.behaviour.chains import IN_PLACE, KEYWORDS, STARTS, Chain, together
from tests.compiling import HALF, LOW, amp, eager

COUNT = 10
"""Programs in one graph: each then compiles in a second or two."""


def with_keywords(seed: int) -> Chain:
    return Chain.drawn(seed, KEYWORDS, ends="y")


def in_place(seed: int) -> Chain:
    return Chain.drawn(seed, IN_PLACE, first=STARTS, ends="y y@m y*C y+b")


def runs(chain: Chain, inputs: list[Tensor]) -> bool:
    """Whether eager mode takes it."""
    try:
        together([chain])(torch.empty(1), *inputs)
    except RuntimeError:  # memory that is read and written by one op
        return False
    return True


def distance(found: Tensor, exact: Tensor, where: Tensor) -> float:
    return float((found.double() - exact)[where].norm() / (exact[where].norm() + 1e-30))


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:`torch._prims_common.check`:FutureWarning")  # of Inductor's own lowering
@pytest.mark.parametrize(
    ("drawn", "dtype", "products"),
    [
        (with_keywords, LOW, "auto"),
        (with_keywords, HALF, "torch"),
        (in_place, LOW, "auto"),
        (in_place, LOW, "float32"),
    ],
)
def test_none_is_further_than_three_times_eagers(
    drawn: Callable[[int], Chain], dtype: torch.dtype, products: str
) -> None:
    chains, inputs = [], []
    while len(chains) < COUNT:
        seed = random.getrandbits(32)
        given = (chain := drawn(seed)).inputs(seed)
        if runs(chain, given):
            chains.append(chain)
            inputs += given
    run, low = together(chains), torch.empty(1, dtype=dtype)
    with torch.no_grad():
        exact = run(low.double(), *(each.to(dtype).double() for each in inputs))
        theirs = eager(run, low, *inputs, dtype=dtype)
        ours = amp(run, dtype=dtype, lower="inductor", products=products, range_guards=False)[0](low, *inputs)
    for chain, mine, eagers, truth in zip(chains, ours, theirs, exact, strict=True):
        finite = eagers.isfinite() & truth.isfinite()
        assert mine.isfinite()[finite].all(), chain
        errors = [distance(each, truth, finite) for each in (mine, eagers)]
        assert errors[0] <= 3 * errors[1] + 1e-6, (str(chain), errors)
