"""Every way to use several devices, whole and by block, in both 16-bit types, accumulated and resumed."""

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from tests.ranks import assert_all_pass
from tests.sharding import matrix

SAMPLE = [
    f"{kind}-{('whole', 'by_block')[i % 2]}-fp16-{('accumulated', 'resumed')[i // 2 % 2]}"
    for i, kind in enumerate(matrix.KINDS)
]
"""With a scaler, which tests beside this file have for DDP and FSDP2 alone, and never with clipping."""


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SAMPLE, id="sample", marks=pytest.mark.ci),
        pytest.param([*matrix.CASES], id="all", marks=pytest.mark.slow),
    ],
)
def test_combinations_train_as_eager_autocast_does(names, size, tmp_path):
    chosen = [name for name in names if (name in matrix.WORLD_OF_FOUR) == (size == 4)]
    assert_all_pass("tests.sharding.matrix", tmp_path, chosen, *chosen, size=size)
