"""Training programs whose whole step can be captured, with what may stand between steps. A step of each trains."""

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import ampcompile

WIDTH, ROWS = 32, 16
BF16, F16 = torch.bfloat16, torch.float16
FP8 = {"policy": {"ops": {"linear": "fp8"}}, "products": "torch"}
PROGRAMS: dict[str, type["Program"]] = {}


class Program:
    """`train` is what a program calls: its step, or that captured. `step` returns a loss.

    Each subclass is a program of its own; `fp8`: and one more, whose products are in fp8.
    """

    dtype = BF16
    options: ClassVar[dict[str, Any]] = {}
    zeroes = True
    train: Callable[[Tensor], Tensor]

    def __init_subclass__(cls, fp8: bool = False) -> None:
        PROGRAMS[cls.__name__] = cls
        if fp8:
            type(f"{cls.__name__}Fp8", (cls,), {"options": FP8})

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device, self.said = device, list[Tensor]()
        self.model = self.net()
        self.run = self.compiled(self.model)
        self.optimizers = [self.adamw(self.model)]
        self.scaler = ampcompile.GradScaler(
            device, enabled=self.dtype == F16, init_scale=2.0**10, growth_interval=4, backoff_factor=0.5
        )
        self.add()

    def add(self) -> None:
        """Make what else a program has."""

    def net(self, features: int = WIDTH) -> nn.Module:
        layers = nn.Linear(features, 48), nn.GELU(), nn.Linear(48, WIDTH)
        return nn.Sequential(*layers).to(self.device)

    def compiled(self, model: nn.Module, **options: Any) -> Any:
        options = {"dtype": self.dtype, "lower": "aot_eager", **self.options, **options}
        return torch.compile(model, backend="amp", dynamic=False, options=options)

    def adamw(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = (param for param in model.parameters() if param.requires_grad)
        return torch.optim.AdamW(trained, lr=1e-2, fused=True, capturable=True)

    def batch(self, turn: int, rows: int = ROWS) -> Tensor:
        return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(turn)).to(self.device)

    def loss(self, x: Tensor) -> Tensor:
        found: Tensor = (self.run(x) - x.roll(1, 1)).square().mean()
        return found

    def update(self, optimizer: Any) -> None:
        self.scaler.step(optimizer)
        if self.zeroes:
            optimizer.zero_grad()

    def step(self, x: Tensor) -> Tensor:
        loss = self.loss(x)
        self.scaler.scale(loss).backward()
        self.update(self.optimizers[0])
        self.scaler.update()
        return loss.detach()

    def between(self, turn: int) -> None:
        """Do what stands between steps."""

    def evaluate(self, run: Any, rows: int = ROWS) -> None:
        with torch.no_grad():
            self.said.append(run(self.batch(99, rows)).clone())

    def say_gradients(self) -> None:
        self.said += [param.grad.clone() for param in self.model.parameters()]

    def free(self, model: nn.Module) -> None:
        """Free its copies, and take memory that may have been theirs."""
        ampcompile.free_copies(model)
        self.take_memory()

    def take_memory(self) -> None:
        self.taken = [torch.full((48, WIDTH), 7.0, dtype=BF16, device=self.device) for _ in range(4)]

    def go(self, turns: range) -> None:
        for turn in turns:
            self.said.append(self.train(self.batch(turn)).clone())
            self.between(turn)

    def capture(self) -> None:
        """Capture the step at the third call."""
        self.train = ampcompile.capture_step(self.step, *self.optimizers, warm_up=2)

    def weights(self) -> list[Tensor]:
        modules = [each for each in vars(self).values() if isinstance(each, nn.Module)]
        return [param.detach() for module in modules for param in module.parameters()]


class Plain(Program, fp8=True):
    """One model, one optimizer."""


class Sgd(Program):
    def add(self) -> None:
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)]


class Skipping(Program, fp8=True):
    """float16, clipped, with steps that the scaler skips."""

    dtype = F16

    def batch(self, turn: int, rows: int = ROWS) -> Tensor:
        x = super().batch(turn, rows)
        return x * torch.inf if turn in (4, 7, 8) else x

    def update(self, optimizer: Any) -> None:
        self.scaler.clip_grad_norm_(optimizer, 0.5)
        super().update(optimizer)


class Accumulation(Program):
    def step(self, x: Tensor) -> Tensor:
        losses = []
        for part in x.chunk(4):
            losses.append(self.loss(part))
            losses[-1].backward()
        self.update(self.optimizers[0])
        return torch.stack(losses).detach()


class TorchsOwn(Program, fp8=True):
    """Steps that raise versions, or whose hooks report them, and write no copy."""

    def update(self, optimizer: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()


class Lion(Program):
    """By hand, and weights that are clamped after the step."""

    def add(self) -> None:
        self.momenta = [torch.zeros_like(param) for param in self.model.parameters()]

    def update(self, optimizer: Any) -> None:
        with torch.no_grad():
            for param, momentum in zip(self.model.parameters(), self.momenta, strict=True):
                param.add_(momentum.lerp(param.grad, 0.1).sign(), alpha=-1e-3)
                momentum.lerp_(param.grad, 0.01)
        optimizer.zero_grad()


class Clamped(Program, fp8=True):
    """The fused step, and a write by hand behind it."""

    def update(self, optimizer: Any) -> None:
        super().update(optimizer)
        with torch.no_grad():
            for param in self.model.parameters():
                param.clamp_(-0.1, 0.1)


class ThroughData(Program):
    """The same by `.data`, which raises no version."""

    def update(self, optimizer: Any) -> None:
        super().update(optimizer)
        for param in self.model.parameters():
            param.data.mul_(0.9)


class Sam(Program):
    """Two forwards, the second with weights that are moved and moved back."""

    def step(self, x: Tensor) -> Tensor:
        optimizer, moved = self.optimizers[0], []
        self.loss(x).backward()
        with torch.no_grad():
            for param in self.model.parameters():
                moved.append(param.grad * 0.05)
                param.add_(moved[-1])
        optimizer.zero_grad()
        loss = self.loss(x)
        loss.backward()
        with torch.no_grad():
            for param, by in zip(self.model.parameters(), moved, strict=True):
                param.sub_(by)
        self.update(optimizer)
        return loss.detach()


class Held(Program):
    """Within a step, a backward that comes after an update of its weights, between forwards of old and new ones."""

    def step(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        first = self.loss(x)
        with torch.no_grad():
            for param in self.model.parameters():
                param.mul_(0.9)
        second = self.loss(x)
        (by,) = torch.autograd.grad(first, x)
        (second + (by.detach() * x).sum()).backward()
        self.update(self.optimizers[0])
        return second.detach()


class Gan(Program):
    """G is trained by D, which was stepped just before."""

    def add(self) -> None:
        self.judge = self.net()
        self.run_judge = self.compiled(self.judge)
        self.optimizers.append(self.adamw(self.judge))

    def step(self, x: Tensor) -> Tensor:
        made = self.run(x)
        loss = self.run_judge(made.detach()).square().mean() - self.run_judge(x).mean()
        loss.backward()
        self.update(self.optimizers[1])
        other = self.run_judge(made).sigmoid().mean()
        other.backward()
        self.optimizers[1].zero_grad()
        self.update(self.optimizers[0])
        return torch.stack([loss, other]).detach()


class GanOfTorchsOwn(Gan, TorchsOwn):
    """With steps that write no copy."""


class Lora(Program, fp8=True):
    """A frozen model with a trained one beside it."""

    def add(self) -> None:
        self.base = self.net().requires_grad_(False)
        self.run_base = self.compiled(self.base)

    def loss(self, x: Tensor) -> Tensor:
        found: Tensor = (self.run_base(x) + self.run(x) - x.roll(1, 1)).square().mean()
        return found


class Sharing(Program):
    """Two captured steps of two models that share a part, each with its optimizer."""

    def add(self) -> None:
        self.head = self.net()
        self.both = nn.Sequential(self.model, self.head)
        self.run_both = self.compiled(self.both)
        self.optimizers.append(self.adamw(self.both))
        self.other = self.step_of_both

    def step_of_both(self, x: Tensor) -> Tensor:
        loss = self.run_both(x).square().mean()
        loss.backward()
        self.update(self.optimizers[1])
        return loss.detach()

    def capture(self) -> None:
        self.train = ampcompile.capture_step(self.step, self.optimizers[0], warm_up=2)
        self.other = ampcompile.capture_step(self.step_of_both, self.optimizers[1], warm_up=2)

    def between(self, turn: int) -> None:
        self.said.append(self.other(self.batch(turn + 50)).clone())


class Averaged(Program, fp8=True):
    """Averages, made between steps, and swapped in for an evaluation, and every fourth time to go on from there."""

    def add(self) -> None:
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.run_average = self.compiled(self.average)

    def swap(self) -> None:
        with torch.no_grad():
            for param, mean in zip(self.model.parameters(), self.average.parameters(), strict=True):
                kept = param.clone()
                param.copy_(mean)
                mean.copy_(kept)

    def mean(self) -> None:
        with torch.no_grad():
            for param, mean in zip(self.model.parameters(), self.average.parameters(), strict=True):
                mean.lerp_(param, 0.2)

    def between(self, turn: int) -> None:
        self.mean()
        self.evaluate(self.run_average)
        self.swap()
        self.evaluate(self.run)
        if turn % 4:
            self.swap()


class AveragingInside(Averaged):
    """Averages are made in the step, and their copies before the capture."""

    def step(self, x: Tensor) -> Tensor:
        loss = super().step(x)
        self.mean()
        return loss

    def between(self, turn: int) -> None:
        self.evaluate(self.run_average)


class AveragedByData(AveragingInside):
    def mean(self) -> None:
        with torch.no_grad():
            for param, mean in zip(self.model.parameters(), self.average.parameters(), strict=True):
                mean.data.lerp_(param, 0.2)


class AveragedLate(AveragingInside):
    """Copies of averages, and of a model that no step writes, are made only after the capture."""

    def add(self) -> None:
        super().add()
        self.late = self.net()

    def between(self, turn: int) -> None:
        if turn > 5:
            for model in (self.late, self.average):
                self.evaluate(self.compiled(model))


class Loaded(Program):
    """A checkpoint of the weights, loaded again and again."""

    def between(self, turn: int) -> None:
        if turn == 3:
            self.kept = {name: value.clone() for name, value in self.model.state_dict().items()}
        if turn in (5, 6, 9):
            self.model.load_state_dict(self.kept)


class Evaluated(Program):
    """In other types, shapes and modes; every third time under autocast, and a part alone."""

    def add(self) -> None:
        self.runs = [self.compiled(self.model, dtype=F16, policy={}), self.compiled(self.model, **FP8), self.run]

    def between(self, turn: int) -> None:
        if turn % 3 == 2:
            with torch.autocast(self.device, BF16):
                self.evaluate(self.run)
            self.evaluate(self.compiled(self.model[0]), ROWS + 16)
            return
        for run in self.runs[turn % 2 :]:
            for rows in (ROWS, 32):
                self.evaluate(run, rows)


class Freed(Averaged):
    """Copies are freed between steps; then memory is taken that theirs may have been, and weights are written."""

    def between(self, turn: int) -> None:
        if turn % 3 == 0:
            self.free(self.model)
        super().between(turn)
        if turn % 3 == 0:
            assert all(bool((each == 7).all()) for each in self.taken)


class FreedLora(Lora):
    """So are those of a frozen model, which is written afterwards."""

    def between(self, turn: int) -> None:
        if turn % 3 == 0:
            self.free(self.base)
        if turn % 4 == 0:
            with torch.no_grad():
                for param in self.base.parameters():
                    param.mul_(-0.9)
