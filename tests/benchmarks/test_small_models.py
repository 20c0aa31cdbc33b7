"""Small models learn from each of their losses, and are the same in every process."""

import pytest
import torch

from benchmarks.small_models import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_losses_reach_every_weight_that_they_are_to_change(name: str) -> None:
    seen = []
    for _ in range(2):
        torch.manual_seed(0)
        small = MODELS[name](lambda model: model)
        for optimizer, loss in small.updates:
            optimizer.zero_grad()
            value = loss()
            value.backward()
            grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
            assert value.dim() == 0 and all(g is not None and g.isfinite().all() and g.any() for g in grads)
            seen += [value.detach(), *grads]
        with torch.no_grad():
            result = small.call()
        assert result.shape[0] in (32, 64, 256) and result.std() > 0
        seen.append(result)
    half = len(seen) // 2
    assert all(map(torch.equal, seen[:half], seen[half:]))


def test_the_critics_update_leaves_the_actor_alone_and_the_other_way_round() -> None:
    small = MODELS["SAC"](lambda model: model)
    critics, actor = ({id(p) for group in o.param_groups for p in group["params"]} for o, _ in small.updates)
    assert len(critics) == 12 and len(actor) == 8 and not critics & actor
