"""Exceptions where real ones come: Ctrl-C where Python looks for signals, a failure where C++ is called."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
OURS = tuple(f"{ROOT / folder}{os.sep}" for folder in ("ampcompile", "passes", "kernels"))
LOCKS = type(threading.RLock()), type(threading.Lock())
SIGNALS, CALLS = ("call", "c_return"), ("c_call",)
"""Events, as `sys.setprofile` names them. Python handles signals where a function begins and where one of C has
returned, nowhere between a `with` statement and what it guards; what fails in C++ has not been done.
"""


def raised_at(at: int, error: type[BaseException], act: Callable[[], object]) -> bool:
    """Run `act`, and raise at place `at` of those that it passes in our files; whether it got that far."""
    return at <= _run(at, error, act)


def places(error: type[BaseException], act: Callable[[], object]) -> int:
    """How many places `act` passes."""
    return _run(sys.maxsize, error, act)


def _lets_go(event: str, called: Any) -> bool:
    """True if a lock is about to be released, or a context left, which doesn't fail: an exception would keep it."""
    ends = isinstance(getattr(called, "__self__", None), LOCKS) or getattr(called, "__name__", "") == "__exit__"
    return event == "c_call" and ends


def _run(at: int, error: type[BaseException], act: Callable[[], object]) -> int:
    passed, events = 0, SIGNALS if error is KeyboardInterrupt else CALLS

    def profile(frame: FrameType, event: str, called: Any) -> None:
        nonlocal passed
        if event in events and frame.f_code.co_filename.startswith(OURS) and not _lets_go(event, called):
            passed += 1
            if passed == at:
                raise error

    before, report = sys.getprofile(), sys.unraisablehook
    sys.unraisablehook = lambda _: None  # Python swallows what is raised while an object is freed
    sys.setprofile(profile)
    try:
        act()
    except error:
        pass
    finally:
        sys.setprofile(before)
        sys.unraisablehook = report
    return passed
