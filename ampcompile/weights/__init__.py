"""Low-precision copies of weights: cast once per update, shared by all graphs, read only while proven fresh."""

from .binding import Binding, bind, free_copies, hoistable, invalidate, weight_stats, writable_copies, wrote

__all__ = ["Binding", "bind", "free_copies", "hoistable", "invalidate", "weight_stats", "writable_copies", "wrote"]
