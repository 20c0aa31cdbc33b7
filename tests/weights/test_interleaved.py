"""Any order of calls, writes, grad modes, shapes and backwards gives what casting at every call gives."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

WRITERS: dict[str, Callable[[nn.Module], Any]] = {}


def writer(f: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    WRITERS[f.__name__] = f
    return f


@writer
def under_no_grad(m: nn.Module) -> None:
    with torch.no_grad():
        m[0].weight.mul_(1.5)


@writer
def under_inference_mode(m: nn.Module) -> None:
    with torch.inference_mode():
        m[2].weight.add_(0.25)


@writer
def through_data(m: nn.Module) -> None:
    m[0].weight.data.add_(0.5)


@writer
def through_a_row_of_data(m: nn.Module) -> None:
    m[0].weight.data[3].neg_()


@writer
def through_an_old_alias(m: nn.Module) -> None:
    m.alias.mul_(-1)


@writer
def by_assigning_data(m: nn.Module) -> None:
    m[2].weight.data = m[2].weight.data * 2


@writer
def by_numpy(m: nn.Module) -> None:
    m[0].weight.detach().numpy()[:] += 0.125


@writer
def by_foreach(m: nn.Module) -> None:
    torch._foreach_mul_([p.data for p in m.parameters()], 0.75)


@writer
def by_loading(m: nn.Module) -> None:
    m.load_state_dict({name: value + 0.5 for name, value in m.state_dict().items()})


@writer
def by_vector(m: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(m.parameters())
    nn.utils.vector_to_parameters(vector + 0.25, m.parameters())


def by_optimizer(kind: type[torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], None]:
    def step(m: nn.Module) -> None:
        for parameter in m.parameters():
            parameter.grad = torch.ones_like(parameter)
        kind(m.parameters(), lr=0.125, **options).step()
        for parameter in m.parameters():
            parameter.grad = None

    return step


WRITERS |= {
    "fused AdamW": by_optimizer(torch.optim.AdamW, fused=True),
    "fused SGD": by_optimizer(torch.optim.SGD, fused=True),
    "foreach Adam": by_optimizer(torch.optim.Adam, foreach=True),
    "plain SGD": by_optimizer(torch.optim.SGD, foreach=False),
}

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
calls = st.tuples(st.just("call"), st.sampled_from(sorted(MODES)), st.integers(2, 4))
writes = st.tuples(st.just("write"), st.sampled_from(sorted(WRITERS)))
backwards = st.tuples(st.just("backward"), st.integers(0, 3))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


class Twin:
    """A module, compiled, and the outputs whose backward is still to come."""

    def __init__(self, module: nn.Module, weights: str) -> None:
        self.module = module
        options = {"lower": "aot_eager", "weights": weights}
        self.compiled = torch.compile(module, backend="amp", options=options, dynamic=True)

    def reset(self, state: dict[str, Tensor]) -> None:
        self.module.load_state_dict(state)
        self.module.alias = self.module[0].weight.data
        self.pending: list[tuple[Tensor, Tensor]] = []

    def do(self, step: tuple[Any, ...], x: Tensor) -> list[Tensor]:
        if step[0] == "write":
            WRITERS[step[1]](self.module)
            self.module.alias = self.module[0].weight.data  # an assignment leaves a new memory to alias
            return []
        if step[0] == "call":
            x = x[: step[2]].clone().requires_grad_()
            with MODES[step[1]]():
                out = self.compiled(x)
            if out.requires_grad:
                self.pending.append((out, x))
            return [out.detach().clone()]
        if not self.pending:
            return []
        out, x = self.pending.pop(step[1] % len(self.pending))
        return [*torch.autograd.grad(out.float().square().sum(), [x, *self.module.parameters()], allow_unused=True)]


def test_cached_weights_are_as_good_as_fresh_casts() -> None:
    module = model()
    cached, fresh = Twin(module, "cached"), Twin(copy.deepcopy(module), "every_call")
    start = copy.deepcopy(module.state_dict())

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.one_of(calls, calls, writes, backwards), max_size=14))
    def run(steps: list[tuple[Any, ...]]) -> None:
        for twin in (cached, fresh):
            twin.reset(start)
        for step in steps:
            x = torch.randn(4, 6)
            for ours, theirs in zip(cached.do(step, x), fresh.do(step, x), strict=True):
                assert (ours is None) == (theirs is None)
                assert ours is None or torch.equal(ours, theirs), step

    run()
