"""Inductor's options and backends; what Dynamo compiled: how, its caches, its attempts, what stopped them. Private."""

import contextlib
import os
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary
from types import CodeType
from typing import Any, get_origin

import torch
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
from torch._dynamo import eval_frame, guards
from torch._dynamo.utils import counters

from . import patches
from .dynamo import unwrap_backend

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
        for key in [key for key, cached in eval_frame.cached_backends.items() if unwrap_backend(cached) is backend]:
            del eval_frame.cached_backends[key]


def _forget(code: CodeType, backend: Callable[..., Any]) -> None:
    entries = _debug_get_cache_entry_list(code)
    ours = [entry for entry in entries if unwrap_backend(entry.backend) is backend]
    if len(ours) == len(entries):
        reset_code(code)
        return
    for entry in ours:  # Dynamo can't drop some of a function's entries, only invalidate them
        dead = guards.DeletedGuardManagerWrapper("it was compiled to be explained")
        # Recompilations are counted per set of modules: these belong to a module that is never called.
        dead.id_matched_objs = {"": weakref.ref(_NO_MODULE)}
        state: Any = entry.guard_manager.extra_state
        state.invalidate(entry, dead)


def count_attempts() -> tuple[int, Counter[str]]:
    """Return the number of frames tried so far, and how often each reason stopped one."""
    return counters["frames"]["total"], Counter(counters["graph_break"]) + Counter(counters["unimplemented"])


def count_stops() -> int:
    """Return how often Dynamo gave a frame up, which then runs eagerly, or broke a graph."""
    frames = counters["frames"]
    return frames["total"] - frames["ok"] + sum(counters["graph_break"].values())


def reasons_since(before: tuple[int, Counter[str]]) -> list[str]:
    """Return the reasons since then, each once."""
    return list(count_attempts()[1] - before[1])


def failed_since(before: tuple[int, Counter[str]]) -> str | None:
    """Return the first lines of the reasons since then, empty if there are none; None if no frame was tried since."""
    if count_attempts()[0] == before[0]:
        return None
    return "; ".join(dict.fromkeys(reason.splitlines()[0] for reason in reasons_since(before)))


def in_short(reason: str, user_stack: Sequence[FrameSummary] = ()) -> str:
    """Return a reason of Dynamo's in one line: its explanation and its first hint, and the user's line."""
    title, *more = reason.splitlines()
    parts = [line.split(": ", 1)[1] for line in more if line.startswith(("  Explanation: ", "  Hint: "))][:2]
    text = re.sub(r"<function ([^ ]+) at 0x\w+>", r"\1", " ".join(f"{part.rstrip('.')}." for part in parts) or title)
    if title.startswith("generic_jump") or "data-dependent branching" in reason.lower():
        text = "Python branches on the value of a tensor."
    frames = list(user_stack)[-1:]
    return text + "".join(f" {frame.filename}:{frame.lineno}: {frame.line}" for frame in frames)


def inductor_cache() -> Path:
    """The folder of Inductor's caches, which may not exist yet."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())


def inductor_modes() -> dict[str, dict[str, Any]]:
    """The modes of `torch.compile`, each with the options of Inductor that it sets."""
    from torch._inductor import list_mode_options

    return list_mode_options()


def inductor_options() -> dict[str, type]:
    """Inductor's options with the types that torch.compile demands of their values; `object` where it checks none."""
    from torch._inductor import config

    typed: Any = config
    kinds = {name: typed.get_type(name) for name in typed.get_config_copy()}
    return {name: k if isinstance(k, type) and get_origin(k) is None else object for name, k in kinds.items()}


def makes_cuda_graphs(settings: Mapping[str, Any]) -> bool:
    """Return True if Inductor, with these settings on top of its own, replays CUDA graphs."""
    from torch._inductor import config

    return bool(settings.get("triton.cudagraphs", config.triton.cudagraphs))


@contextlib.contextmanager
def compiled_anew(settings: Mapping[str, Any]) -> Iterator[list[str]]:
    """Have all compiled callables of the process compile with these settings of Inductor; afterwards as before, anew.

    Yields a list that gets the reasons for which Inductor leaves a graph out of CUDA graphs.
    """
    from torch._inductor import config
    from torch._inductor.cudagraph_utils import cudagraphs_log

    torch._dynamo.reset()
    try:
        with config.patch(dict(settings)), patches.messages_of(cudagraphs_log) as reasons:
            yield reasons
    finally:
        torch._dynamo.reset()
