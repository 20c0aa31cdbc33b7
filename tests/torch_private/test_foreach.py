"""Operations on lists write in place, and those of the gradient scaler speak its language."""

import torch

from ampcompile.torch_private import foreach


def test_lists_are_copied_and_multiplied_in_place() -> None:
    xs = [torch.ones(2), torch.full((3,), 2.0, dtype=torch.bfloat16)]
    copies = [torch.empty(2, dtype=torch.bfloat16), torch.empty(3)]
    foreach.copy_(copies, xs)
    foreach.multiply_(xs, torch.tensor(3.0))
    assert [x.tolist() for x in copies] == [[1, 1], [2, 2, 2]]
    assert [x.tolist() for x in xs] == [[3, 3], [6, 6, 6]]


def test_gradients_are_unscaled_and_a_flag_is_raised() -> None:
    grads, found = [torch.full((2,), 8.0), torch.full((1,), 4.0)], torch.zeros(1)
    foreach.check_and_unscale_(grads, found, torch.tensor(0.5))
    assert [grad.tolist() for grad in grads] == [[4, 4], [2]] and found.item() == 0
    foreach.check_and_unscale_([torch.tensor([float("inf")])], found, torch.tensor(0.5))
    assert found.item() == 1


def test_the_scale_grows_after_an_interval_and_falls_at_once() -> None:
    scale, tracker = torch.tensor(4.0), torch.tensor(0, dtype=torch.int32)
    seen = []
    for found in (0.0, 0.0, 1.0):
        foreach.update_scale_(scale, tracker, torch.tensor(found), 2.0, 0.5, 2)
        seen.append((scale.item(), tracker.item()))
    assert seen == [(4, 1), (8, 0), (4, 0)]
