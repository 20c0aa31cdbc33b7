"""After an update the same set goes on, with what a whole refresh gives; after anything else a new one does."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompile.kernels import unchanged
from ampcompile.kernels.packed_linear import LinearBlocks, available
from ampcompile.kernels.renewal import RenewalTable
from ampcompile.weights.binding import Binding
from ampcompile.weights.copies import PAYS, copies_of
from ampcompile.weights.copy_set import _renewable
from ampcompile.weights.freshness import memory_of
from ampcompile.weights.store import free_copies, store, weight_stats
from tests.weights.bindings import bind
from tests.weights.searching import searches_are_unlimited as searches_are_unlimited
from tests.weights.writers import unsampled, unseen

BF16 = torch.bfloat16


class Case:
    """Weights of several layouts, one of them twice; `look` says whether a call of its graph needed a new set."""

    def __init__(self, **options: object) -> None:
        flat = torch.randn(800)
        self.weights = [
            nn.Parameter(torch.randn(20, 20)),
            nn.Parameter(flat[:400].view(20, 20)),
            nn.Parameter(torch.randn(12, 20).t()),
            torch.randn(3),
            nn.Parameter(torch.randn(20, 20), requires_grad=False),
        ]
        self.flat, self.kept = flat, []
        self.read = [*self.weights, self.weights[0]]
        self.binding = bind([BF16] * 6, **options)

    def look(self, graph: Binding | None = None) -> bool:
        graph = graph or self.binding
        before = list(graph._sets.values())
        for copied, weight in zip(graph.copies(self.read), self.read, strict=True):
            rounded = weight.detach().to(BF16 if copied.dtype == torch.float32 else copied.dtype)
            assert torch.equal(copied, rounded.to(copied.dtype)), "stale"
        return list(graph._sets.values()) != before

    def update(self) -> None:
        with torch.no_grad():
            for weight in self.weights:
                weight[unsampled(weight) if weight.numel() > 64 else 0] += 1


def fused(case: Case) -> None:
    trained = [weight for weight in case.weights if weight.requires_grad]
    for weight in trained:
        weight.grad = torch.zeros_like(weight)
        weight.grad[unsampled(weight)] = 1.0
    torch.optim.SGD(trained, lr=1.0, fused=True).step()


UPDATES: dict[str, Callable[[Case], object]] = {
    "in place": Case.update,
    "one weight": lambda case: case.weights[2].detach().add_(1),
    "a fused optimizer": fused,
    "a buffer that a weight is cut out of": lambda case: case.flat.add_(1),
    "an update and an unseen write": lambda case: (case.update(), unseen(case.weights[0]).__setitem__(0, 7.0)),
    "nothing, and a new epoch": lambda case: store.begin_epoch(),
}


@pytest.mark.parametrize("update", UPDATES)
def test_after_an_update_the_set_goes_on(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    assert case.look()
    for _ in range(3):
        UPDATES[update](case)
        assert not case.look()
        with monkeypatch.context() as patch:
            patch.setattr(Binding, "_refresh", None)
            case.look()


@pytest.mark.parametrize("update", UPDATES)
def test_without_a_compiler_all_is_looked_at(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "available", lambda: False)
    case = Case()
    for _ in range(3):
        case.look()
        UPDATES[update](case)
    case.look()


def test_a_weight_that_another_thread_replaces_meanwhile_is_cast_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    cast = RenewalTable.cast

    def replace(*args: Any) -> bool:
        case.weights[0].data = torch.randn(20, 20)
        return cast(*args)

    case = Case()
    case.look()
    case.update()
    with monkeypatch.context() as patch:
        patch.setattr(RenewalTable, "cast", replace)
        assert case.look(), "a new set"
    case.look()


def test_what_another_graph_has_cast_is_not_cast_again() -> None:
    case = Case()
    other = bind([BF16] * 5 + [torch.float16])
    case.look(), case.look(other)
    for graphs, passes in (((case.binding, other), 2), ((other, case.binding), 1)):  # float16 is cast by one alone
        case.update()
        casts = weight_stats().casts
        for _ in range(2):
            assert not any(map(case.look, graphs)) and weight_stats().casts == casts + passes


def test_copies_that_hold_float32_are_rounded() -> None:
    case = Case(wide=[True, False] * 3)
    case.look()
    case.update()
    assert not case.look()


def one_unseen(weight: torch.Tensor) -> None:
    unseen(weight)[unsampled(weight)] += 1


def leaves_as_another_comes(case: Case) -> Callable[[], object]:
    leaves = case.weights[0].data
    case.look()
    leaves.data = torch.zeros(3)
    comes = case.weights[0].data
    case.kept += leaves, comes
    return lambda: comes[unsampled(comes)].add_(1)


def kept_array(case: Case) -> Callable[[], object]:
    array = case.weights[0].detach().numpy()
    return lambda: array.__setitem__(unsampled(case.weights[0]), array[unsampled(case.weights[0])] + 1)


def an_open_step(case: Case) -> Callable[[], object]:
    memory_of(case.weights[0]).open_step()
    return lambda: one_unseen(case.weights[0])


def training_begins(case: Case) -> Callable[[], object]:
    frozen = case.weights[4].requires_grad_()
    trains_another = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    trains_another.register_step_pre_hook(lambda *_: one_unseen(frozen))  # as a sharded optimizer writes
    return trains_another.step


def other_data(case: Case) -> Callable[[], object]:
    case.weights[0].data = value = torch.randn(20, 20)
    return lambda: value[unsampled(value)].add_(1)


def swapped(case: Case) -> Callable[[], object]:
    torch.utils.swap_tensors(case.weights[0], nn.Parameter(torch.randn(20, 20)))
    return lambda: case.weights[0].detach()[unsampled(case.weights[0])].add_(1)


OTHERS: dict[str, Callable[[Case], Callable[[], object]]] = {
    "an array": kept_array,
    "a sharer that leaves as another comes": leaves_as_another_comes,
    "a step that is open": an_open_step,
    "training begins": training_begins,
    "other data": other_data,
    "swap_tensors": swapped,
    "copies freed": lambda case: free_copies(case.weights) or (lambda: case.weights[0].data.add_(1)),
    "seen by a sample": lambda case: lambda: unseen(case.weights[0])[0, :1].__iadd__(1),
}
"""What else may happen, and a write that is seen after it only if all was looked at."""


@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("other", OTHERS)
def test_where_anything_else_changed_all_is_looked_at(other: str, updated: bool) -> None:
    case = Case()
    for _ in range(2):
        case.look()
        case.update()
    assert not case.look()
    write = OTHERS[other](case)
    for _ in range(3):
        if updated or other == "training begins":  # of which nobody tells: the next refresh sees it
            case.update()
        case.look()
        write()
        case.look()


def test_a_backward_that_waits_gets_the_old_weights() -> None:
    case = Case()
    case.look()
    for _ in range(2):
        x = torch.randn(2, 20, dtype=BF16, requires_grad=True)
        old = case.weights[0].detach().to(BF16)
        waits = F.linear(x, case.binding.copies(case.read)[0]).sum()
        case.update()
        case.look()
        waits.backward()
        assert torch.equal(x.grad, old.float().sum(0).to(BF16).expand(2, 20))


@pytest.mark.skipif(not available(BF16), reason="this CPU's oneDNN has no bfloat16 products")
def test_what_another_graph_reads_packed_is_packed_anew() -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    strided, packed = bind([BF16]), bind([BF16], packed=[LinearBlocks()])
    for _ in range(2):
        for _ in range(PAYS + 1):
            for graph in (strided, packed):
                (copied,) = graph.copies([weight])
                dense = copied.to_dense() if copied.is_mkldnn else copied
                assert torch.equal(dense, weight.detach().to(BF16)), "stale"
        assert copied.is_mkldnn
        with torch.no_grad():
            weight.mul_(-1)
        strided.copies([weight])


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.detach().add_(1),
        lambda weight: weight.data.add_(1),
        lambda weight: (memory_of(weight).written(), unseen(weight).__setitem__(slice(None), 5.0)),
    ],
    ids=["in place", ".data", "reported"],
)
def test_a_write_while_it_is_cast_is_cast_in_the_next_call(
    write: Callable[[torch.Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case()
    case.look()
    case.update()
    cast, writes = RenewalTable.cast, list[object]()
    with monkeypatch.context() as patch:
        patch.setattr(RenewalTable, "cast", lambda *args: (cast(*args), writes.append(write(case.weights[0])))[0])
        case.binding.copies(case.read)
    assert writes
    case.look()


def test_dispatch_modes_see_no_cast_of_ours() -> None:
    """A selective checkpoint would keep its result, and give it back in place of another's."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    case, names = Case(), []
    for _ in range(3):
        case.update()
        with Seen():
            case.binding.copies(case.read)
        case.look()
    assert not names


def test_while_an_optimizer_steps_nothing_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    case.look()
    monkeypatch.setattr(store, "running", {object()})
    for _ in range(2):
        unseen(case.weights[0])[unsampled(case.weights[0])] += 1  # as its kernels write
        store.begin_epoch()
        assert case.look()


def test_a_set_that_goes_on_holds_nothing() -> None:
    case = Case()
    for _ in range(2):
        case.look()
        case.update()
    memory = memory_of(case.weights[0])
    assert memory.storage() is not None
    case.weights.clear()
    case.read.clear()
    assert memory.storage() is None and not any(copy.nbytes() for copy in memory.copies)


def test_weights_elsewhere_are_looked_at_one_by_one() -> None:
    case = Case()
    case.look()
    copies = [copy for weight in case.weights for copy in copies_of(weight)]
    weights = {device: torch.empty(2, device=device) for device in ("cpu", "meta")}
    assert _renewable([weights["cpu"]], copies)
    assert not _renewable([weights["meta"]], copies) and not _renewable([*weights.values()], copies)
    assert not _renewable([weights["cpu"].bfloat16()], copies)


def test_a_renewal_costs_as_much_python_for_many_weights_as_for_few() -> None:
    def events(count: int) -> int:
        params = [nn.Parameter(torch.randn(16, 16)) for _ in range(count)]
        graph, seen = bind([BF16] * count), []
        for turn in range(3):
            with torch.no_grad():
                torch._foreach_add_(params, 1.0)
            if turn == 2:
                sys.setprofile(lambda frame, event, argument: seen.append(event == "call"))
            try:
                graph.copies(params)
            finally:
                sys.setprofile(None)
        return sum(seen)

    assert events(150) == events(15) < 40
