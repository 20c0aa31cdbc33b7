"""Calls whose results leave in float32, and the tensors in what they return."""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.compiling import compiled


@dataclass
class Made:
    """A container that pytree doesn't know."""

    value: Any
    values: list = field(default_factory=list)


def x():
    return torch.randn(2, 8)


def run(f, **options):
    return compiled(f, **{"outputs": "float32", **options})[0]


def leaves(values):
    """The tensors in a result, those in dataclasses too."""
    return [v for v in pytree.tree_leaves(_opened(values)) if isinstance(v, torch.Tensor)]


def _opened(value):
    if isinstance(value, dict):
        return {k: _opened(v) for k, v in value.items()}
    if is_dataclass(value):
        return [_opened(getattr(value, f.name)) for f in fields(value)]
    return [_opened(v) for v in value] if isinstance(value, list | tuple) else value
