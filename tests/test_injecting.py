"""Errors are raised at every place where real ones come, and at no other."""

import pytest

from ampcompile.torch_private import autocast
from tests.injecting import places, raised_at


def ours() -> None:
    autocast.any_autocast_enabled()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_each_place_is_reached_once(error: type[BaseException]) -> None:
    count = places(error, ours)
    ended: list[bool] = []
    reached = [raised_at(at, error, lambda: (ours(), ended.append(True))) for at in range(1, count + 3)]
    assert reached == [True] * count + [False] * 2 and count > 1
    assert len(ended) == 2, "where it was raised, what was run didn't go on"


def test_other_errors_and_other_files_are_let_through() -> None:
    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        raised_at(1, KeyboardInterrupt, fails)
    assert places(KeyboardInterrupt, lambda: sorted([2, 1])) == 0
