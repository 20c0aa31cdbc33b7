"""A thread that serves while another captures a step: its calls don't fail, and are no part of the captured step."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ampcompile.weights.captures import CapturedCopies
from ampcompile.weights.store import CopyStore, store

X = torch.ones(2, 8)


def serving() -> Callable[..., Tensor]:
    """A compiled module that has a copy."""
    served = torch.compile(nn.Linear(8, 8), backend="amp", options={"lower": "aot_eager", "dtype": torch.bfloat16})
    served(X)
    return served


def test_a_capture_that_ends_while_a_call_looks_for_it_is_seen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    served, ended = serving(), CapturedCopies([nn.Parameter(torch.zeros(1))])
    expected, looks = served(X), [ended]
    monkeypatch.setattr(CopyStore, "capture", property(lambda _: looks.pop() if looks else None), raising=False)
    assert torch.equal(served(X), expected) and not looks


@pytest.mark.parametrize("within", [False, True])
def test_calls_of_another_thread_are_no_part_of_the_step(within: bool) -> None:
    served, copies = serving(), CapturedCopies([nn.Parameter(torch.zeros(1))])
    with copies.watched():
        if within:
            served(X)
        else:
            thread = threading.Thread(target=served, args=(X,))
            thread.start()
            thread.join()
    copies.make_fresh()  # and keeps in place what the step has read
    assert {copy.in_place for copy in store.copies.values() if copy.tensor is not None} == {within}
