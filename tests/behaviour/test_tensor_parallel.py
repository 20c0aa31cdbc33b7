"""Two processes with DTensor weights, and four that shard them once more by FSDP2, get eager autocast's bits."""

import pytest
import torch

from tests.ranks import run_ranks

if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("size", "lowers"), [(2, ["eager", "inductor"]), pytest.param(4, ["aot_eager"], marks=pytest.mark.slow)]
)
def test_tensor_parallel_models_get_the_bits_of_eager_autocast(size, lowers, tmp_path):
    run_ranks("tests.tensor_parallel_ranks", *lowers, folder=tmp_path, timeout=550, size=size)
