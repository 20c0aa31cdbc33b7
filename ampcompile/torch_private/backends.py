"""torch.compile's backends by name, and Inductor's options, modes and caches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_origin

import torch


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
