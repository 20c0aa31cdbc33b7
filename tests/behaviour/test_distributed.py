"""Two processes (gloo): DDP and FSDP2 give what one process gives, skip together, and checkpoints move both ways."""

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from tests import distributed_ranks
from tests.ranks import assert_all_pass


@pytest.mark.ci
def test_two_ranks_do_what_one_process_does_and_one_goes_on_from_their_checkpoint(tmp_path):
    assert_all_pass("tests.distributed_ranks", tmp_path, distributed_ranks.CASES)
    distributed_ranks.load(tmp_path / "checkpoint")
