"""Low-precision copies of weights: cast once per update, shared by all graphs, read while torch shows no write."""

from .binding import Binding, bind, free_copies, hoistable, invalidate, weight_stats
from .lending import Loan, lend

__all__ = ["Binding", "Loan", "bind", "free_copies", "hoistable", "invalidate", "lend", "weight_stats"]
