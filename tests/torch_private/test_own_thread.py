"""What is made once is made in a thread that has no mode of the caller's, and once, whatever comes in between."""

import threading
import time

import pytest
import torch

from ampcompile.torch_private.own_thread import made_once


def test_what_is_made_inherits_no_mode() -> None:
    made = made_once(lambda size: torch.ones(size, dtype=torch.float32))
    with torch.inference_mode(), torch.device("meta"), torch.autograd.graph.disable_saved_tensors_hooks(""):
        tensor = made(2)
    assert made(2) is tensor and made(3) is not tensor
    assert not tensor.is_inference() and tensor.device.type == "cpu"


def test_an_error_is_the_callers_and_the_next_call_tries_again() -> None:
    calls: list[int] = []

    @made_once
    def halve(number: int) -> int:
        calls.append(number)
        return 4 // (number - len(calls))

    with pytest.raises(ZeroDivisionError):
        halve(1)
    assert halve(1) == halve(1) == -4 and calls == [1, 1]


def test_it_is_made_once_for_callers_at_the_same_time_and_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []

    @made_once
    def slowly() -> int:
        calls.append(time.sleep(0.05))
        return len(calls)

    def interrupted(self: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "join", interrupted)
        slowly()
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(slowly())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1, 1, 1] and len(calls) == 1
