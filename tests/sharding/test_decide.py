"""FSDP2 with 16-bit gathers gives eager autocast's bits for half the bytes, on two ranks and on four."""

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from tests.ranks import assert_all_pass
from tests.sharding import ranks


@pytest.mark.ci
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gathers_in_16_bits_change_no_number(size, tmp_path):
    wanted = {name for name in ranks.CASES if (name in ranks.WORLD_OF_FOUR) == (size == 4)}
    assert_all_pass("tests.sharding.ranks", tmp_path, wanted, size=size)
