"""Random programs of calls, writers, backward passes and garbage, beside a model that casts at every call."""

import contextlib
import gc

import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ampcompile.weights import Binding, free_copies, invalidate, weight_stats, writable_copies
from tests.weights.bindings import bind
from tests.weights.writers import unsampled, unseen

BF16 = torch.bfloat16
MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
WEIGHTS = st.integers(0, 3)


class World:
    """Four weights, the second and third tied; two graphs; forwards that wait, with the gradients they must give."""

    def __init__(self) -> None:
        first = nn.Parameter(torch.randn(20, 20))
        self.weights = [
            first,
            nn.Parameter(torch.randn(20, 20)),
            nn.Parameter(torch.randn(20, 20)),
            torch.randn(20, 20),
        ]
        self.weights[2] = nn.Parameter(self.weights[1].data)
        self.graphs: list[tuple[Binding, list[int]]] = [
            (bind([BF16] * 4), [0, 1, 2, 3]),
            (bind([BF16] * 3), [2, 0, 0]),
        ]
        self.waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self.aliases: list[Tensor] = []
        self.optimizers = [torch.optim.SGD([self.weights[0]], lr=0.5, fused=True)]

    def call(self, graph: int, mode: str) -> None:
        binding, chosen = self.graphs[graph]
        weights = [self.weights[i] for i in chosen]
        with MODES[mode]():
            copies = binding.copies(weights)
            for copy, weight in zip(copies, weights, strict=True):
                assert torch.equal(copy, weight.detach().to(BF16)), "stale"
        if mode == "grad":
            x, expected = (torch.randn(2, 20, dtype=BF16) for _ in range(2))
            expected = x.clone().requires_grad_()
            x.requires_grad_()
            losses = [
                sum(F.linear(v, w).float().square().sum() for w in ws)
                for v, ws in ((x, copies), (expected, [weight.detach().to(BF16) for weight in weights]))
            ]
            losses[1].backward()
            self.waiting.append((losses[0], x, expected.grad))

    def backward(self) -> None:
        if self.waiting:
            loss, x, expected = self.waiting.pop(0)
            loss.backward()
            torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)

    def write(self, weight: int, how: str) -> None:
        target = self.weights[weight]
        if how == "in place":
            with torch.no_grad():
                target[unsampled(target)] += 1
        elif how == ".data":
            target.data[unsampled(target)] += 1
        elif how == "keep an alias":
            self.aliases.append(target.data if len(self.aliases) % 2 else target.data.view(-1).detach())
        elif how == "keep an array":
            self.call(0, "no_grad")  # one that was made before the first call is seen by a sample alone
            self.aliases.append(torch.from_numpy(target.detach().numpy()))
        elif how == "write the aliases":
            for alias in self.aliases:
                alias.view(20, 20)[unsampled(alias.view(20, 20))] += 1
        elif how == "drop the aliases":
            self.aliases.clear()
        elif how == "data = new":
            target.data = torch.randn(20, 20)
        elif how == "data = another's":
            target.data = self.weights[(weight + 1) % 4].data
        elif how == "numpy":
            target.detach().numpy()[unsampled(target)] += 1
        elif how == "new object":
            self.weights[weight] = nn.Parameter(torch.randn(20, 20))
        elif how == "new object, same memory":
            self.weights[weight] = nn.Parameter(target.data)
        elif how == "swap_tensors":
            torch.utils.swap_tensors(target, type(target)(torch.randn(20, 20)))
        elif how == "optimizer":
            with torch.no_grad():
                trained = [w for w in self.weights if w.requires_grad]
            for param in trained:
                param.grad = torch.zeros_like(param)
                param.grad[unsampled(param)] = 1.0
            if trained:
                torch.optim.SGD(trained, lr=0.5, fused=True).step()
        elif how == "fused step with copies":
            # The next call must not read what this step could not write.
            lent = writable_copies([target])
            found = lent.buffers[0].values()
            new = target.detach() * 0.5
            unseen(target)[...] = new
            for copy in found:
                torch.from_dlpack(copy).copy_(new)
            torch.autograd.graph.increment_version([target, *found])
            lent.mark_written()
        elif how == "behind PyTorch's back, announced":
            unseen(target)[unsampled(target)] += 1
            invalidate([target])
        elif how == "copies freed":
            free_copies(target)
        elif how == "requires_grad":
            target.requires_grad_(not target.requires_grad)


HOW = [
    *("in place", ".data", "keep an alias", "write the aliases", "drop the aliases", "numpy", "optimizer"),
    *("data = new", "data = another's", "new object", "new object, same memory", "swap_tensors", "requires_grad"),
    *("fused step with copies", "behind PyTorch's back, announced", "copies freed", "keep an array"),
]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.integers(0, 1), st.sampled_from(list(MODES))),
        st.tuples(st.just("write"), WEIGHTS, st.sampled_from(HOW)),
        st.tuples(st.just("backward")),
    ),
    min_size=4,
    max_size=40,
)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS)
def test_equal_to_a_model_that_casts_at_every_call(steps) -> None:
    world = World()
    for name, *arguments in steps:
        getattr(world, name)(*arguments)
        for graph in range(2) if name == "write" and arguments[0] % 2 else ():
            world.call(graph, "no_grad")
    while world.waiting:
        world.backward()
    for graph in (0, 1, 0, 1):
        world.call(graph, "inference_mode")
    casts = weight_stats().casts
    for graph in (0, 1, 0, 1):
        world.call(graph, "no_grad")
    assert weight_stats().casts == casts, "nothing was written"
    del world
    gc.collect()
    assert weight_stats().bytes == 0
