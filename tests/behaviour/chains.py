"""Chains of elementwise ops, reductions, norms and products, drawn by a seed and compiled many to a graph."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

UNARY = """y.abs() y.relu() y.tanh() y.sigmoid() y.sin() y.exp() y.expm1() y.square() y.neg() y.erf() y.sinh() y.atan()
F.gelu(y) F.gelu(y,approximate="tanh") F.silu(y) F.mish(y) F.softplus(y) F.elu(y) F.selu(y) F.leaky_relu(y)
F.hardswish(y) F.hardsigmoid(y) F.hardtanh(y) F.relu6(y) F.softsign(y) F.logsigmoid(y) F.tanhshrink(y) F.celu(y,.7)
y.abs().sqrt() (y.abs()+1).log() (y*y+1).rsqrt() y.abs().log1p() (y.abs()+1).reciprocal() y.clamp(-1,1.1)
F.glu(torch.cat([y,y*2],-1)) y.floor() y.sign() y.to(low)"""
SCALAR = """y+C y-C C-y y*C y/C C/(y.abs()+1) y**2 y**3 y**4 y**-1 y**-2 y**.5 (y.abs()+C)**1.7 C**y.tanh()
y.lerp(b.to(y.dtype),C) y.add(b,alpha=C) y.sub(b,alpha=C) torch.rsub(y,b,alpha=C) y.addcmul(b,b,value=C)
y.addcdiv(b,b.abs()+1,value=C) y%C torch.where(y>C,y,C) y.clamp(min=C) y.masked_fill(y>C,C)"""
BINARY = """y+b y-b y*b y/(b.abs()+1) torch.maximum(y,b) torch.minimum(y,b) torch.where(y>b,y,b) y.addcmul(b,y)
y.lerp(b.to(y.dtype),.3) y.addcdiv(b,y.abs()+1) torch.atan2(y,b) torch.hypot(y,b) y*b.sigmoid() y+r y*r (y-b).square()
y*s y/(s.abs()+1) y+s"""
REDUCING = """y.softmax(-1) y.log_softmax(-1) y.softmax(0) (y*C).softmax(-1) (y/C).softmax(-1) (y*s).softmax(-1)
y-y.amax(-1,True) y/(y.norm(dim=-1,keepdim=True)+1) y*y.mean(-1,True) y+y.sum(0,True) y-y.logsumexp(-1,True)
y*y.var(-1,keepdim=True) y+y.std(0,keepdim=True) F.layer_norm(y,(y.shape[-1],)) F.rms_norm(y,(y.shape[-1],))
F.normalize(y,dim=-1) F.layer_norm(y,(y.shape[-1],),r,r) y.cumsum(-1) F.group_norm(y,1)
F.batch_norm(y,None,None,training=True) y+y.max(-1,True)[0]
F.batch_norm(y,None,None,r.to(wide),r.to(wide),True)"""
PRODUCTS = "y@m F.linear(y,m,r) y@m+b y@m+y b-y@m torch.addmm(y,y,m) (y@y.mT)@y F.linear(y,m,r).relu()+y"
ENDS = "y y y y.sum(-1) y.mean(-1) y.square().sum(-1) y.logsumexp(-1) y.to(wide).sum(-1) y.amax(-1) y.var(-1)"
SHARES = {UNARY: 8, SCALAR: 6, BINARY: 6, REDUCING: 6, PRODUCTS: 1}
CONSTANTS = ["0.1", "1.1", "-0.7", "3.3", "48**-.5", "2"]
SIZES = [(8, 48), (7, 37), (16, 64), (3, 130)]
INPUTS = 5


@dataclass(frozen=True)
class Chain:
    """Ops on `y`: `b` has its shape, `r` is a row, `s` a number and `m` a square matrix, all of the 16-bit type."""

    steps: tuple[str, ...]
    size: tuple[int, int]

    @classmethod
    def drawn(cls, seed: int) -> "Chain":
        """The chain of a seed: 3 to 6 ops."""
        rng = random.Random(seed)
        kinds = rng.choices([*SHARES], [*SHARES.values()], k=rng.randint(2, 5))
        steps = [rng.choice(kind.split()).replace("C", rng.choice(CONSTANTS)) for kind in kinds]
        return cls((*steps, rng.choice(ENDS.split())), rng.choice(SIZES))

    def inputs(self, seed: int) -> list[Tensor]:
        """`y`, `b`, `r`, `s`, `m`, in float32."""
        draw, columns = torch.Generator().manual_seed(seed), self.size[1]
        sizes: list[Sequence[int]] = [self.size, self.size, (columns,), (), (columns, columns)]
        *others, m = (torch.randn(size, generator=draw) for size in sizes)
        return [*others, m / columns**0.5]

    def __str__(self) -> str:
        return f"{self.size}: {'; '.join(self.steps)}"


def together(chains: Sequence[Chain]) -> Callable[..., list[Tensor]]:
    """All chains as one function of an example of the 16-bit type and of all their inputs."""
    lines = ["def run(low, *given):", "    low, results = low.dtype, []"]
    lines += ["    wide = torch.promote_types(low, torch.float32)"]
    for i, chain in enumerate(chains):
        lines += [
            f"    y, b, r, s, m = [each.to(low) for each in given[{INPUTS * i}:{INPUTS * (i + 1)}]]",
            *(f"    y = {step}" for step in chain.steps),
            "    results.append(y)",
        ]
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec("\n".join([*lines, "    return results"]), names)
    run: Callable[..., list[Tensor]] = names["run"]
    return run
