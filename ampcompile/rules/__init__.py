"""The dtype that each op runs in: autocast's own lists, by device, with our additions, and rules for custom ops."""

from .table import register_op

__all__ = ["register_op"]
