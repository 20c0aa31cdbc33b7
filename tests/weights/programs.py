"""Random programs: weights laid out in many ways, aliases of them, writers of both, backwards that wait, garbage."""

import contextlib
import copy
import io
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import ampcompile
from ampcompile.weights.copies import TRIAL
from tests.weights.writers import ONE_PLACE, unsampled, with_gradient

N = 64
MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def one(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def two(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return torch.cat([F.linear(x, v), F.linear(x, w)], 1)


class Flat(nn.Module):
    """Weights that share the memory of a buffer, as copies and checkpoints of modules keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flat", torch.randn(2 * N * N))
        self.register_buffer("v", self.flat[: N * N].view(N, N))
        self.register_buffer("w", self.flat[N * N :].view(N, N))


def loaded(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def cut(flat: Tensor, at: int) -> Tensor:
    return flat.view(-1)[at : at + N * N].view(N, N)


class Program:
    """One program. `expect` is what casting at every call gives; all else is as users write it."""

    def __init__(self, seed: int, compiled: dict[str, Callable[..., Tensor]]) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.compiled = compiled
        self.kept: list[Any] = []
        self.log: list[str] = []
        self.waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self.layout = self.random.choice(list(LAYOUTS))
        self.weights = LAYOUTS[self.layout](self)
        self.aliases: list[Tensor] = []
        self.steps: dict[int, tuple[Any, Any]] = {}  # the scaler and optimizer of a weight, by its id
        self.arrays: list[tuple[np.ndarray, Any]] = []
        # Storages with copies: of others, arrays are seen by a sample alone.
        self.called: dict[int, StorageWeakRef] = {}

    def run(self, steps: int) -> None:
        for _ in range(steps):
            acts = (self.call, self.write, self.alias, self.drop, self.backward)
            (kind,) = self.random.choices(acts, (5, 5, 3, 1, 1))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                kind()
        self.let_go()
        for _ in range(TRIAL + 2):
            before = ampcompile.weight_stats().casts
            for weight in self.weights:
                self.read(weight)
        assert ampcompile.weight_stats().casts == before, f"cast again though unwritten: {self}"

    def let_go(self) -> None:
        """Before the end, when what is unwritten must not be cast again: of what needs a cast to be proven."""
        while self.waiting:
            self.backward()

    def call(self) -> None:
        mode = self.random.choice(list(MODES))
        weights = self.random.sample(self.weights, self.random.choice((1, 2)))
        self.log.append(f"call {mode} {[self._index(w) for w in weights]}")
        x = torch.eye(N).requires_grad_(mode == "grad")
        low = [w.detach().bfloat16() for w in weights]
        for storage in (w.untyped_storage() for w in weights):
            self.called[storage._cdata] = StorageWeakRef(storage)
        with MODES[mode]():
            got = self.compiled["two" if len(weights) == 2 else "one"](x, *weights)
            expected = torch.cat([F.linear(x.detach().bfloat16(), w) for w in low], 1)
        assert torch.equal(got.float(), expected.float()), f"stale: {self}"
        if mode == "grad" and len(weights) == 1:
            self.waiting.append((got.float().sum(), x, low[0].float().sum(0).expand(N, N)))

    def read(self, weight: Tensor) -> None:
        with torch.no_grad():
            assert torch.equal(self.compiled["one"](torch.eye(N), weight), weight.detach().bfloat16().float().t())

    def backward(self) -> None:
        if self.waiting:
            self.log.append("backward")
            loss, x, expected = self.waiting.pop(self.random.randrange(len(self.waiting)))
            (gradient,) = torch.autograd.grad(loss, x)
            torch.testing.assert_close(gradient, expected, rtol=0.02, atol=0.02, msg=lambda m: f"{self}: {m}")

    def _tensor(self) -> Tensor:
        return self.random.choice([*self.weights, *self.aliases])

    def _index(self, tensor: Tensor) -> str:
        places = [i for i, w in enumerate(self.weights) if w is tensor]
        return f"weight {places[0]}" if places else f"alias {[i for i, a in enumerate(self.aliases) if a is tensor]}"

    def alias(self) -> None:
        source, how = self._tensor(), self.random.choice(list(ALIASES))
        self.log.append(f"keep {how} of {self._index(source)}")
        self.aliases.append(ALIASES[how](source))

    def drop(self) -> None:
        if self.aliases:
            self.log.append("drop an alias")
            del self.aliases[self.random.randrange(len(self.aliases))]

    def write(self) -> None:
        target, how = self._tensor(), self.random.choice(list(WRITERS))
        if how in FOR_WEIGHTS and not any(w is target for w in self.weights):
            how = ".data"
        self.log.append(f"write {how} to {self._index(target)}")
        place = unsampled(target) if target.numel() > 16 and target.is_contiguous() else (0,) * target.dim()
        with contextlib.suppress(RuntimeError) if how == "swap_tensors" else contextlib.nullcontext():
            WRITERS[how](self, target, place)  # pending backwards hold the tensor

    def __str__(self) -> str:
        return f"{self.layout}\n  " + "\n  ".join(self.log)


def with_a_flat_buffer(program: Program, made_from: Callable[[nn.Module], Any]) -> list[Tensor]:
    module = made_from(Flat())
    program.kept.append(module.flat)
    return [nn.Parameter(module.v), nn.Parameter(module.w)]


LAYOUTS: dict[str, Callable[[Program], list[Tensor]]] = {
    "own": lambda p: [nn.Parameter(torch.randn(N, N)) for _ in range(3)],
    "frozen": lambda p: [nn.Parameter(torch.randn(N, N), requires_grad=i == 1) for i in range(3)],
    "tied": lambda p: [a := nn.Parameter(torch.randn(N, N)), nn.Parameter(a.data), nn.Parameter(a.detach())],
    "a module with a flat buffer, copied": lambda p: with_a_flat_buffer(p, copy.deepcopy),
    "a module with a flat buffer, saved and loaded": lambda p: with_a_flat_buffer(p, loaded),
}


def layout(make: Callable[[Program], list[Tensor]]) -> Callable[[Program], list[Tensor]]:
    return LAYOUTS.setdefault((make.__doc__ or "").rstrip("."), make)


@layout
def _(program: Program) -> list[Tensor]:
    """Slices of a flat parameter."""
    flat = nn.Parameter(torch.randn(3 * N * N))
    program.kept.append(flat)
    return [nn.Parameter(cut(flat.data, i * N * N)) for i in range(3)]


@layout
def _(program: Program) -> list[Tensor]:
    """Given the data of a flat buffer, overlapping."""
    flat = torch.randn(3 * N * N)
    program.kept.append(flat)
    found = [nn.Parameter(torch.randn(N, N)) for _ in range(3)]
    for i, weight in enumerate(found):
        weight.data = cut(flat, i * N * N // 2)
    return found


@layout
def _(program: Program) -> list[Tensor]:
    """Set on the storage of a buffer that is gone."""
    storage = torch.randn(2 * N * N).untyped_storage()
    return [nn.Parameter(torch.empty(0).set_(storage, i * N * N, (N, N))) for i in (0, 1)]


@layout
def _(program: Program) -> list[Tensor]:
    """Assigned from a state that is kept."""
    module = nn.ModuleList(nn.Linear(N, N, bias=False) for _ in range(3))
    state = {name: torch.randn(N, N) for name in module.state_dict()}
    module.load_state_dict(state, assign=True)
    program.kept += state.values()
    return list(module.parameters())


@layout
def _(program: Program) -> list[Tensor]:
    """A fused projection, its key rows, and a row of blocks of them."""
    fused = nn.Parameter(torch.randn(3 * N, N))
    return [fused, nn.Parameter(fused.data[N : 2 * N]), nn.Parameter(fused.detach()[: 2 * N])]


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    ".data": lambda t: t.data,
    "detach()": lambda t: t.detach(),
    ".data.detach()": lambda t: t.data.detach(),
    "a row of .data": lambda t: t.data[t.shape[0] // 2 : t.shape[0] // 2 + 1].detach(),
    "a parameter of .data": lambda t: nn.Parameter(t.data),
    "a parameter": lambda t: nn.Parameter(t.detach()),
    "a view": lambda t: t.detach().view(-1),
    "a tensor on the storage": lambda t: torch.empty(0).set_(
        t.untyped_storage(), t.storage_offset(), t.shape, t.stride()
    ),
    "the base": lambda t: torch.empty(0).set_(t.untyped_storage()),
}

Place = tuple[int, ...]
WRITERS: dict[str, Callable[[Program, Tensor, Place], object]] = {
    name: lambda program, target, at, write=write: write(target, at) for name, write in ONE_PLACE.items()
}
WRITERS["no write, but copies freed"] = lambda program, target, at: ampcompile.free_copies(target)
WRITERS["no write, but frozen, or trained"] = lambda program, target, at: target.requires_grad_(
    not target.requires_grad
)
FOR_WEIGHTS = {"data = new", "set_", "swap_tensors", "The data of another", "The fused scaler step"}
FOR_WEIGHTS |= {"Another parameter, on its memory or on new", "no write, but frozen, or trained"}


def writer(write: Callable[[Any, Tensor, Place], None]) -> Callable[[Any, Tensor, Place], None]:
    return WRITERS.setdefault((write.__doc__ or "").rstrip("."), write)


@writer
def _(program: Program, target: Tensor, at: Place) -> None:
    """Kept aliases, or those of the layout."""
    for alias in program.random.choice([program.kept, program.aliases]):
        with torch.no_grad():
            alias.view(-1)[program.random.randrange(alias.numel())] += 1


@writer
def _(program: Program, target: Tensor, at: Place) -> None:
    """The fused scaler step."""
    with with_gradient(target, at) as param:
        scaler, optimizer = program.steps.setdefault(
            id(param), (ampcompile.GradScaler("cpu", init_scale=1.0), torch.optim.SGD([param], lr=1.0))
        )
        scaler.scale(torch.ones(()))
        if program.random.random() < 0.2:
            param.grad[at] = torch.inf
        scaler.step(optimizer)
        scaler.update(1.0)


@writer
def _(program: Program, target: Tensor, at: Place) -> None:
    """NumPy, kept."""
    known = program.called.get(target.untyped_storage()._cdata)
    seen = known is not None and not known.expired()
    program.arrays.append((target.detach().numpy(), at if seen else ...))


@writer
def _(program: Program, target: Tensor, at: Place) -> None:
    """All arrays."""
    for array, place in program.arrays:
        array[place] += 1


@writer
def _(program: Program, target: Tensor, at: Place) -> None:
    """Arrays dropped."""
    np.from_dlpack(target.detach())[at] += 1
    program.arrays.clear()


@writer
def _(program: Program, target: Tensor, at: Place) -> None:
    """The data of another."""
    # Of another shape, torch refuses the gradient of a later call while an earlier one waits for its backward.
    target.data = program.random.choice([weight for weight in program.weights if weight.shape == target.shape]).data


@writer
def _(program: Program, target: Tensor, at: Place) -> None:
    """Another parameter, on its memory or on new."""
    data = program.random.choice([target.data, torch.randn(target.shape)])
    program.weights[[w is target for w in program.weights].index(True)] = nn.Parameter(data)


def compiled(lower: str) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """The graphs of all programs, by name."""
    for function in (one, two):
        yield function.__name__, torch.compile(function, backend="amp", options={"lower": lower})
