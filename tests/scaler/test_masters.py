"""What is kept beside 16-bit parameters is made where it is missing, read in their order, loaded as it was saved."""

from typing import Any

import pytest
import torch
from torch import nn

from ampcompile.errors import ScalerError
from ampcompile.scaler.conditions import NotFusedError
from ampcompile.scaler.masters import STATES, Masters, masters_of, require_kind
from tests.scaler.cases import assert_equal


def optimizer_of(*dtypes: torch.dtype) -> Any:
    return torch.optim.SGD([nn.Parameter(torch.ones(13, 10).t().to(dtype)) for dtype in dtypes], 0.1)


@pytest.mark.parametrize("how", STATES)
def test_it_is_made_once_beside_the_16_bit_parameters_that_are_named(how: str) -> None:
    optimizer = optimizer_of(torch.float32, torch.bfloat16, torch.bfloat16)
    wide, first, second = params = optimizer.param_groups[0]["params"]
    masters = Masters(how, 7)
    masters.prepare(optimizer, [wide, second])
    assert set(optimizer.state[second]) == set(STATES[how]) and not optimizer.state[wide] and not optimizer.state[first]
    kept, checksums = masters.kept(optimizer.state[second])
    if how == "stochastic":
        assert kept.tolist() == [7, 2, 0] and checksums is None
    else:
        assert kept.stride() == second.stride() and (checksums is None) == (how == "float32")
    masters.prepare(optimizer, params)
    rows = masters.read([optimizer.state[param] for param in params], params)
    assert rows["kept"][0] is None and rows["kept"][2] is kept and rows["checksums"][2] is checksums
    with pytest.raises(KeyError):
        masters.read([{}], [first])
    optimizer.state[second][next(iter(STATES[how]))] = torch.stack([kept, kept], -1)[..., 0]
    with pytest.raises(NotFusedError, match="strides"):
        masters.prepare(optimizer, [second])


def test_moments_of_16_bits_become_float32() -> None:
    optimizer = optimizer_of(torch.bfloat16, torch.float32)
    for param in optimizer.param_groups[0]["params"]:
        optimizer.state[param] = {"momentum_buffer": torch.ones(3).bfloat16(), "count": 3}
    Masters("remainder", 0).widen_states(optimizer)
    first, second = (optimizer.state[param] for param in optimizer.param_groups[0]["params"])
    assert first["momentum_buffer"].dtype == torch.float32 and first["count"] == 3
    assert second["momentum_buffer"].dtype == torch.bfloat16


def test_saved_state_is_loaded_in_the_type_that_it_has() -> None:
    optimizer, masters = optimizer_of(torch.bfloat16), Masters("remainder", 0)
    (param,) = optimizer.param_groups[0]["params"]
    saved = {
        "remainder": torch.arange(130).view(13, 10).t().short(),
        "exp_avg": torch.rand(10, 13),
        "step": torch.ones(()),
    }
    masters.note_saved(optimizer, {"state": {0: saved}, "param_groups": [{"params": [0]}]})
    masters.restore_saved(optimizer)
    state = optimizer.state[param]
    assert_equal([state["remainder"], state["exp_avg"]], [saved["remainder"], saved["exp_avg"]])
    assert state["remainder"] is not saved["remainder"] and "step" not in state and not masters.saved


def test_a_master_that_was_loaded_becomes_remainders_where_it_rounds_to_its_parameter() -> None:
    optimizer, masters = optimizer_of(torch.bfloat16), Masters("remainder", 0)
    (param,) = optimizer.param_groups[0]["params"]
    master = torch.randn(13, 10).t()
    master[:3, 0] = torch.tensor([-1e-45, 1 + 2**-8, torch.inf])
    param.data.copy_(master)
    param.data[:2, 0] = torch.tensor([0.0, 1 + 2**-7])  # another zero, and the tie as remainders round it
    param.data[7:] *= 1.5
    before = param.detach().clone()
    state = optimizer.state[param] = {"master_param": master.clone()}
    masters.prepare(optimizer, [param])
    assert set(state) == set(STATES["remainder"])
    expected = torch.where(torch.arange(10).unsqueeze(1) < 7, master, before.float())
    expected[0, 0] = 0.0
    assert_equal([masters.read_weight(param.detach(), state)], [expected])
    assert_equal([param.detach()], [before])
    masters.write_weight(param.detach(), state, master)
    assert_equal([masters.read_weight(param.detach(), state)], [master])


def test_who_keeps_masters_and_which_parameters_can_be_kept() -> None:
    optimizer = optimizer_of(torch.float16)
    assert masters_of(optimizer) is None and masters_of(object()) is None
    (param,) = optimizer.param_groups[0]["params"]
    require_kind(param, "float32")
    for how in ("remainder", "stochastic"):
        with pytest.raises(ScalerError, match=f"torch.float16 with how='{how}', expected plain tensors of bfloat16"):
            require_kind(param, how)
