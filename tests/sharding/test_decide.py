"""FSDP2 with 16-bit gathers gives eager autocast's bits for half the bytes, on two ranks; matrix.py has four."""

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from tests.ranks import assert_all_pass
from tests.sharding import ranks


@pytest.mark.ci
def test_gathers_in_16_bits_change_no_number(tmp_path):
    assert_all_pass("tests.sharding.ranks", tmp_path, ranks.CASES)
