"""Find the modules that run eagerly in a call that Dynamo was asked to compile."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from time import perf_counter
from types import FrameType
from typing import Any

from ampcompile.compiler.module_names import module_names, modules_of
from ampcompile.torch_private import dynamo_attempts


@dataclass(frozen=True)
class EagerRecord:
    """A module whose `forward` ran as Python code, under autocast: Dynamo compiled nothing of it."""

    module: str
    """Its path, as `named_modules` gives it; empty for the callable itself."""
    kind: str
    """Its class."""
    source: str
    """The line of its `forward`, `file:line`."""
    share: float
    """Its part of the call's time, from 0 to 1, without the time to compile."""


class ForwardTimes:
    """Measures the time that the `forward` of each module of `f` runs as Python code.

    Code that Dynamo makes of a `forward` is another code object, so it isn't counted.
    """

    def __init__(self, f: Any) -> None:
        self._names = module_names(f)
        modules = [module for root in modules_of(f) for module in root.modules()]
        self._forwards = {inspect.unwrap(type(module).forward).__code__ for module in modules}
        self._seconds: dict[int, float] = {}
        self._modules: dict[int, Any] = {}
        self._began: list[tuple[FrameType, int, float]] = []
        self._compiler: FrameType | None = None  # Dynamo's frame, while it compiles
        self._compiling = self._since = self._total = 0.0
        self._thread = get_ident()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the calls in this context, in this thread; compiling isn't counted, and hardly slowed down."""
        before, start = sys.getprofile(), perf_counter()
        with dynamo_attempts.around_compiling(partial(self._set, None), partial(self._set, self._see)):
            sys.setprofile(self._see)
            try:
                yield
            finally:
                sys.setprofile(before)
        self._total = perf_counter() - start - self._compiling

    def records(self, compiled: set[str]) -> list[EagerRecord]:
        """The outermost modules that ran eagerly with all they hold; `compiled`: paths of modules in graphs."""
        rows: dict[str, EagerRecord] = {}
        for key, module in self._modules.items():
            path = self._names.get(str(key), "")
            inside = any(each == path or each.startswith(f"{path}.") or not path for each in compiled)
            if not inside:
                code = inspect.unwrap(type(module).forward).__code__
                source = f"{code.co_filename}:{code.co_firstlineno}"
                rows[path] = EagerRecord(path, type(module).__name__, source, self._seconds[key] / self._total)
        return [row for path, row in rows.items() if not any(_holds(other, path) for other in rows)]

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self._compiler is not None:
            if event == "return" and frame is self._compiler:
                self._compiling += perf_counter() - self._since
                self._compiler = None
        elif event == "call" and code.co_filename == dynamo_attempts.ENTERED_BY_FRAMES:
            self._compiler, self._since = frame, perf_counter()
        elif event == "call" and code in self._forwards:
            module = frame.f_locals[code.co_varnames[0]]
            self._modules[id(module)] = module
            self._began.append((frame, id(module), self._now()))
        elif event == "return" and self._began and self._began[-1][0] is frame:
            _, key, began = self._began.pop()
            self._seconds[key] = self._seconds.get(key, 0.0) + self._now() - began

    def _now(self) -> float:
        return perf_counter() - self._compiling

    def _set(self, profile: Any) -> None:
        if get_ident() == self._thread:
            sys.setprofile(profile)


def _holds(outer: str, inner: str) -> bool:
    return outer != inner and (not outer or inner.startswith(f"{outer}."))
