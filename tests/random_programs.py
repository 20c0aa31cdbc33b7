"""Small random modules, as text: the same program for stock AOTAutograd under autocast, for amp and in float64."""

import random
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROWS, COLUMNS = 4, 8

# Every value has ROWS x COLUMNS numbers; `{a}` and `{b}` stand for values computed before, or for inputs.
COMPUTED = """
self.first({a})|self.second({a})|F.linear({a}, self.weight)|{a} @ self.weight.t()|F.linear({a}, self.weight[:, :8])
F.linear({a}, self.weight.view(8, 2, 4).flatten(1))|({a}.t() @ {b}).mean() + {a}
torch.einsum("ij,jk->ik", {a}, self.weight)|self.conv({a}.view(4, 2, 4)).view(4, 8)
self.conv({a}.reshape(4, 2, 4)).reshape(4, 8)|self.norm({a})|self.batch({a})|F.group_norm({a}, 2)
F.rms_norm({a}, (8,))|F.gelu({a})|{a}.relu()|F.silu({a})|{a}.sigmoid()|{a}.tanh()|F.elu({a})|{a} + {b}|{a} * {b}
{a} - {b} * 0.5|torch.maximum({a}, {b})|{a}.add({b}, alpha=0.3)|torch.lerp({a}.float(), {b}.float(), 0.3)
{a}.softmax(-1)|{a}.log_softmax(0)|{a}.exp().clamp(max=3.0)|{a}.cumsum(0)|{a} / (1 + {b}.abs())|{a}.float().pow(2)
{a}.float()|{a}.bfloat16()|{a}.to({b}.dtype)|{a}.type_as({b})|{a}.half().float()|{a}.double().float()|{a}.detach()
{a}.clone()|{a}.contiguous()|{a}[:]|{a}.view(4, 8)|{a}.data * 0.5|{a}.detach() * {b}|F.dropout({a} * 1.0, 0.5, False)
{a}.reshape(2, 2, 8).transpose(0, 1).reshape(4, 8)|{a}.t().contiguous().t()|{a}.flatten().view(4, 8)|{a}.flip(0)
torch.cat([{a}, {b}])[:4]|torch.cat([{a}[:, :4], {b}[:, 4:]], 1)|torch.stack([{a}, {b}]).sum(0)
torch.where(mask, {a}, {b})|{a}.chunk(2, 1)[0].repeat(1, 2)|{a}[index]|{a}.roll(1, 0)|{a} - {a}.mean(-1, keepdim=True)
{a} + {b}.sum(0)|{a} + self.average|{a} + F.cross_entropy({a}, index)|{a} * F.mse_loss({a}, {b})
F.normalize({a}, dim=-1)|{a}.addmm({b}, self.weight)|{a} + self.scale
F.scaled_dot_product_attention({a}.reshape(1, 2, 2, 8), {b}.reshape(1, 2, 2, 8), {a}.reshape(1, 2, 2, 8)).reshape(4, 8)
checkpoint(lambda t: self.first(F.gelu(t)) + t, {a} * 1.0, use_reentrant=False)|F.embedding(index, self.weight)
2 * self.second({b})
"""
# Statements that write, into values, the input `other` and buffers.
WRITTEN = """
{a}.mul_(0.5)|{a}.add_({b})|{a}.relu_()|{a}[:, :4] = {b}[:, 4:]|{a}[1] = 0.5|{a}[..., ::2] += {b}[..., ::2]
{a}[index] = {b}[index]|{a}.masked_fill_(mask, 0.25)|{a}.copy_({b})|{a}.view(-1)[3:9].zero_()|{a}.data.mul_(0.5)
{a}.t().add_(0.1)|{a}.detach().mul_(0.9)|{a}[0].copy_({b}[1])|{a}.clamp_(-2, 2)|{a}.sub_({b}, alpha=0.1)
{a}.index_copy_(0, index, {b}.clone().to({a}.dtype))|{a}[mask] = 0.0
self.average.mul_(0.9).add_({a}.detach().float().mean(0), alpha=0.1)|self.count += 1
self.average.copy_({a}.detach()[0])|other.mul_(0.9)|other[0] = {a}.detach()[1]
other.add_({b}.detach().to(other.dtype))|self.average.data.lerp_({a}.data[2].float(), 0.2)
"""
AROUND = (
    "with torch.no_grad():",
    'with torch.autocast("cpu", enabled=False):',
    'with torch.autocast("cpu", dtype=torch.float16):',
    'with torch.autocast("cpu", dtype=torch.bfloat16):',
    "with torch.enable_grad():",
)


def _choices(text: str) -> list[str]:
    return [choice for line in text.strip().splitlines() for choice in line.split("|")]


_COMPUTED, _WRITTEN = _choices(COMPUTED), _choices(WRITTEN)


@dataclass(frozen=True)
class Program:
    """`source`: a `def forward(self, x, other, mask, index)` that returns a tuple."""

    seed: int
    source: str
    training: bool

    def model(self, exact: bool = False) -> nn.Module:
        """The module, its weights drawn from the seed; `exact`: all of it in float64, the user's own casts too."""
        source = self.source
        if exact:
            source = re.sub(r"\.(float|bfloat16|half)\(\)", ".double()", source)
            source = re.sub(
                r"torch\.autocast\(.*\)",
                "torch.no_grad() if not torch.is_grad_enabled() else torch.enable_grad()",
                source,
            )
        names: dict[str, Any] = {"torch": torch, "F": F, "checkpoint": checkpoint}
        exec(compile(source, f"<program {self.seed}>", "exec"), names)
        model = _Parts(self.seed)
        model.program = names["forward"].__get__(model)
        return (model.double() if exact else model).train(self.training)


class _Parts(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
            self.conv, self.norm, self.batch = nn.Conv1d(2, 2, 3, padding=1), nn.LayerNorm(8), nn.BatchNorm1d(8)
            self.weight = nn.Parameter(torch.randn(8, 8) / 3)
            self.scale = nn.Parameter(torch.randn(8))
            self.register_buffer("average", torch.randn(8))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, *args: Tensor) -> Any:
        return self.program(*args)


def program(seed: int) -> Program:
    """The program of a seed."""
    draw = random.Random(seed)
    values, lines, inside = ["v0", "v1"], ["v0 = x * 1.0", "v1 = self.first(x)"], 0
    for _ in range(draw.randint(3, 12)):
        if not inside and draw.random() < 0.15:
            lines.append(draw.choice(AROUND))
            inside = draw.randint(1, 2)
        indent, inside = "    " * bool(inside), max(0, inside - 1)
        recent = values[-3:] if draw.random() < 0.7 else values  # so that values come of many steps
        a, b = draw.choice(recent), draw.choice([*values, "x"])
        if draw.random() < 0.3:
            lines.append(indent + draw.choice(_WRITTEN).format(a=a, b=b))
        else:
            computed = draw.choice(_COMPUTED).format(a="other" if draw.random() < 0.1 else a, b=b)
            lines.append(f"{indent}v{len(values)} = {computed}")
            values.append(f"v{len(values)}")
    returned = [values[-1], *draw.sample(values, draw.randint(0, min(4, len(values))))]
    if draw.random() < 0.2:
        returned.append(draw.choice(["x", "other", f"{values[-1]}[1:]", "self.weight[0]", "self.average"]))
    body = "\n    ".join([*lines, f"return {', '.join(returned)},"])
    return Program(seed, f"def forward(self, x, other, mask, index):\n    {body}\n", draw.random() < 0.8)


@dataclass
class Outcome:
    """What calls gave, what they left behind, and which of these tensors share memory, in each call."""

    results: list[list[Tensor]]
    left: list[list[Tensor]]
    gradients: list[list[Tensor]]
    shared: list[list[tuple[int, int]]]


def outcome(of: Program, run_as: Any, exact: bool = False, calls: int = 2) -> Outcome:
    """Call a program with inputs drawn afresh; `run_as(model)` is what is called."""
    model = of.model(exact)
    run = run_as(model)
    found = Outcome([], [], [], [])
    draw = torch.Generator().manual_seed(of.seed)
    for _ in range(calls):
        x, other = (torch.randn(ROWS, COLUMNS, generator=draw) for _ in range(2))
        mask = torch.randn(ROWS, COLUMNS, generator=draw) > 0
        index = torch.randperm(ROWS, generator=draw)
        if exact:
            x, other = x.double(), other.double()
        model.zero_grad()
        x.requires_grad_(of.training)
        with torch.set_grad_enabled(of.training):
            results = run(x, other, mask, index)
        loss = sum(
            (r.to(torch.promote_types(r.dtype, torch.float32)).sin().sum() for r in results if r.requires_grad),
            x.new_zeros(()),
        )
        if loss.requires_grad:
            loss.backward()
        places = [t.untyped_storage().data_ptr() for t in (*results, x, other)]
        found.shared.append([(i, j) for i, p in enumerate(places) for j, q in enumerate(places) if i < j and p == q])
        found.results.append([r.detach().clone() for r in results])
        found.left.append([t.detach().clone() for t in (other, *model.buffers())])
        leaves = (x, *model.parameters())
        found.gradients.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in leaves])
    return found
