"""Two processes with DTensor weights, and four that shard them once more by FSDP2, get eager autocast's bits."""

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from tests import tensor_parallel_ranks as ranks
from tests.ranks import assert_all_pass


@pytest.mark.ci
@pytest.mark.parametrize(("size", "cases"), [(2, ranks.OF_TWO), pytest.param(4, ranks.OF_FOUR, marks=pytest.mark.slow)])
def test_tensor_parallel_models_get_the_bits_of_eager_autocast(size, cases, tmp_path):
    assert_all_pass("tests.tensor_parallel_ranks", tmp_path, cases, size=size)
