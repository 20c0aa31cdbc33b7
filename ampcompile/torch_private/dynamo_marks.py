"""Markers of functions of ours for Dynamo, set without importing it, which takes seconds."""

from __future__ import annotations

from typing import Any

import torch


def mark_constant(function: Any) -> None:
    """Mark a function as `torch.compiler.assume_constant_result` does, which loads Dynamo (torch 2.11 to 2.15)."""
    function._dynamo_marked_constant = True


run_untraced = torch._disable_dynamo  # `torch.compiler.disable`, but the first call loads Dynamo (2.11 to 2.15)
