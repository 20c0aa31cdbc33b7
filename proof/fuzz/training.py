"""Random training: a program of statements on a model whose copies are kept, and on its twin that casts every call."""

import random
from dataclasses import dataclass

import torch

from benchmarks.numbers import same_bits
from proof.fuzz.modules import choices
from proof.fuzz.trained import OPTIMIZERS, Side

# Statements by how often they come; `s` is a `Side`, `m` its model.
CALLS = """
s.forward(4)|s.forward(6)|s.backward(0)|s.backward(1)|s.backward(-1)|s.step()|s.step(clipped=True)|s.train_step(4)
s.train_step(4)|s.evaluate(4, torch.no_grad)|s.evaluate(6, torch.inference_mode)|s.evaluate(4, torch.enable_grad)
"""
WRITERS = """
with torch.no_grad(): m.first.weight.mul_(0.9)|with torch.no_grad(): m.second.weight[1, 3] += 1
with torch.inference_mode(): m.second.weight.add_(0.125)|with torch.inference_mode(): m.head.weight.data[2, 3] += 1
with torch.no_grad(): m.second.weight.copy_(m.second.weight.flip(0))|with torch.no_grad(): m.conv.weight.neg_()
m.first.weight.data.add_(0.125)|m.second.weight.data[3].neg_()|m.piece.data.view(-1)[5:9].zero_()
m.tied.weight.data.copy_(torch.eye(16))|m.first.weight.detach().t()[2].mul_(0.5)|m.flat.mul_(0.9)|m.flat[27] += 1
m.flat.data[40:60] = 0.5|m.first.bias.data.mul_(-1)|m.conv.weight.data[1, 0, 2] += 1
torch._foreach_mul_([p.data for p in m.parameters()], 0.95)|torch._foreach_add_([m.piece.data, m.head.weight.data], 0.1)
with torch.no_grad(): torch._foreach_mul_(list(m.parameters()), 0.95)
with torch.no_grad(): torch._foreach_copy_([m.second.weight], [torch.randn(16, 16) / 4])
m.first.weight.data = m.first.weight.data * 0.9|m.head.weight.data = torch.randn(4, 16) / 4
m.second.weight.data = m.piece.data|with torch.no_grad(): m.first.weight.set_(torch.randn(16, 12) / 4)
if not s.waiting: torch.utils.swap_tensors(m.head.weight, nn.Parameter(torch.randn(4, 16) / 4))
if not s.waiting: torch.utils.swap_tensors(m.second.weight, nn.Parameter(torch.randn(16, 16) / 4))
m.load_state_dict({name: value * 0.9 for name, value in m.state_dict().items()})
m.load_state_dict({name: value.clone() for name, value in m.state_dict().items()}, assign=True)
nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(m.parameters()) * 0.95, m.parameters())
m.second.weight.detach().numpy()[...] *= 0.9|torch.from_dlpack(m.first.weight.detach()).mul_(0.9)
m.second.weight.untyped_storage().copy_((torch.randn(16, 16) / 4).untyped_storage())
nn.init.xavier_uniform_(m.first.weight)|m.second.weight = m.tied.weight = nn.Parameter(torch.randn(16, 16) / 4)
m.tied.weight = nn.Parameter(m.tied.weight.detach().clone())|m.head.weight = nn.Parameter(m.head.weight.data)
m.double().float()|m.first.requires_grad_(False)|m.first.requires_grad_(True)|m.batch.running_mean.add_(0.1)
s.aliases += [m.first.weight.data, m.tied.weight.detach().t()]|s.aliases += [nn.Parameter(m.piece.data)]
for alias in s.aliases: alias.data.mul_(0.9)|for alias in s.aliases: alias.detach()[3:4].add_(1)
s.aliases.clear()
"""
READS = "s.forward", "s.backward", "s.evaluate"
"""How statements begin that write no weight."""
OTHERS = """
s.save()|s.load()|s.raises(4, 0)|s.raises(4, 1)|s.optimizer.zero_grad(set_to_none=False)|s.waiting.clear()
"""


_CALLS, _WRITERS, _OTHERS = map(choices, (CALLS, WRITERS, OTHERS))
_OTHERS += [f"s.other({name!r})" for name in OPTIMIZERS]


@dataclass(frozen=True)
class Training:
    """Statements, and what they act on: `broken` is a model in two graphs."""

    seed: int
    lines: tuple[str, ...]
    broken: bool
    optimizer: str

    def __str__(self) -> str:
        return "\n".join([f"# {self.optimizer}, {'two graphs' if self.broken else 'one graph'}", *self.lines])


def training(seed: int) -> Training:
    """The program of a seed: calls between which something is written, saved, or goes wrong."""
    draw = random.Random(seed)
    lines = ["s.train_step(4)"]
    for _ in range(draw.randint(8, 24)):
        lines.append(draw.choice(draw.choices((_CALLS, _WRITERS, _OTHERS), (10, 8, 2))[0]))
    return Training(seed, tuple(lines), draw.random() < 0.5, draw.choice(list(OPTIMIZERS)))


@dataclass(frozen=True)
class Beside:
    """Trains by a program, beside its twin, and looks whether numbers are as near to float64 as eager autocast's."""

    dtype: torch.dtype = torch.bfloat16
    lower: str = "aot_eager"
    late: bool = True
    """Losses wait for their backward while weights are written."""
    looks: int = 3
    """How often: after equal parts of the program."""

    def program(self, seed: int) -> Training:
        """That of a seed."""
        return training(seed)

    def judge(self, of: Training) -> tuple[str, list[tuple[str, str]]]:
        """A program's verdict in one word, and its first difference."""
        sides = [
            Side(of.seed, of.broken, of.optimizer, self.dtype, lower=self.lower, weights=weights)
            for weights in ("cached", "every_call")
        ]
        stride = -(-len(of.lines) // self.looks)
        for place, line in enumerate(of.lines, 1):
            if not self.late and not line.startswith(READS):
                for side in sides:
                    side.waiting.clear()
            ours, theirs = (side.do(line, of.seed + place) for side in sides)
            if not same_bits(ours, theirs):
                return "fails", [("stale", f"statement {place}, {line}: {_unlike(ours, theirs)}")]
            if (place % stride == 0 or place == len(of.lines)) and (wrong := sides[0].look(4)):
                return "fails", [("values", f"after statement {place}, {line}: {wrong}")]
        return "same bits", []


def _unlike(ours: list, theirs: list) -> str:
    words = [[value for value in side if isinstance(value, str)] for side in (ours, theirs)]
    return f"{words[0]}, cast at every call {words[1]}" if words[0] != words[1] else "other numbers than its twin's"
