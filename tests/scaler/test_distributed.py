"""Ranks skip together: an overflow on one is an overflow on all, under FSDP2 and DDP."""

import pytest
import torch

from tests.ranks import run_ranks


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.ci), pytest.param(4, marks=pytest.mark.slow)])
def test_all_ranks_skip_when_one_overflows(size, tmp_path):
    run_ranks("tests.scaler.ranks", folder=tmp_path, timeout=300, errors=True, size=size)
