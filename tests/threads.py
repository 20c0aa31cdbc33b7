"""Threads whose errors are the test's own."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def running(*work: Callable[[], object]) -> Iterator[None]:
    """Run each in a thread of its own beside the block; then wait for all, and raise what one of them raised.

    What ends the work stands in the block, in a `finally` where it can fail.
    """
    with ThreadPoolExecutor(len(work)) as pool:
        futures = [pool.submit(each) for each in work]
        yield
    for future in futures:
        future.result()


@contextmanager
def racing(act: Callable[[], object], threads: int = 1) -> Iterator[None]:
    """Do this again and again in threads beside the block, which take turns with it every 10 microseconds."""
    stop, interval = threading.Event(), sys.getswitchinterval()

    def go_on() -> None:
        while not stop.is_set():
            act()

    sys.setswitchinterval(1e-5)
    try:
        with running(*[go_on] * threads):
            try:
                yield
            finally:
                stop.set()
    finally:
        sys.setswitchinterval(interval)
