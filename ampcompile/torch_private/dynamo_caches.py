"""Dynamo's caches, as explaining needs them: how a callable was compiled, and restoring them. All private."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
from torch._dynamo import eval_frame, guards

from . import patches

_NO_MODULE = torch.nn.Module()


@dataclass(frozen=True)
class Compiled:
    """The arguments of `torch.compile`: the callable itself, the backend as Dynamo holds it, `dynamic`."""

    original: Any
    backend: Any
    dynamic: bool | None


def how_compiled(f: Any) -> Compiled | None:
    """Return how `torch.compile(f)` or `f.compile()` was called; None if neither was."""
    if isinstance(f, eval_frame.OptimizedModule):
        context: Any = f.dynamo_ctx
        return Compiled(f._orig_mod, eval_frame.innermost_backend(context.callback), context._dynamic)
    if isinstance(f, torch.nn.Module):
        inner = how_compiled(f._compiled_call_impl) if f._compiled_call_impl is not None else None
        return Compiled(f, inner.backend, inner.dynamic) if inner is not None else None
    if (context := _context(f)) is None:
        return None
    return Compiled(f._torchdynamo_orig_callable, eval_frame.innermost_backend(context.callback), context._dynamic)


def _context(f: Any) -> Any:
    """The optimize context of a compiled function, which keeps it only in the closure of a public accessor."""
    cells: Any = getattr(getattr(f, "get_compiler_config", None), "__closure__", None) or ()
    contents = (cell.cell_contents for cell in cells)
    return next((value for value in contents if isinstance(value, eval_frame._TorchDynamoContext)), None)


@contextlib.contextmanager
def dynamo_as_it_was(backend: Callable[..., Any]) -> Iterator[None]:
    """Drop what Dynamo compiles for `backend`, and the sizes that it learns, afterwards; other backends' code stays."""
    codes: list[CodeType] = []
    # Entries of other backends count towards the limits, past which Dynamo gives a function up for good.
    limits = torch._dynamo.config.patch(recompile_limit=10**6, accumulated_recompile_limit=10**6)
    try:
        with limits, patches.watch_dynamo(lambda code, _: codes.append(code)):
            yield
    finally:
        for code in codes:
            _forget(code, backend)
        for key in [key for key, cached in eval_frame.cached_backends.items() if _innermost(cached) is backend]:
            del eval_frame.cached_backends[key]


def _forget(code: CodeType, backend: Callable[..., Any]) -> None:
    """Drop the code compiled from `code` for `backend`."""
    entries = _debug_get_cache_entry_list(code)
    ours = [entry for entry in entries if _innermost(entry.backend) is backend]
    if len(ours) == len(entries):
        reset_code(code)
        return
    for entry in ours:  # Dynamo can't drop some of a function's entries, only invalidate them
        dead = guards.DeletedGuardManagerWrapper("it was compiled to be explained")
        # Recompilations are counted per set of modules: these belong to a module that is never called.
        dead.id_matched_objs = {"": weakref.ref(_NO_MODULE)}
        state: Any = entry.guard_manager.extra_state
        state.invalidate(entry, dead)


def _innermost(backend: Any) -> Any:
    inner = eval_frame.innermost_backend(backend)
    return getattr(inner, "compiler_fn", inner)
