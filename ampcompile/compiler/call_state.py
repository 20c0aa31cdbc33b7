"""What the call of ours that a thread is in knows of itself."""

from __future__ import annotations

import threading
from typing import Any

import torch


class CallState(threading.local):
    """Of one thread; outside of calls of ours as it stands here."""

    callable: Any = None
    """What torch.compile was given; None outside of a call."""
    graphs: Any = None
    """Collects what is compiled in the call, where somebody wants to know."""
    low_dtype: torch.dtype | None = None
    """The call's low-precision type; None where autocast is off by the user's wish, too."""
    widens: bool = False
    """Whether what the call returns leaves it in float32."""
    widened: bool = False
    """Whether a graph has seen to it."""


current_call = CallState()
