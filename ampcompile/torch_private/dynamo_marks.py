"""Markers of functions of ours for Dynamo, set without importing it first, which takes seconds."""

from typing import Any

import torch


def mark_constant(function: Any) -> None:
    """Mark a function as `torch.compiler.assume_constant_result` does, which loads Dynamo (torch 2.11 to 2.15)."""
    function._dynamo_marked_constant = True


run_untraced = torch._disable_dynamo  # `torch.compiler.disable`, but the first call loads Dynamo (2.11 to 2.15)


def pass_over(function: Any) -> None:
    """Exclude a function of ours from Dynamo's tracing, as torch's own are, but not the functions that it calls.

    Dynamo looks at each call in a compiled function after a graph break, also in a backward there, which calls what
    compiled autograd compiles. `optimize_contexts.set_frame_callback(None)` stops that for a while, for the called
    functions too. This one loads Dynamo: call it when something was compiled.
    """
    from torch._dynamo import eval_frame

    eval_frame.skip_code(function.__code__)
