"""Random histories of the table of weights: looks, reads of memory, writes and steps, with copies in every form.

The model is one line: a look gives what casting its weights at that moment gives, and whoever holds that keeps it.
Writes are of two classes. Those of `programs.WRITERS` are counted or reported, and must be seen wherever they write:
they write where no sample lies. `write_unseen` leaves no trace but the numbers, and must be seen where it writes all of
a storage. That a raw write of a part is seen, or one through an array from before the first call, nobody promises: no
history has one.
"""

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import ampcompile
from ampcompile.kernels.fp8 import parts
from ampcompile.torch_private import storages
from ampcompile.weights import Form
from tests.weights.bindings import bind, cast_into, take_step
from tests.weights.programs import Program
from tests.weights.writers import Broken, unsampled, with_gradient

FORMS = [Form(torch.bfloat16), Form(torch.float16), Form(torch.bfloat16, wide=True)]
FORMS += [Form(torch.float8_e4m3fn), Form(torch.float8_e4m3fn, by_rows=True)]
Spec = tuple[Form, bool]
"""A form, and whether the copy is on trial"""


def saved(copy: Tensor) -> Callable[[], Tensor]:
    """What a backward that is still to come reads of a copy."""
    x = torch.ones_like(copy, requires_grad=True)
    product = x * copy
    return lambda: torch.autograd.grad(product, x, torch.ones_like(copy))[0]


def shown(alias: Tensor) -> Callable[[], Tensor]:
    return lambda: alias


HOLDERS: list[Callable[[Tensor], Callable[[], Tensor]]] = [shown]
HOLDERS += [lambda copy: shown(copy.detach()), lambda copy: shown(copy.t().t())]
"""Who holds a copy, as something that gives its numbers later; of those in 8 bits autograd saves none."""


class History(Program):
    """One history; `str` tells it."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, {})
        if self.random.random() < 0.2:
            self.weights = [nn.Parameter(w.detach().double(), w.requires_grad) for w in self.weights]
            self.layout += ", float64"
        self.bindings: dict[Any, Any] = {}
        self.in_place = self.random.random() < 0.3  # some looks: then whoever holds a copy sees it change
        self.held: list[tuple[Callable[[], Tensor], Tensor]] = []  # copies that somebody holds, and their numbers
        self.failed: list[torch.optim.Optimizer] = []

    def call(self) -> None:
        weights = self.random.sample(self.weights, self.random.choice((1, 2)))
        specs = [(self.random.choice(FORMS), self.random.random() < 0.1) for _ in weights]
        in_place = self.in_place and self.random.random() < 0.3
        self.log.append(f"look at {[self._index(w) for w in weights]} {specs}{', in place' * in_place}")
        copies = self.look(weights, specs, in_place)
        if not self.in_place and self.random.random() < 0.2:
            for copy, (form, _) in zip(copies, specs, strict=True):
                hold = self.random.choice(HOLDERS if form.quantized else [*HOLDERS, saved])
                self.held.append((hold(copy), copy.clone()))

    def look(self, weights: list[Tensor], specs: list[Spec], in_place: bool = False) -> list[Tensor]:
        key = *specs, in_place, *(weight.shape for weight in weights)
        if key not in self.bindings:
            forms, on_trial = zip(*specs, strict=True)
            self.bindings[key] = bind(forms, in_place, on_trial=on_trial)
        # By torch's own, which reports nothing.
        self.called |= {storages.storage_key(w): StorageWeakRef(storages.untyped_storage(w)) for w in weights}
        copies = self.bindings[key].copies(weights)
        for copy, weight, (form, _) in zip(copies, weights, specs, strict=True):
            pair = copy, cast_into(form.empty_like(weight), weight, form)
            shown = [parts(each, *weight.shape) if form.quantized else [each] for each in pair]
            for got, expected in zip(*shown, strict=True):
                assert torch.equal(got.float(), expected.float()), f"stale: {self}"
        return copies

    def read(self, weight: Tensor, forms: list[Form] | None = None) -> None:
        """At the end only what can be compared: in doubt, copies in 8 bits and of float64 are cast in each call."""
        for form in forms or FORMS[: 2 if weight.dtype == torch.float32 else 0]:
            self.look([weight], [(form, False)])

    def backward(self) -> None:
        self.log.append("backwards have run")
        while self.held:
            read, numbers = self.held.pop()
            pair = [each.view(torch.int8) if each.itemsize == 1 else each for each in (read(), numbers)]
            assert torch.equal(*pair), f"a held copy has changed: {self}"

    def write(self) -> None:
        if self.random.random() < 0.5:
            return super().write()
        how, target = self.random.choice(list(ACTS)), self.random.choice(self.weights)
        self.log.append(f"{how}: {self._index(target)}")
        return ACTS[how](self, target)

    def let_go(self) -> None:
        for weight in self.weights:
            self.read(weight, FORMS)
        self.backward()
        for each in (self.aliases, self.arrays, self.kept):
            each.clear()


def place(weight: Tensor) -> tuple[int, ...]:
    return unsampled(weight) if weight.is_contiguous() else (0,) * weight.dim()


def write_unseen(history: History, weight: Tensor) -> None:
    """All of the storage, as a raw pointer, a collective or another process writes it."""
    storage = storages.untyped_storage(weight)
    numbers = torch.randn(storage.nbytes() // weight.itemsize, dtype=weight.dtype)
    ctypes.memmove(storage.data_ptr(), numbers.data_ptr(), numbers.nbytes)


def step(history: History, weight: Tensor, fails: bool = False) -> None:
    """A fused step of ours, perhaps with a look within it."""

    def write() -> None:
        with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
            weight.detach()[place(weight)] += 1
        if history.random.random() < 0.3:
            history.call()
        if fails:
            raise ArithmeticError

    with contextlib.suppress(ArithmeticError):
        take_step([weight], write)


def fail(history: History, weight: Tensor) -> None:
    """An optimizer that outlives its error."""
    with with_gradient(weight, place(weight)) as param, contextlib.suppress(ArithmeticError):
        history.failed.append(Broken([param], lr=1.0, fused=True))
        history.failed[-1].step()


@torch.no_grad()
def write_in_place(history: History, weight: Tensor) -> None:
    weight[place(weight)] += 1


ACTS: dict[str, Callable[[History, Tensor], object]] = {
    "in place": write_in_place,
    "read .data": lambda _, weight: weight.data.sum(),
    "read an array": lambda _, weight: weight.detach().numpy().sum(),
    "read a capsule": lambda _, weight: torch.from_dlpack(weight.detach()).sum(),
    "read the storage": lambda _, weight: weight.untyped_storage().nbytes(),
    "write all of the storage, unseen": write_unseen,
    "step": step,
    "step that fails": lambda history, weight: step(history, weight, fails=True),
    "optimizer that fails, and lives": fail,
    "invalidate": lambda _, weight: ampcompile.invalidate(weight),
    "free copies": lambda _, weight: ampcompile.free_copies(weight),
}
