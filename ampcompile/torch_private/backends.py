"""What the command line asks of torch in private: its backends by name, and where Inductor keeps what it compiled."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def inductor_cache() -> Path:
    """The folder of Inductor's caches, which may not exist yet."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())


def backend_is_found() -> bool:
    """Whether `torch.compile(backend="amp")` finds the package without importing it."""
    return "amp" in torch._dynamo.list_backends()
