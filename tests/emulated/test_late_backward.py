"""On the made-up GPU, a write between forward and backward changes no gradient that it leaves alone in stock Inductor.

Without a write the gradients are no further from float64 than eager autocast's on a CPU.
"""

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.behaviour.test_late_backward import LAYERS, SHAPE, judge
from tests.compiling import LOW
from tests.emulated.test_models import LIMIT, by_amp, by_autocast

pytestmark = [pytest.mark.emulated, pytest.mark.filterwarnings("ignore:Mismatch dtype")]
ON_ANY_DEVICE = [name for name in LAYERS if name != "embedding"]


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """All gradients of a call, as one vector of float64 on the CPU."""
    model.zero_grad()
    run(x).double().square().mean().backward()
    return torch.cat([p.grad.double().flatten().cpu() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("count", range(4))
def test_drawn_models(count: int) -> None:
    names = ["linear", *random.choices(ON_ANY_DEVICE, k=random.randint(2, 4)), "linear"]
    model, x = nn.Sequential(*(LAYERS[name]() for name in names)), torch.randn(SHAPE)
    state = copy.deepcopy(model.state_dict())
    exact, wide = copy.deepcopy(model).double(), x.double()
    right = gradients(exact, exact, wide)
    eagers = (gradients(model, by_autocast("cpu", LOW, lambda model: model)(model), x) - right).norm()
    model.load_state_dict(state)
    model, x = model.cuda(), x.cuda()
    theirs, _ = judge(model, by_autocast("cuda", LOW, torch.compile)(model), x, set())
    torch._dynamo.reset()
    model.load_state_dict(state)
    compiled = by_amp()(model)
    distance = (gradients(model, compiled, x) - right).norm()
    ours, _ = judge(model, compiled, x, set())
    assert ours <= theirs, (names, ours - theirs)
    assert distance <= LIMIT * eagers, (names, float(distance), float(eagers))
