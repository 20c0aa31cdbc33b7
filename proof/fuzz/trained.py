"""A module in training, on which a program's statements act: calls, backwards, steps, checkpoints, errors."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampcompile
from benchmarks.numbers import relative_error, same_bits
from proof.faults.raising import Breaking, Fuse, UserError

WIDTH = 16
NEAR = 1.5
"""Times as far from float64: of the few numbers of one look either side may be nearer by chance."""


class Model(Breaking, nn.Module):
    """A weight in two layers, one that lies in a buffer's memory, norms, a convolution; in two graphs if `broken`."""

    flat: Tensor

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken, self.fuses = broken, (Fuse(), Fuse())
        self.first, self.norm, self.head = nn.Linear(12, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.second, self.tied = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.tied.weight = self.second.weight
        self.conv, self.batch = nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(WIDTH)
        self.register_buffer("flat", torch.randn(2 * WIDTH * WIDTH) / 4)
        self.piece = nn.Parameter(self.flat[WIDTH : WIDTH + WIDTH * WIDTH].view(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 12] to [N, 4]."""
        h = self.norm(self.first(x).relu())
        h = self.second(h) + F.gelu(self.tied(h))
        h = self.between(h) if self.broken else h
        h = F.linear(h, self.piece) + self.conv(h.unsqueeze(1)).sum(1)
        return self.head(self.batch(h))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9, foreach=False),
    "SGD, fused": lambda ps: torch.optim.SGD(ps, 0.05, fused=True),
    "Adam, fused": lambda ps: torch.optim.Adam(ps, 0.01, fused=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, 0.01),
    "AdamW, foreach": lambda ps: torch.optim.AdamW(ps, 0.01, foreach=True, amsgrad=True),
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, 0.01, fused=True),
    "Adagrad, fused": lambda ps: torch.optim.Adagrad(ps, 0.01, fused=True),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, 0.001),
    "NAdam": lambda ps: torch.optim.NAdam(ps, 0.01),
}


class Side:
    """A model, compiled, and all that trains it. What a statement gave is in `gave`."""

    def __init__(self, seed: int, broken: bool, optimizer: str, dtype: torch.dtype, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model, self.dtype = Model(broken), dtype
        self.run = torch.compile(self.model, backend="amp", options=options | {"dtype": dtype})
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scaler = ampcompile.GradScaler("cpu", init_scale=8.0, growth_interval=3, enabled=dtype is torch.float16)
        self.waiting: list[Tensor] = []
        self.aliases: list[Tensor] = []
        self.saved: Any = None
        self.gave: list[Any] = []

    def do(self, statement: str, seed: int) -> list[Any]:
        """The result of a statement: tensors, or the kind of error that it raises."""
        self.gave = []
        torch.manual_seed(seed)
        try:
            exec(statement, {"s": self, "m": self.model, "torch": torch, "nn": nn})
        except Exception as raised:
            self.gave.append(type(raised).__name__)
        return self.gave

    def forward(self, rows: int) -> None:
        """A loss, whose backward is to come."""
        out = self.run(torch.randn(rows, 12))
        self.waiting.append(F.mse_loss(out, torch.randn(rows, 4)))
        self.gave += [out.detach().clone()]

    def backward(self, which: int) -> None:
        """Of one of the losses that wait; gradients add up."""
        if self.waiting:
            self.scaler.scale(self.waiting.pop(which % len(self.waiting))).backward()
            self.gave += [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def step(self, clipped: bool = False) -> None:
        """Run the part of a step that follows backward."""
        if any(p.grad is not None for group in self.optimizer.param_groups for p in group["params"]):
            if clipped:
                self.scaler.clip_grad_norm_(self.optimizer, 0.5)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.gave += [t.detach().clone() for t in (*self.model.parameters(), *self.model.buffers())]

    def train_step(self, rows: int) -> None:
        """All of one."""
        self.forward(rows)
        self.backward(-1)
        self.step()

    def other(self, name: str) -> None:
        """Another optimizer from here on, of the parameters that are there now."""
        self.optimizer = OPTIMIZERS[name](self.model.parameters())

    def evaluate(self, rows: int, mode: Callable[[], AbstractContextManager]) -> None:
        """Outputs of the model in evaluation, between steps."""
        self.model.eval()
        try:
            with mode():
                self.gave += [self.run(torch.randn(rows, 12)).detach().clone()]
        finally:
            self.model.train()

    def raises(self, rows: int, where: int) -> None:
        """An error of the user's own in the middle of forward (0) or backward (1)."""
        self.model.fuses[where].armed = self.model.broken
        try:
            self.forward(rows)
            self.backward(-1)
        except UserError:
            self.gave += ["the user's error"]
        finally:
            self.model.fuses[where].armed = False

    def save(self) -> None:
        """A checkpoint in memory."""
        self.saved = copy.deepcopy([part.state_dict() for part in self._parts()])

    def _parts(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.scaler

    def load(self) -> None:
        """Back to it."""
        if self.saved:
            for part, state in zip(self._parts(), self.saved, strict=True):
                part.load_state_dict(copy.deepcopy(state))

    def look(self, rows: int) -> str:
        """Name outputs or gradients that are further from float64 than eager autocast's of the same weights.

        In evaluation: running statistics would be changed by whoever comes first.
        """
        x, target, found = torch.randn(rows, 12), torch.randn(rows, 4), []
        self.model.eval()
        try:
            exact = copy.deepcopy(self.model).double()
            autocast = torch.autocast("cpu", self.dtype, cache_enabled=False)
            runs = (self.run, x, self.model), (autocast(self.model), x, self.model), (exact, x.double(), exact)
            ours, theirs, exactly = (_values(run, of, given, target.to(given.dtype)) for run, given, of in runs)
        finally:
            self.model.train()
        for kind, (a, b, e) in zip(("output", "gradients"), zip(ours, theirs, exactly, strict=True), strict=True):
            mine, eagers = relative_error(a, e), relative_error(b, e)
            if not same_bits(a, b) and not mine <= NEAR * eagers + 1e-6:
                found.append(f"{kind}: {mine:.3g} from float64, eager autocast {eagers:.3g}")
        return "; ".join(found)


def _values(run: Any, model: nn.Module, x: Tensor, target: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of a loss with respect to the weights that have one."""
    with torch.no_grad():
        still = run(x).to(x.dtype)
    out = run(x).to(x.dtype)
    weights = [p for p in model.parameters() if p.requires_grad]
    return [still, out.detach()], list(torch.autograd.grad(1024 * F.mse_loss(out, target), weights))
