"""Dtype rules of ops: autocast's own lists by device, our additions, and rules for custom ops."""

from .table import register_op

__all__ = ["register_op"]
