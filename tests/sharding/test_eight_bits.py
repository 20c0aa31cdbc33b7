"""FSDP2 with gathers of one byte gives the bits of the same model whole, on two ranks, and on three and four."""

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from tests.ranks import assert_all_pass
from tests.sharding import eight_bits, paper

FP8 = "FSDP2 with `shard_policy`, blocks in fp8"
NAMES = {2: [name for name in eight_bits.CASES if name not in eight_bits.OF_FOUR], 4: eight_bits.OF_FOUR}


@pytest.mark.parametrize("size", NAMES)
@pytest.mark.parametrize(
    "half", [pytest.param(0, marks=pytest.mark.ci), pytest.param(1, id="other", marks=pytest.mark.slow)]
)
def test_gathers_of_one_byte_change_no_number(half, size, tmp_path):
    names = NAMES[size][half::2]
    assert_all_pass("tests.sharding.eight_bits", tmp_path, names, *names, size=size)


@pytest.mark.ci
def test_shards_of_different_sizes_on_three_ranks(tmp_path):
    assert_all_pass("tests.sharding.eight_bits", tmp_path, ["by_block"], "by_block", size=3)


@pytest.mark.parametrize(
    "model, wanted", [(paper.LLAMA["8 B"], 0.315), (paper.LLAMA["70 B"], 0.265), (paper.DEBUG, 0.335)]
)
def test_a_gather_of_all_weights_takes_a_third_or_less_of_float32s_bytes(model, wanted):
    assert round(paper.part_of_float32(model, FP8), 3) == wanted
