"""Ranks skip together: an overflow on one is an overflow on all, under FSDP2 and DDP."""

import pytest
import torch

from tests.ranks import run_ranks


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
@pytest.mark.parametrize(("kind", "how"), [("AdamW", "clip_grad_norm_"), ("SGD", "step"), ("RMSprop", "unscale_")])
def test_all_ranks_skip_when_one_overflows(wrapper, kind, how, tmp_path):
    run_ranks("tests.scaler_ranks", wrapper, kind, how, folder=tmp_path, timeout=300, flags=("-W", "error"))
