"""Low-precision copies of weights: cast once per update, shared by all graphs, reused until a write is detected."""

from .binding import Binding, bind, free_copies, hoistable, invalidate, weight_stats
from .lending import Loan, lend

__all__ = ["Binding", "Loan", "bind", "free_copies", "hoistable", "invalidate", "lend", "weight_stats"]
