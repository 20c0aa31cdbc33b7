"""What a process makes once, in a thread of its own: no mode, hook, transform or default device reaches it there."""

import functools
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class made_once(Generic[T]):
    """Make what a function returns once for each of its arguments, in a thread of its own, which the caller waits for.

    A thread begins with none of the states that torch keeps by thread. The default dtype is the process's, so dtypes
    are written out. On a GPU the thread has another stream than the caller: what is made there must be complete. Not
    to be called while a module of ours is imported, for which the thread might wait.
    """

    def __init__(self, make: Callable[..., T]) -> None:
        functools.update_wrapper(self, make)
        self._make, self._made, self._lock = make, dict[tuple[Any, ...], T](), threading.Lock()

    def __call__(self, *args: Any) -> T:
        if args not in self._made:
            errors: list[BaseException] = []
            thread = threading.Thread(target=self._fill, args=(args, errors), name=f"amp: {self._make.__name__}")
            thread.start()
            thread.join()
            if errors:
                raise errors[0]
        return self._made[args]

    def _fill(self, args: tuple[Any, ...], errors: list[BaseException]) -> None:
        torch.autograd._enable_record_function(False)  # here: a profiler of all threads would hold our tensors
        try:
            with self._lock:  # in this thread: after Ctrl-C in the caller, the next one waits for it
                if args not in self._made:
                    self._made[args] = self._make(*args)
        except BaseException as error:
            errors.append(error)
