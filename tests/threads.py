"""Threads whose errors are the test's own."""

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
