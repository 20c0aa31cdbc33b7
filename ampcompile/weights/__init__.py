"""Low-precision copies of weights: cast once per update, shared by all graphs, reused until a write is detected."""

from .binding import Binding
from .lending import Loan, lend
from .release import release_masters
from .shards import ShardBinding
from .spec import CopySpec, Form, hoistable
from .store import free_copies, invalidate, weight_stats

__all__ = [
    "Binding",
    "CopySpec",
    "Form",
    "Loan",
    "ShardBinding",
    "free_copies",
    "hoistable",
    "invalidate",
    "lend",
    "release_masters",
    "weight_stats",
]
