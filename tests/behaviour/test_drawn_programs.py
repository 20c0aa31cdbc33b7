"""Arguments beside products that Inductor's patterns forget, and writes in place that it reorders.

Programs that Inductor alone gets wrong by half, and drawn ones, are as near to float64 as eager autocast's.
"""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.behaviour.chains import IN_PLACE, KEYWORDS, STARTS, Chain, together
from tests.compiling import HALF, LOW, amp, eager

FAULTS = """
y=torch.add(y@m,y@m.t(),alpha=.3)
y=F.linear(y,m).add(F.linear(y,m.t()),alpha=2.0)
y=torch.add(y.to(wide),y@m,alpha=.3)
y=torch.sub(y@m,y.to(wide),alpha=.3)
y=torch.add(y@m,r,alpha=3.0)
y=torch.sub(r,F.linear(y,m,r),alpha=3.0)
y=torch.rsub(y@m,b@m,alpha=-.7)
y=(y@m).add_(b,alpha=-.5)
y=(torch.add(y@m,b@m,alpha=1.1)@m).relu()
y=torch.add((y@m).relu(),b,alpha=2)
y=torch.addmm(b,y,m,alpha=.3,beta=-2)
y=torch.addmm(r,y@m,m,beta=.5).relu()
y=torch.addmm(b@m,y,m,alpha=2.0)+y@m
y=torch.baddbmm(b.view(2,4,16),y.view(2,4,16),m.expand(2,16,16),alpha=-.7,beta=.1)
y=torch.addbmm(b[:4],y.view(2,4,16),m.expand(2,16,16),alpha=.3,beta=.5)
y=torch.addmv(b[:,0],y,r,alpha=.3,beta=2)
y=torch.addr(b,y[:,0],r,alpha=.3,beta=-1)
y=torch.addmm(b+torch.nan,y,m,beta=0,alpha=2)
y=torch.baddbmm(b.view(2,4,16)+torch.nan,y.view(2,4,16),m.expand(2,16,16),beta=0)
y=torch.addmv(b[:,0]+torch.nan,y,r,beta=0)
y=y@m; y.fill_diagonal_(0.0); y[y>1]=5.0; y=torch.cat([y@m,y])
y=y*1.5; y[1:5].mul_(2.0); y.diagonal().copy_(y.diagonal().flip(0)); y=y*2
y=(y@m).relu(); y.t()[2:6]=.25; y.masked_fill_(y>.5,-1.0); y[:,1::3].add_(1.0); y=y@m
"""
pytestmark = pytest.mark.filterwarnings("ignore:`torch._prims_common.check`:FutureWarning")  # of Inductor's lowering
COUNT = 6
"""Programs in one graph: each then compiles in a second or two. By "auto" all their products, being small, are wide."""


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


def check(chains: list[Chain], inputs: list[Tensor], dtype: torch.dtype, products: str) -> None:
    """None is further from float64 than three times eager's distance."""
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


@pytest.mark.parametrize("products", ["auto", pytest.param("torch", marks=pytest.mark.ci)])
def test_what_inductor_alone_gets_wrong(products: str) -> None:
    chains = [Chain(tuple(line.split("; ")), (8, 16)) for line in FAULTS.strip().splitlines()]
    _, *shared = chains[0].inputs(random.getrandbits(32))
    check(chains, [each for _ in chains for each in (torch.randn(8, 16), *shared)], LOW, products)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("drawn", "dtype", "products"),
    [(with_keywords, LOW, "auto"), (with_keywords, HALF, "torch"), (in_place, LOW, "auto")],
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
    check(chains, inputs, dtype, products)
