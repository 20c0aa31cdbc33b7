"""FSDP2 with narrow gathers changes no number, and every way to use several devices trains as eager autocast does."""

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from tests.ranks import assert_all_pass
from tests.sharding import eight_bits, files, matrix, paper, ranks, tensor_parallel, wrapped

TWO, FOUR = [name for name in eight_bits.CASES if name not in eight_bits.OF_FOUR], [*eight_bits.OF_FOUR]
OF_BOTH = {*ranks.CASES} - {"by_block", "kept_until_backward", "written_shards_are_gathered_anew"}
"""Of cases that gathers of 16 bits have too, those whose one byte may wait for `SLOW=1`."""
ONE_BYTE = [*[name for name in TWO if name not in OF_BOTH][::3], "written_shards_are_gathered_anew"]
IN_MATRIX = {"whole", "in_float16", "accumulated", "kept_until_backward", "asked_after_two_steps", "checkpointed"}
"""Ways of 16 bits that may wait too: the sample of the matrix has them, or one of the others is nearly the same."""
SAMPLE = [
    f"{kind}-{('whole', 'by_block')[i % 2]}-fp16-{('accumulated', 'resumed')[i // 2 % 2]}"
    for i, kind in enumerate(matrix.KINDS)
]
"""With a scaler, which the other modules have for DDP and FSDP2 alone, and never with clipping."""


def on(size, names):
    """The combinations for so many ranks."""
    return [name for name in names if (name in matrix.WORLD_OF_FOUR) == (size == 4)]


RUNS = {
    "DDP and FSDP2": (wrapped, 2, [*wrapped.CASES]),
    "tensor parallel": (tensor_parallel, 2, [*tensor_parallel.OF_TWO]),
    "tensor parallel, four ranks, the others": (tensor_parallel, 4, [*tensor_parallel.OF_FOUR]),
    "16 bits": (ranks, 2, [name for name in ranks.CASES if name not in IN_MATRIX]),
    "16 bits, the others": (ranks, 2, [name for name in ranks.CASES if name in IN_MATRIX]),
    "files": (files, 2, [*files.CASES]),
    "one byte": (eight_bits, 2, ONE_BYTE),
    "one byte, the others": (eight_bits, 2, [name for name in TWO if name not in ONE_BYTE]),
    "one byte, shards of different sizes": (eight_bits, 3, ["by_block"]),
    "one byte, four ranks": (eight_bits, 4, FOUR[::4]),
    "one byte, four ranks, the others": (eight_bits, 4, [name for name in FOUR if name not in FOUR[::4]]),
    "a sample": (matrix, 2, on(2, SAMPLE)),
    "a sample, four ranks": (matrix, 4, on(4, SAMPLE)),
    "every combination": (matrix, 2, on(2, matrix.CASES)),
    "every combination, four ranks": (matrix, 4, on(4, matrix.CASES)),
}
"""The cases that one group of processes runs: of which module, and on how many ranks."""
SLOW = [name for name in RUNS if "others" in name or "every" in name]


@pytest.mark.parametrize(
    ("module", "size", "names"),
    [
        pytest.param(*run, id=name, marks=pytest.mark.slow if name in SLOW else pytest.mark.ci)
        for name, run in RUNS.items()
    ],
)
def test_all_cases_pass(module, size, names, tmp_path):
    assert_all_pass(module.__name__, tmp_path, names, *names, size=size)


@pytest.mark.parametrize(
    "model, wanted", [(paper.LLAMA["8 B"], 0.315), (paper.LLAMA["70 B"], 0.265), (paper.DEBUG, 0.335)]
)
def test_a_gather_of_all_weights_takes_a_third_or_less_of_float32s_bytes(model, wanted):
    assert round(paper.part_of_float32(model, "FSDP2 with `shard_policy`, blocks in fp8"), 3) == wanted
