"""Two processes (gloo): DDP and FSDP2 give what one process gives, skip together, and checkpoints move both ways."""

import json

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from tests import distributed_ranks
from tests.ranks import run_ranks


def outcomes(folder):
    """What went wrong in each case, empty text where all is well. One pair of processes runs them all."""
    run_ranks("tests.distributed_ranks", str(folder), folder=folder, timeout=550)
    return json.loads((folder / "outcomes.json").read_text())


@pytest.mark.ci
def test_two_ranks_do_what_one_process_does_and_one_goes_on_from_their_checkpoint(tmp_path):
    found = outcomes(tmp_path)
    assert found.keys() == distributed_ranks.CASES.keys()
    wrong = {name: text for name, text in found.items() if text}
    assert not wrong, "\n".join([", ".join(wrong), *wrong.values()])
    distributed_ranks.load(tmp_path / "checkpoint")
