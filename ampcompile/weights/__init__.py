"""Low-precision copies of weights: cast once per update, shared by all graphs, reused until a write is detected."""

from .binding import Binding, ShardBinding
from .captures import CapturedCopies
from .release import release_masters
from .spec import CopySpec, Form, hoistable
from .step import WritableCopies, writable_copies
from .store import free_copies, invalidate, mark_unproven, weight_stats

__all__ = [
    "Binding",
    "CapturedCopies",
    "CopySpec",
    "Form",
    "ShardBinding",
    "WritableCopies",
    "free_copies",
    "hoistable",
    "invalidate",
    "mark_unproven",
    "release_masters",
    "weight_stats",
    "writable_copies",
]
