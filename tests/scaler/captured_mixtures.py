"""Training programs that mix captured steps with what else stands in training loops; see `captured_programs`."""

import copy
import gc
import random
import warnings
from collections import deque
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import ampcompile
from tests.scaler.captured_programs import BF16, F16, PROGRAMS, ROWS, WIDTH, Program, Sgd, Skipping


class Ours(Program, fp8=True):
    """Steps of our own optimizers, without a scaler."""

    kind: ClassVar[Any] = ampcompile.optim.AdamW
    settings: ClassVar[dict[str, Any]] = {"lr": 1e-2, "fused": True}

    def add(self) -> None:
        self.optimizers = [self.kind(self.model.parameters(), **self.settings)]

    def update(self, optimizer: Any) -> None:
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()


class OurAdam(Ours):
    kind = ampcompile.optim.Adam
    settings: ClassVar = {"lr": 1e-2, "amsgrad": True, "fused": True}


class OurSgd(Ours):
    kind = ampcompile.optim.SGD
    settings: ClassVar = {"lr": 0.1, "momentum": 0.9, "nesterov": True}


class Alternating(Program):
    """Every third step is launched by itself, between replays."""

    def between(self, turn: int) -> None:
        if turn % 3 == 2:
            self.said.append(self.step(self.batch(turn + 70)).clone())


class AlternatingOurs(Alternating, Ours):
    pass


class AlternatingByTorch(Program):
    """The one in between is torch's own step, with another optimizer's state."""

    def between(self, turn: int) -> None:
        if turn == 2:
            self.other = torch.optim.SGD(self.model.parameters(), lr=0.05)
        if turn % 3 == 2:
            self.loss(self.batch(turn + 70)).backward()
            self.other.step()
            self.other.zero_grad()


class OnStreams(Program, fp8=True):
    """Steps and evaluations on several streams, in the order that the program gives them."""

    def add(self) -> None:
        self.lanes = [torch.cuda.Stream() for _ in range(3)]

    def go(self, turns: range) -> None:
        for turn in turns:
            for number, run in ((turn % 3, self.train), ((turn + 1) % 2, self.run)):
                lane = self.lanes[number]
                lane.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(lane), torch.set_grad_enabled(run is self.train):
                    self.said.append(run(self.batch(turn)).clone())
                torch.cuda.current_stream().wait_stream(lane)


class Scheduled(Program):
    """A rate that is a tensor, and a scheduler that writes it."""

    def add(self) -> None:
        rate = torch.tensor(1e-2, device=self.device)
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=rate, fused=True)]
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.8)

    def between(self, turn: int) -> None:
        self.schedule.step()


class StateWritten(Program):
    """Weights and the optimizer's state are written in place, as by a checkpoint whose tensors are copied over."""

    def between(self, turn: int) -> None:
        values = [v for state in self.optimizers[0].state.values() for v in state.values()] + self.weights()
        if turn == 4:
            self.kept = [value.clone() for value in values]
        if turn in (6, 9):
            for value, kept in zip(values, self.kept, strict=True):
                value.copy_(kept)


class Copied(Program):
    """The model is copied between steps; copies are compiled, evaluated, trained, and go."""

    def between(self, turn: int) -> None:
        if turn % 2:
            other = copy.deepcopy(self.model)
            run = self.compiled(other)
            self.evaluate(run)
            run(self.batch(turn)).square().mean().backward()
            with torch.no_grad():
                for param in other.parameters():
                    param.sub_(param.grad, alpha=0.1)
            self.evaluate(run)
            self.evaluate(self.run)
        if turn % 5 == 0:
            gc.collect()


class CodeGone(Program):
    """What is compiled goes, and is compiled anew, between steps."""

    def between(self, turn: int) -> None:
        if turn in (4, 7):
            torch._dynamo.reset()
            self.run = self.compiled(self.model)
            gc.collect()
            self.take_memory()
        self.evaluate(self.run)


class Invalidated(Program):
    def between(self, turn: int) -> None:
        if turn % 3 == 0:
            ampcompile.invalidate(self.model)
        if turn % 4 == 0:
            ampcompile.free_copies(self.model)
        self.evaluate(self.run)


class TwoTypes(Program):
    """One model in two types, in the step and between steps."""

    def add(self) -> None:
        self.other = self.compiled(self.model, dtype=F16)

    def loss(self, x: Tensor) -> Tensor:
        found: Tensor = (self.run(x) + self.other(x) - x).square().mean()
        return found

    def between(self, turn: int) -> None:
        self.evaluate(self.other if turn % 2 else self.run)


class TwoShapes(Program, fp8=True):
    """A captured step for each shape, of one model and one optimizer, in turn."""

    def add(self) -> None:
        self.narrow: Any = self.step

    def capture(self) -> None:
        super().capture()
        self.narrow = ampcompile.capture_step(self.step, *self.optimizers, warm_up=2)

    def between(self, turn: int) -> None:
        if turn % 2:
            self.said.append(self.narrow(self.batch(turn + 70, 8)).clone())
        self.evaluate(self.run)


class ScaleLoaded(Skipping):
    """A scaler's state is loaded between steps, of which some are skipped."""

    def between(self, turn: int) -> None:
        if turn == 3:
            self.state = self.scaler.state_dict()
        if turn in (6, 11):
            self.scaler.load_state_dict(self.state)
        self.said.append(torch.tensor(self.scaler.get_scale()))


class ScaleSet(Skipping):
    def between(self, turn: int) -> None:
        if turn in (5, 9):
            self.scaler.update(2.0**7)
        self.said.append(torch.tensor(self.scaler.get_scale()))


class Groups(Program):
    """Several groups with settings of their own, one of parameters that no loss reaches."""

    def add(self) -> None:
        self.unused = self.net()
        first, second = self.model[0].parameters(), self.model[2].parameters()
        groups = [{"params": first}, {"params": second, "lr": 1e-3}, {"params": self.unused.parameters()}]
        self.optimizers = [torch.optim.AdamW(groups, lr=1e-2, fused=True)]


class ZeroedOutside(Program):
    """Gradients are zeroed between steps."""

    zeroes = False

    def between(self, turn: int) -> None:
        self.say_gradients()
        self.optimizers[0].zero_grad()


class Accumulating(Program):
    """Gradients are never zeroed: each step adds to them."""

    zeroes = False

    def between(self, turn: int) -> None:
        self.say_gradients()
        if turn % 5 == 4:
            self.optimizers[0].zero_grad(set_to_none=False)


class Zeroed(Program):
    """Gradients stay, and are zeroed at the beginning."""

    set_to_none = zeroes = False

    def step(self, x: Tensor) -> Tensor:
        self.optimizers[0].zero_grad(self.set_to_none)
        return super().step(x)

    def between(self, turn: int) -> None:
        self.say_gradients()


class ZeroedFirst(Zeroed):
    """Gradients are forgotten at the beginning of a step; between steps another backward adds to them."""

    set_to_none = True

    def between(self, turn: int) -> None:
        self.say_gradients()
        if turn % 3 == 0:
            self.loss(self.batch(turn + 70)).backward()
        self.say_gradients()


class Broken(Program, fp8=True):
    """The capture is interrupted, twice, before and behind the update; the call is made again."""

    error: type[BaseException] = ValueError
    at: ClassVar[dict[int, str]] = {2: "backward", 3: "update"}

    def add(self) -> None:
        self.ran = bytearray()  # a number would be refused

    def capture(self) -> None:
        super().capture()
        captured = self.train

        def again(x: Tensor) -> Tensor:
            for _ in range(3):
                try:
                    return captured(x)
                except self.error:
                    continue
            raise AssertionError("it goes on failing")

        self.train = again

    def fail(self, where: str) -> None:
        if torch.cuda.is_current_stream_capturing() and self.at.get(len(self.ran)) == where:
            self.ran.append(0)
            raise self.error

    def update(self, optimizer: Any) -> None:
        self.fail("backward")
        self.scaler.step(optimizer)
        self.fail("update")
        optimizer.zero_grad()
        self.ran.append(0)

    def between(self, turn: int) -> None:
        self.evaluate(self.run)


class Interrupted(Broken):
    error = KeyboardInterrupt


class BatchNorm(Program):
    """Running statistics, which the graph writes, and evaluation reads."""

    def net(self, features: int = WIDTH) -> nn.Module:
        layers = nn.Linear(features, 48), nn.BatchNorm1d(48), nn.GELU(), nn.Linear(48, WIDTH)
        return nn.Sequential(*layers).to(self.device)

    def between(self, turn: int) -> None:
        self.model.eval()
        self.evaluate(self.run)
        self.model.train()
        self.said += [each.clone().float() for each in self.model.buffers()]


class Scaled(nn.Module):
    """What reads a number and a flag of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.doubled = 1.0, False

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 / self.temperature if self.doubled else x / self.temperature


def halve(weight: Tensor) -> None:
    weight.grad.mul_(0.5)


def shrink(weight: Tensor) -> None:
    weight.data.mul_(0.9)


class Drawn(Ours):
    """Forms, settings, and changes of what the step reads, drawn at each call; it writes an argument."""

    seed = 0
    kind: ClassVar = ampcompile.optim.SGD
    settings: ClassVar[dict[str, Any]] = {"lr": 0.05, "momentum": 0.9}

    def net(self, features: int = WIDTH) -> nn.Module:
        layers = nn.Linear(features, 48), nn.BatchNorm1d(48), nn.Dropout(0.0), nn.Linear(48, WIDTH), Scaled()
        return nn.Sequential(*layers).to(self.device)

    def add(self) -> None:
        super().add()
        self.temperature, self.offset, self.hooks = 1.0, torch.zeros(WIDTH, device=self.device), deque[Any]()
        self.average, self.counting, self.calls = torch.zeros((), device=self.device), False, 0
        self.draws = random.Random(self.seed)

    def step(self, x: Tensor, average: Tensor) -> Tensor:
        loss = super().step(x)
        if self.counting:
            self.calls += 1
        average.mul_(0.9).add_(loss * (1 + self.calls))
        return loss

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x / self.temperature + self.offset)

    def change(self) -> None:
        optimizer, last = self.optimizers[0], self.model[3]
        group, weight = optimizer.param_groups[0], self.model[0].weight
        match self.draws.randrange(19):
            case 0:
                group["lr"] = self.draws.choice([0.05, 0.03])
            case 1:
                group["weight_decay"] = self.draws.choice([0.0, 0.01])
            case 2:
                group["nesterov"] = not group["nesterov"]
            case 3:
                self.temperature = self.draws.choice([1.0, 2.0, 3.0])
            case 4:
                self.offset = torch.full((WIDTH,), self.draws.random(), device=self.device)
            case 5:
                self.model[1].train(not self.model[1].training)
            case 6:
                self.model[2].p = self.draws.choice([0.0, 1.0])
            case 7:
                self.hooks.append(weight.register_hook(lambda grad: grad * 0.5))
            case 8 if self.hooks:
                self.hooks.pop().remove()
            case 9:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            case 10:
                self.model[3] = copy.deepcopy(last).requires_grad_(False)
                self.model[3].weight.data.mul_(0.9)
            case 11:
                self.model[4].temperature = self.draws.choice([1.0, 3.0])
            case 12:
                self.model[4].doubled = not self.model[4].doubled
            case 13:
                last.forward = lambda x: nn.functional.linear(x, last.weight)
            case 14:
                self.hooks.append(self.model[0].register_forward_hook(lambda module, inputs, output: output * 0.5))
            case 15:
                self.hooks.append(weight.register_post_accumulate_grad_hook(halve))
            case 16:
                self.hooks.append(optimizer.register_step_pre_hook(lambda *_: shrink(weight)))
            case 17:
                torch.optim.lr_scheduler.StepLR(optimizer, 100)
            case 18:
                self.counting = not self.counting

    def go(self, turns: range) -> None:
        with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=64):
            warnings.simplefilter("ignore")  # of what changed for the third time, and of calls that are counted
            for turn in turns:
                for call in range(3):
                    x = self.batch(3 * turn + call, self.draws.choice([8, 16, 16]))
                    with torch.autocast(self.device, BF16, enabled=self.draws.random() < 0.2):
                        self.said.append(self.train(x, self.average).clone())
                    self.said.append(self.average.clone())
                    self.say_buffers()
                if turn % 2:
                    self.change()

    def say_buffers(self) -> None:
        self.said += [each.clone().float() for each in self.model.buffers()]


for seed in range(1, 6):
    type(f"Drawn{seed}", (Drawn,), {"seed": seed})


schedulers = torch.optim.lr_scheduler
SCHEDULES: tuple[Any, ...] = (
    lambda optimizer: schedulers.StepLR(optimizer, 3, 0.5),
    lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 5),
    lambda optimizer: schedulers.LambdaLR(optimizer, lambda turn: min(1, turn / 6)),
    lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.1, 1, 7), schedulers.ExponentialLR(optimizer, 0.9)],
        milestones=[7],
    ),
    lambda optimizer: schedulers.OneCycleLR(optimizer, 0.05, 100, cycle_momentum=has_momentum(optimizer)),
    lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.05, 4, cycle_momentum=has_momentum(optimizer)),
)


def has_momentum(optimizer: Any) -> bool:
    return bool(optimizer.param_groups[0].get("momentum", True))


class Followed(Skipping):
    """Plain numbers of a drawn optimizer that change at each call, by a scheduler and by hand, in two forms by turns.

    A scaler, where the type is float16; a clipping to a number, a tensor, or none.
    """

    seed = 0

    def add(self) -> None:
        self.draws = draws = random.Random(self.seed)
        kind, amount = draws.choice(["SGD", "SGD", "Adam", "AdamW"]), draws.choice([0.0, 0.01])
        settings = {"momentum": draws.choice([0.0, 0.8])} if kind == "SGD" else {"amsgrad": draws.random() < 0.3}
        module = draws.choice([torch.optim, ampcompile.optim]) if self.dtype == F16 else ampcompile.optim
        groups = [{"params": self.model[0].parameters()}, {"params": self.model[2].parameters(), "lr": 5e-3}]
        self.optimizers = [getattr(module, kind)(groups, lr=0.01, weight_decay=amount, fused=True, **settings)]
        self.schedule = draws.choice(SCHEDULES)(self.optimizers[0])
        self.limit = draws.choice([None, 0.5, torch.tensor(0.5, device=self.device)])

    def batch(self, turn: int, rows: int = ROWS) -> Tensor:
        return (Skipping if self.dtype == F16 else Program).batch(self, turn, rows)

    def update(self, optimizer: Any) -> None:
        if self.limit is not None:
            if self.dtype == F16:
                self.scaler.clip_grad_norm_(optimizer, self.limit)
            else:
                optimizer.clip_grad_norm_(self.limit)
        self.scaler.step(optimizer)
        optimizer.zero_grad()

    def change(self) -> None:
        self.schedule.step()
        group = self.draws.choice(self.optimizers[0].param_groups)
        names = [name for name in ("weight_decay", "eps", "momentum") if group.get(name)]
        if names and self.draws.random() < 0.5:
            group[self.draws.choice(names)] *= self.draws.choice([0.5, 1.1])
        if isinstance(self.limit, Tensor):
            self.limit.mul_(0.9)

    def go(self, turns: range) -> None:
        for turn in turns:
            for rows in (16, 8):
                self.said.append(self.train(self.batch(turn, rows)).clone())
                self.change()


for seed in range(1, 7):
    type(f"Followed{seed}", (Followed,), {"seed": seed, "dtype": F16 if seed % 2 else BF16})


def shrink_by_rate(optimizer: Any, *_: Any) -> None:
    group = optimizer.param_groups[0]
    with torch.no_grad():
        for param in group["params"]:
            param.mul_(1 - group["lr"])


class RateRead(Ours):
    """The step itself reads the rate, which changes between calls."""

    def update(self, optimizer: Any) -> None:
        super().update(optimizer)
        shrink_by_rate(optimizer)

    def between(self, turn: int) -> None:
        if turn in (5, 9):
            self.optimizers[0].param_groups[0]["lr"] *= 0.5


class RateReadByHook(Ours):
    between = RateRead.between

    def add(self) -> None:
        super().add()
        self.optimizers[0].register_step_post_hook(shrink_by_rate)


class TwoRates(RateRead):
    """The step takes two steps, with two rates that none of its functions names."""

    def add(self) -> None:
        super().add()
        self.groups, self.name = self.optimizers[0].param_groups, "lr"

    def update(self, optimizer: Any) -> None:
        for factor in (0.5, 2):
            optimizer.step()
            self.groups[0][self.name] *= factor
        optimizer.zero_grad()


class AlternatingRates(Alternating, Ours):
    """Every third step is launched by itself, each with another rate."""

    def between(self, turn: int) -> None:
        super().between(turn)
        self.optimizers[0].param_groups[0]["lr"] *= 0.9


class Epochs(Skipping, fp8=True):
    """Epochs with a smaller last batch, overflows, a warm-up and a cosine by numbers, evaluations between them, and a
    checkpoint loaded in the middle.
    """

    def add(self) -> None:
        optimizer = self.optimizers[0]
        parts = [schedulers.LinearLR(optimizer, 0.1, 1, 3), schedulers.CosineAnnealingLR(optimizer, 9)]
        self.schedule = schedulers.SequentialLR(optimizer, parts, milestones=[3])

    def net(self, features: int = WIDTH) -> nn.Module:
        layers = nn.Linear(features, 48), nn.Dropout(0.25), nn.GELU(), nn.Linear(48, WIDTH)
        return nn.Sequential(*layers).to(self.device)

    def go(self, turns: range) -> None:
        kept = self.model, self.optimizers[0], self.scaler, self.schedule
        for turn in turns:
            torch.cuda.manual_seed(turn)
            for number in range(3):
                x = self.batch(3 * turn + number, 16 if number < 2 else 8)
                self.said.append(self.train(x).clone())
            self.model.eval()
            self.evaluate(self.run)
            self.model.train()
            self.schedule.step()
            if turn == 3:
                self.checkpoint = copy.deepcopy([one.state_dict() for one in kept])
            if turn == 6:
                for one, state in zip(kept, copy.deepcopy(self.checkpoint), strict=True):
                    one.load_state_dict(state)


class MicroBatches(Ours, fp8=True):
    """One function for a micro-batch, one for the last with the step; gradients keep their memory. Two backwards of a
    batch are eager.
    """

    def micro(self, x: Tensor) -> Tensor:
        loss = self.loss(x) / 3
        loss.backward()
        return loss.detach()

    def step(self, x: Tensor) -> Tensor:
        loss = self.micro(x)
        self.optimizers[0].clip_grad_norm_(0.5)
        self.optimizers[0].step()
        self.optimizers[0].zero_grad(set_to_none=False)
        return loss

    def capture(self) -> None:
        super().capture()
        self.micro_step = ampcompile.capture_step(self.micro, *self.optimizers, warm_up=2)

    def go(self, turns: range) -> None:
        run = getattr(self, "micro_step", self.micro)
        for turn in turns:
            for number, part in enumerate(self.batch(turn, 24).chunk(3)):
                whole = self.train if number == 2 else self.micro if turn % 5 == 4 else run
                self.said.append(whole(part).clone())


class TwoSizes(Sgd):
    """Micro-batches of two sizes by turns: the second's graph adds to gradients that the first's has made."""

    def step(self, x: Tensor) -> Tensor:
        loss = self.loss(x)
        loss.backward()
        return loss.detach()

    def go(self, turns: range) -> None:
        for turn in turns:
            self.said += [self.train(self.batch(turn, rows)).clone() for rows in (16, 8)]
            self.say_gradients()
            self.optimizers[0].step()
            self.optimizers[0].zero_grad()


class TwoHeads(Ours):
    """By turns, with gradients that are forgotten at the step's begin: each form has its own."""

    def add(self) -> None:
        self.heads = nn.ModuleList([self.net(), self.net()])
        self.run_heads = [self.compiled(head) for head in self.heads]
        trained = [*self.model.parameters(), *self.heads.parameters()]
        self.optimizers = [self.kind(trained, **self.settings)]

    def step(self, x: Tensor, head: int) -> Tensor:
        self.optimizers[0].zero_grad()
        loss = self.run_heads[head](self.run(x)).square().mean()
        loss.backward()
        self.optimizers[0].step()
        return loss.detach()

    def go(self, turns: range) -> None:
        for turn in turns:
            self.said.append(self.train(self.batch(turn), turn % 2).clone())
            grads = [param.grad for param in (*self.model.parameters(), *self.heads.parameters())]
            self.said += [torch.zeros(()) if grad is None else grad.clone() for grad in grads]


MIXTURES = dict(PROGRAMS)
"""These programs, and those that take single steps."""
