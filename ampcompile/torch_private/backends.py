"""torch.compile's backends by name, and Inductor's options, modes and caches."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_origin

import torch

from . import patches


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


def backend_is_found() -> bool:
    """Return True if `torch.compile(backend="amp")` finds the package without importing it."""
    return "amp" in torch._dynamo.list_backends()


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
