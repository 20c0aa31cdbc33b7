"""FSDP2 with 16-bit gathers gives eager autocast's bits for half the bytes, on two ranks and on four."""

import json

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from tests.ranks import run_ranks
from tests.sharding import ranks


@pytest.mark.ci
@pytest.mark.parametrize("size", [2, 4])
def test_gathers_in_16_bits_change_no_number(size, tmp_path):
    """One group of processes runs all cases."""
    run_ranks("tests.sharding.ranks", str(tmp_path), folder=tmp_path, timeout=550, size=size)
    found = json.loads((tmp_path / "outcomes.json").read_text())
    assert found.keys() == {name for name in ranks.CASES if (name in ranks.WORLD_OF_FOUR) == (size == 4)}
    wrong = {name: text for name, text in found.items() if text}
    assert not wrong, "\n".join([", ".join(wrong), *wrong.values()])
