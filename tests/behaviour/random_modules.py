"""Small random modules, as text: the same program for stock AOTAutograd under autocast, for amp and in float64."""

import random
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

COLUMNS = 8

# Every value has `rows` x COLUMNS numbers; `{a}` and `{b}` stand for values computed before, or for inputs.
COMPUTED = """
self.first({a})|self.second({a})|F.linear({a}, self.weight)|{a} @ self.weight.t()|F.linear({a}, self.weight[:, :8])
F.linear({a}, self.weight.view(8, 2, 4).flatten(1))|({a}.t() @ {b}).mean() + {a}
torch.einsum("ij,jk->ik", {a}, self.weight)|self.conv({a}.view(-1, 2, 4)).view(-1, 8)
self.conv({a}.reshape(-1, 2, 4)).reshape(-1, 8)|self.norm({a})|self.batch({a})|F.group_norm({a}, 2)
F.rms_norm({a}, (8,))|F.gelu({a})|{a}.relu()|F.silu({a})|{a}.sigmoid()|{a}.tanh()|F.elu({a})|{a} + {b}|{a} * {b}
{a} - {b} * 0.5|torch.maximum({a}, {b})|{a}.add({b}, alpha=0.3)|torch.lerp({a}.float(), {b}.float(), 0.3)
{a}.softmax(-1)|{a}.log_softmax(0)|{a}.exp().clamp(max=3.0)|{a}.cumsum(0)|{a} / (1 + {b}.abs())|{a}.float().pow(2)
{a}.float()|{a}.bfloat16()|{a}.to({b}.dtype)|{a}.type_as({b})|{a}.half().float()|{a}.double().float()|{a}.detach()
{a}.clone()|{a}.contiguous()|{a}[:]|{a}.view(-1, 8)|{a}.data * 0.5|{a}.detach() * {b}|F.dropout({a} * 1.0, 0.5, False)
{a}.reshape(2, -1, 8).transpose(0, 1).reshape(-1, 8)|{a}.t().contiguous().t()|{a}.flatten().view(-1, 8)|{a}.flip(0)
torch.cat([{a}, {b}])[: len(x)]|torch.cat([{a}[:, :4], {b}[:, 4:]], 1)|torch.stack([{a}, {b}]).sum(0)
torch.where(mask, {a}, {b})|{a}.chunk(2, 1)[0].repeat(1, 2)|{a}[index]|{a}.roll(1, 0)|{a} - {a}.mean(-1, keepdim=True)
{a} + {b}.sum(0)|{a} + self.average|{a} + F.cross_entropy({a}, index)|{a} * F.mse_loss({a}, {b})
F.normalize({a}, dim=-1)|{a}.addmm({b}, self.weight)|{a} + self.scale
F.scaled_dot_product_attention(*(t.reshape(1, 2, -1, 8) for t in ({a}, {b}, {a}))).reshape(-1, 8)
checkpoint(lambda t: self.first(F.gelu(t)) + t, {a} * 1.0, use_reentrant=False)|F.embedding(index, self.weight)
2 * self.second({b})|self.tied({a})|F.linear({a}, self.tied.weight)|{a} @ self.second.weight|self.piece({a})
untraced({a})|self.first({a}) - self.first({b})|F.linear({a}, self.flat[8:72].view(8, 8))
F.linear({a}, self.piece.weight[:4]).repeat(1, 2)
"""
# Statements that write, into values, the input `other` and buffers.
WRITTEN = """
{a}.mul_(0.5)|{a}.add_({b})|{a}.relu_()|{a}[:, :4] = {b}[:, 4:]|{a}[1] = 0.5|{a}[..., ::2] += {b}[..., ::2]
{a}[index] = {b}[index]|{a}.masked_fill_(mask, 0.25)|{a}.copy_({b})|{a}.view(-1)[3:9].zero_()|{a}.data.mul_(0.5)
{a}.t().add_(0.1)|{a}.detach().mul_(0.9)|{a}[0].copy_({b}[1])|{a}.clamp_(-2, 2)|{a}.sub_({b}, alpha=0.1)
{a}.index_copy_(0, index, {b}.clone().to({a}.dtype))|{a}[mask] = 0.0
self.average.mul_(0.9).add_({a}.detach().float().mean(0), alpha=0.1)|self.count += 1
self.average.copy_({a}.detach()[0])|other.mul_(0.9)|other[0] = {a}.detach()[1]
other.add_({b}.detach().to(other.dtype))|self.average.data.lerp_({a}.data[1].float(), 0.2)
torch._dynamo.graph_break()|self.flat.mul_(0.9)|self.flat[8:16].copy_({a}.detach()[1])|{a}[1:].t()[2:5].mul_(0.5)
{a}[:, 2:6][0].copy_({b}[1, 2:6])|{a}.select(1, 3).add_({b}.detach().mean(1))
"""
AROUND = (
    "with torch.no_grad():",
    'with torch.autocast("cpu", enabled=False):',
    'with torch.autocast("cpu", dtype=torch.float16):',
    'with torch.autocast("cpu", dtype=torch.bfloat16):',
    "with torch.enable_grad():",
)


def choices(text: str) -> list[str]:
    """The choices in the lines of a text, between bars."""
    return [choice for line in text.strip().splitlines() for choice in line.split("|")]


_COMPUTED, _WRITTEN = choices(COMPUTED), choices(WRITTEN)


@dataclass(frozen=True)
class Program:
    """`lines`: the body of a `def forward(self, x, other, mask, index)` that returns a tuple."""

    seed: int
    lines: tuple[str, ...]
    training: bool

    def __str__(self) -> str:
        return "\n    ".join(["def forward(self, x, other, mask, index):", *self.lines])

    def model(self, exact: bool = False) -> nn.Module:
        """The module, its weights drawn from the seed; `exact`: all of it in float64, the user's own casts too."""
        source = str(self)
        if exact:
            source = re.sub(r"\.(float|bfloat16|half)\(\)", ".double()", source)
            source = re.sub(
                r"torch\.autocast\(.*\)",
                "torch.no_grad() if not torch.is_grad_enabled() else torch.enable_grad()",
                source,
            )
        names: dict[str, Any] = {"torch": torch, "F": F, "checkpoint": checkpoint, "untraced": _untraced}
        exec(compile(source, f"<program {self.seed}>", "exec"), names)
        model = _Parts(self.seed)
        if exact:
            model.double().share()
        model.program = names["forward"].__get__(model)
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
            self.weight = nn.Parameter(torch.randn(8, 8) / 3)
            self.scale = nn.Parameter(torch.randn(8))
            self.register_buffer("average", torch.randn(8))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
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
    return Program(seed, (*lines, f"return {', '.join(returned)},"), draw.random() < 0.8)
