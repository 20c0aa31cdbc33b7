"""Programs as text, drawn by a seed from one table of ops: chains on one value, and modules of many values.

In the table `y` and `b` are values of one shape, `r` is a row, `s` a number and `m` a square matrix; `i` and `j` are
indices of columns and rows, `low` and `wide` types, and numbers are drawn for `C` and `P`.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import Block

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

SUMS = """torch.add(y,b,alpha=C) torch.add(y@m,b,alpha=C) torch.add(b,y@m,alpha=C) torch.sub(y@m,b,alpha=C)
torch.sub(b,F.linear(y,m,r),alpha=C) torch.rsub(y@m,b,alpha=C) torch.add(y@m,r,alpha=C) torch.sub(r,y@m,alpha=C)
torch.add(y@m,b@m,alpha=C) torch.sub(F.linear(y,m),b@m,alpha=C) torch.add(y@m,s,alpha=C) torch.rsub(y@m,b@m,alpha=C)
F.linear(y,m,r).add(F.linear(b,m),alpha=C) torch.add((y@m).relu(),b,alpha=C) (y@m).addcmul(b,r,value=C)
(y@m).addcdiv(b,b.abs()+1,value=C) b.addcmul(y@m,b@m,value=C) torch.add(y@m,y@m,alpha=C).relu()"""
ADDING = """torch.addmm(b,y,m,alpha=C,beta=C) torch.addmm(r,y,m,beta=C) torch.addmm(b@m,y,m,alpha=C)
torch.addmm(y[:,:1],y,m,alpha=C,beta=C) torch.addmm(s,y,m,alpha=C) torch.addmm(b,y@m,m,beta=C).relu()
torch.addmm(y@m,b,m,alpha=C,beta=C)+y@m torch.addmm(b+torch.nan,y,m,beta=0,alpha=C)
F.gelu(torch.addmm(r,y,m,alpha=C)) torch.baddbmm(b[None],y[None],m[None],alpha=C,beta=C)[0]
torch.baddbmm(r,y[None],m[None],beta=C)[0] torch.baddbmm(b[None]+torch.nan,y[None],m[None],beta=0,alpha=C)[0]
torch.baddbmm(b[None],y[None],m[None]@m,alpha=C)[0]
torch.addbmm(b,y.expand(2,*y.shape),m.expand(2,*m.shape),alpha=C,beta=C) torch.addr(y,b[:,0],r,alpha=C,beta=C)
torch.addmv(y[:,0],y,r,alpha=C,beta=C)[:,None]+b torch.addmv(y[:,0]+torch.nan,b,r,beta=0,alpha=C)[:,None]+y
torch.addr(y@m,b[:,0],r,alpha=C,beta=C) torch.addr(y+torch.nan,y[:,0],r,beta=0,alpha=C)"""
ACTIVATED = """F.gelu(y@m,approximate="tanh") F.leaky_relu(y@m,C) F.elu(y@m,P) F.elu(y@m,P,inplace=True)
F.celu(y@m,P) F.softplus(y@m,P,3) F.hardtanh(y@m,-P,P) F.threshold(y@m,C,C) F.hardshrink(y@m,P) F.softshrink(y@m,P)
F.linear(y,m,r).clamp(min=C) F.linear(y,m,r).clamp(-P,P) (y@m).nan_to_num(C) F.prelu(y@m,r[:1])
(y@m).clamp_min(C)*b torch.logit((y@m).sigmoid(),eps=.1)"""
REDUCED = """F.layer_norm(y@m,(y.shape[-1],),eps=P) F.layer_norm(y@m,(y.shape[-1],),r,r,eps=P)
F.group_norm(y@m,1,eps=P) F.rms_norm(y@m,(y.shape[-1],),eps=P) F.batch_norm(y@m,None,None,training=True,eps=P)
F.normalize(y@m,3.0,eps=P) y*(y@m).var(-1,correction=0,keepdim=True) y+(y@m).std(0,correction=2,keepdim=True)
(y@m).softmax(-1,dtype=wide).to(low) y+(y@m).sum(-1,keepdim=True,dtype=wide) (y@m).cumsum(-1,dtype=wide).to(low)
y*(y@m).mean(-1,keepdim=True,dtype=wide) F.log_softmax(y@m,-1,dtype=wide).to(low) (y@m).sum(0,dtype=wide)+b
y*(y@m).norm(3,-1,True) F.softmin(y@m,0,dtype=wide) y*torch.linalg.vector_norm(y@m,3,-1,True,dtype=wide)
y+F.cosine_similarity(y@m,b,0,P) (y@m).renorm(2,0,P) y+F.pairwise_distance(y@m,b,3,P,True)
y*F.mse_loss(y@m,b,reduction="sum") y*F.smooth_l1_loss(y@m,b,beta=P) y*F.huber_loss(y@m,b,delta=P)
y*F.kl_div(y@m,b,reduction="sum",log_target=True) y*F.poisson_nll_loss(y@m,b,full=False)
y*F.binary_cross_entropy_with_logits(y@m,b.sigmoid(),pos_weight=r.abs()) y*F.soft_margin_loss(y@m,b.sign())
y*F.cross_entropy(y@m,b.softmax(-1),label_smoothing=.1) y*F.margin_ranking_loss(y@m,b,b.sign(),P)
y*F.cross_entropy(y@m,torch.arange(len(y)),r.abs()+1,ignore_index=1,label_smoothing=.2)
y*F.nll_loss(y@m,torch.arange(len(y)),r,ignore_index=2,reduction="sum")
y*F.cosine_embedding_loss(y@m,b,s.sign()[None],P) y*F.triplet_margin_loss(y@m,b,b@m,P,3,P,True)
y*F.multi_margin_loss(y@m,torch.arange(len(y)),2,P) y*F.hinge_embedding_loss(y@m,b.sign(),P)"""
SHAPED = """F.scaled_dot_product_attention(y[None],(y@m)[None],b[None],scale=P)[0]
F.scaled_dot_product_attention(y[None,None],b[None,None],y[None,None],is_causal=True,scale=P)[0,0]
F.conv1d(y[None],b[:,None,:3],y[:,0],padding=1,groups=len(y))[0]
F.conv1d(y[None],b[:,None,:3],padding="same",groups=len(y),dilation=2)[0]
F.conv_transpose1d(y[None],b[:,None,:3],y[:,0],padding=1,groups=len(y))[0]
F.avg_pool1d(y@m,3,1,1,count_include_pad=False)
F.interpolate((y@m)[None,None],scale_factor=2,mode="bilinear",align_corners=True)[0,0,::2,::2]
F.max_pool1d(y@m,3,1,1) torch.linalg.multi_dot([y,m,m]) torch.einsum("ij,jk->ik",y,m)
torch.nn.functional.bilinear(y,y[:,:1],m[:,:,None],r) torch.tensordot(y,m,dims=([1],[0])) torch.inner(y,m)"""
KEYWORDS = {SUMS: 6, ADDING: 6, ACTIVATED: 3, REDUCED: 3, SHAPED: 2, BINARY: 1}

STARTS = "y@m F.linear(y,m,r) y*C y+b F.linear(y,m).relu() y.softmax(-1) (y@m).t().contiguous().t() b-y@m"
WRITES = """y.fill_diagonal_(C) y.masked_fill_(y>C,C) y[y>C]=C y[1:].mul_(C) y[:,1::3].add_(C) y[0]=C y[:,0]=r[0]
y[1]=r y[:,2:5]=b[:,2:5] y.diagonal().copy_(b.diagonal()) y.diagonal().mul_(C) y.t()[2:6]=C y.t()[1].add_(y[:,0])
y.index_fill_(1,i,C) y.index_add_(0,j,b[:2],alpha=C) y.index_copy_(1,i,b[:,:3])
y.index_put_((j,),b[:2],accumulate=True) y[j]=b[:2] y[:,i]*=C y.scatter_(1,i.expand(len(y),3),C)
y.scatter_add_(0,j[:,None].expand(2,y.shape[1]),b[:2]) y.copy_(b) y.masked_scatter_(y>C,b) y[1:]=y[:-1].clone()
y[:,1:].copy_(y[:,:-1]*C) y.view(-1)[::7]=C y.flatten()[3:9].neg_() y.select(0,1).zero_() y.narrow(1,1,3).fill_(C)
y.unflatten(0,(1,-1))[0,1]+=C y.relu_() y.mul_(b).add_(C) y.addcmul_(b,b,value=C) y.clamp_(max=C) y.copy_(y@m)
y[:2].copy_(b[:2]@m) torch.add(y,b,alpha=C,out=y) torch.mul(y,b,out=y) torch.mm(b,m,out=y)
y[1:].copy_(torch.relu(y[1:])) y[y.abs()>1]*=C y[0],y[1]=y[1].clone(),y[0].clone() z=y[1:];z+=y[:-1].clone()
z=y.t();z[1]=C z=y.view(-1);y[0]=C;z[1:4].mul_(C) z=y;y=y*C;z[1:]=C;y=y+z
z=y[:,1:4];y=y.tanh();z.fill_(C);y[:,1:4]+=z y.add_(y.t()[0,0]) y.cumsum_(-1) y.swapaxes(0,1)[0].exp_()
y.lerp_(b.to(y.dtype),C) F.dropout(y,0.0,True,inplace=True) y.tril_() y.tril_().fill_diagonal_(C)
y.sub_(y.mean(-1,True)) y.div_(y.norm()+1) y.squeeze_() torch.where(y>C,y,b,out=y)"""
BETWEEN = """y=y@m y=F.linear(y,m,r) y=y*C y=y+b y=y.relu() y=y.softmax(-1) y=y-y.amax(-1,True) y=y+y.sum(0)
y=(y@m)@m y=y.clone()"""
IN_PLACE = {WRITES: 4, BETWEEN: 1}

MODULES = """self.first(y) self.second(y) 2*self.second(b) self.first(y)-self.first(b) self.norm(y) self.batch(y)
self.block(y) checkpoint(self.block,y*1.0,use_reentrant=False) self.conv(y.view(-1,2,4)).view(-1,8) self.tied(y)
self.conv(y.reshape(-1,2,4)).reshape(-1,8) self.piece(y) y@m.t() F.linear(y,m[:,:8]) F.linear(y,self.tied.weight)
F.linear(y,m.view(8,2,4).flatten(1)) F.linear(y,self.flat[8:72].view(8,8)) F.linear(y,self.piece.weight[:4]).repeat(1,2)
y@self.second.weight F.linear(y,m.tanh()) self.second(F.silu(self.first(y))*F.linear(y,m)) (y.t()@b).mean()+y
y.addmm(b,m) F.scaled_dot_product_attention(*(t.reshape(1,2,-1,8)for(t)in(y,b,y))).reshape(-1,8) F.embedding(index,m)
untraced(y) y*F.cross_entropy(y,index) y+self.average (y.view(-1,2,8)+m[:2]).view(-1,8)"""
MOVES = """y.float() y.bfloat16() y.to(b.dtype) y.type_as(b) y.half().float() y.double().float() y.float().pow(2) y[:]
y.detach() y.detach()*b y.data*.5 y.clone() y.contiguous() y.view(-1,8) y.flatten().view(-1,8) y.t().contiguous().t()
y.reshape(2,-1,8).transpose(0,1).reshape(-1,8) y.flip(0) y.roll(1,0) y[index] y.chunk(2,1)[0].repeat(1,2)
torch.cat([y,b])[:len(x)] torch.cat([y[:,:4],b[:,4:]],1) torch.stack([y,b]).sum(0) torch.where(mask,y,b)
F.dropout(y*1.0,.5,False) y.exp().clamp(max=3.0) torch.lerp(y.float(),b.float(),.3)"""
EFFECTS = """y[:,:4]=b[:,4:] y[...,::2]+=b[...,::2] y[index]=b[index] y.masked_fill_(mask,.25) y[mask]=0.0 y.mul_(.5)
y.add_(b) y.t().add_(.1) y.data.mul_(.5) y.detach().mul_(.9) y[0].copy_(b[1]) y[:,2:6][0].copy_(b[1,2:6])
y.index_copy_(0,index,b.clone().to(y.dtype)) y.select(1,3).add_(b.detach().mean(1)) y[1:].t()[2:5].mul_(.5)
self.average.mul_(.9).add_(y.detach().float().mean(0),alpha=.1) self.average.copy_(y.detach()[0]) self.count+=1
self.average.data.lerp_(y.data[1].float(),.2) self.flat.mul_(.9) self.flat[8:16].copy_(y.detach()[1]) other.mul_(.9)
other[0]=y.detach()[1] other.add_(b.detach().to(other.dtype)) torch._dynamo.graph_break()"""
OF_MODULES = {MODULES: 10, MOVES: 14, UNARY: 1, SCALAR: 1, BINARY: 3, REDUCING: 3, SUMS: 1, ACTIVATED: 1}
OF_MODULES |= {REDUCED: 1, SHAPED: 1, WRITES: 3, EFFECTS: 12}
STATEMENTS = {WRITES, BETWEEN, EFFECTS}
"""Where other ops give a value."""
AROUND = (
    "with torch.no_grad():",
    'with torch.autocast("cpu", enabled=False):',
    'with torch.autocast("cpu", dtype=torch.float16):',
    'with torch.autocast("cpu", dtype=torch.bfloat16):',
    "with torch.enable_grad():",
)
CONSTANTS = {"C": ["0.1", "1.1", "-0.7", "3.3", "48**-.5", "2"], "P": ["0.1", "0.3", "1.1", "2"]}
NAMES = re.compile(r"\b(?:[ybrsmijCP]|low|wide)\b")
IN_MODULES = {"r": "self.scale", "s": "self.gain", "m": "self.weight", "i": "self.columns", "j": "index[:2]"}
IN_MODULES |= {"low": "torch.bfloat16", "wide": "torch.float32"}
IN_FLOAT64 = {
    r"torch\.autocast\(.*\)": "torch.set_grad_enabled(torch.is_grad_enabled())",
    r"\.(float|bfloat16|half)\(\)": ".double()",
    r"torch\.(bfloat16|float32)\b": "torch.float64",
}
SIZES = [(8, 48), (7, 37), (16, 64), (3, 130)]
INPUTS = 5
"""Of a chain."""
COLUMNS = 8
"""Of each value in a module."""


def spelled(op: str, names: Mapping[str, str], rng: Any = random) -> str:
    """An op with these names, and with numbers that are drawn for others."""

    def name(at: re.Match[str]) -> str:
        numbers = CONSTANTS.get(at[0])
        return names.get(at[0]) or (rng.choice(numbers) if numbers else at[0])

    return NAMES.sub(name, op)


@dataclass(frozen=True)
class Chain:
    """Statements on `y`, all of whose operands are of the 16-bit type."""

    steps: tuple[str, ...]
    size: tuple[int, int]

    @classmethod
    def drawn(cls, seed: int, kinds: dict[str, int] = SHARES, first: str = "", ends: str = ENDS) -> "Chain":
        """The chain of a seed: 3 to 6 ops, or statements, of these kinds by their shares."""
        rng = random.Random(seed)
        drawn = rng.choices([*kinds], [*kinds.values()], k=rng.randint(2, 5))
        steps = []
        for kind in [*([first] if first else []), *drawn, ends]:
            step = spelled(rng.choice(kind.split()), {}, rng)
            steps.append(step if kind in STATEMENTS else f"y = {step}")
        return cls(tuple(steps), rng.choice(SIZES))

    def inputs(self, seed: int) -> list[Tensor]:
        """`y`, `b`, `r`, `s`, `m`, in float32."""
        draw, columns = torch.Generator().manual_seed(seed), self.size[1]
        sizes: list[Sequence[int]] = [self.size, self.size, (columns,), (), (columns, columns)]
        *others, m = (torch.randn(size, generator=draw) for size in sizes)
        return [*others, m / columns**0.5]


def together(chains: Sequence[Chain]) -> Callable[..., list[Tensor]]:
    """All chains as one function of an example of the 16-bit type and of all their inputs."""
    runs = [function("y, b, r, s, m, low, wide, i, j", (*chain.steps, "return y")) for chain in chains]

    def run(like: Tensor, *given: Tensor) -> list[Tensor]:
        types = like.dtype, torch.promote_types(like.dtype, torch.float32)
        rest = *types, torch.tensor([0, 2, 3]), torch.tensor([2, 0])
        operands = [[x.to(like.dtype) for x in given[INPUTS * i : INPUTS * (i + 1)]] for i in range(len(runs))]
        return [chain(*mine, *rest) for chain, mine in zip(runs, operands, strict=True)]

    return run


def function(inputs: str, lines: Sequence[str]) -> Any:
    """What these lines do, of these inputs."""
    names: dict[str, Any] = {"torch": torch, "F": F, "checkpoint": checkpoint, "untraced": _untraced}
    exec("\n    ".join([f"def forward({inputs}):", *lines]), names)
    return names["forward"]


@dataclass(frozen=True)
class Program:
    """`lines`: the body of a `def forward(self, x, other, mask, index)` that returns a tuple."""

    seed: int
    lines: tuple[str, ...]
    training: bool

    @classmethod
    def drawn(cls, seed: int) -> "Program":
        """The program of a seed."""
        rng = random.Random(seed)
        values, lines, inside = ["v0", "v1"], ["v0 = x * 1.0", "v1 = self.first(x)"], 0
        for kind in rng.choices([*OF_MODULES], [*OF_MODULES.values()], k=rng.randint(3, 12)):
            if not inside and rng.random() < 0.15:
                lines.append(rng.choice(AROUND))
                inside = rng.randint(1, 2)
            indent, inside = "    " * bool(inside), max(0, inside - 1)
            recent = values[-3:] if rng.random() < 0.7 else values  # so that values come of many steps
            y = "other" if kind not in STATEMENTS and rng.random() < 0.1 else rng.choice(recent)
            step = spelled(rng.choice(kind.split()), IN_MODULES | {"y": y, "b": rng.choice([*values, "x"])}, rng)
            if kind not in STATEMENTS:
                values.append(f"v{len(values)}")
                step = f"{values[-1]} = {step}"
            lines.append(indent + step)
        returned = [values[-1], *rng.sample(values, rng.randint(0, min(4, len(values))))]
        if rng.random() < 0.2:
            returned.append(rng.choice(["x", "other", f"{values[-1]}[1:]", "self.weight[0]", "self.average"]))
        return cls(seed, (*lines, f"return {', '.join(returned)},"), rng.random() < 0.8)

    def model(self, exact: bool = False) -> nn.Module:
        """The module, its weights drawn from the seed; `exact`: all of it in float64, the user's own casts too."""
        model, lines = _Parts(self.seed), self.lines
        if exact:
            model.double().share()
            for pattern, wide in IN_FLOAT64.items():
                lines = tuple(re.sub(pattern, wide, line) for line in lines)
        model.program = function("self, x, other, mask, index", lines).__get__(model)
        return model.train(self.training)


@torch.compiler.disable
def _untraced(x: Tensor) -> Tensor:
    return x * 0.5 + 1


class _Parts(nn.Module):
    program: Any
    flat: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
            self.conv, self.norm, self.batch = nn.Conv1d(2, 2, 3, padding=1), nn.LayerNorm(8), nn.BatchNorm1d(8)
            self.block = Block(8)
            self.weight, self.scale = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.randn(8))
            self.gain = nn.Parameter(torch.randn(()))
            self.register_buffer("average", torch.randn(8))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.register_buffer("columns", torch.tensor([0, 2, 3]))
            self.register_buffer("flat", torch.randn(80) / 3)
        self.tied, self.piece = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.share()

    def share(self) -> None:
        """One weight in two layers, and one that lies in a buffer's memory."""
        self.tied.weight = self.second.weight
        self.piece.weight = nn.Parameter(self.flat[8:72].view(8, 8))

    def forward(self, *args: Tensor) -> Any:
        """Run the program."""
        return self.program(*args)
