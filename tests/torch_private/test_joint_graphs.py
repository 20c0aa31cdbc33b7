"""Random numbers can be drawn again; graphs of AOTAutograd are tested by audits, in tests/insight/test_audit.py."""

import torch

from ampcompile.torch_private import joint_graphs


def test_the_same_numbers_are_drawn_again() -> None:
    state = joint_graphs.random_state()
    drawn = torch.randn(4)
    joint_graphs.start_from(state)
    assert torch.equal(torch.randn(4), drawn)
