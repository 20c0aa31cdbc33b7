"""What is told to Dynamo without loading it: `import ampcompile` would take seconds."""

from __future__ import annotations

from typing import Any


def constant_when_traced(function: Any) -> None:
    """`torch.compiler.assume_constant_result`, which imports Dynamo to set this mark (torch 2.11 to 2.15)."""
    function._dynamo_marked_constant = True
