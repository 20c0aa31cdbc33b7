"""What is told to Dynamo without loading it, which takes seconds: how it is to treat functions of ours."""

from __future__ import annotations

from typing import Any

import torch


def constant_when_traced(function: Any) -> None:
    """`torch.compiler.assume_constant_result`, which imports Dynamo to set this mark (torch 2.11 to 2.15)."""
    function._dynamo_marked_constant = True


run_untraced = torch._disable_dynamo  # `torch.compiler.disable`, but Dynamo is loaded by the first call
