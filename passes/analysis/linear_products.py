"""The parts of a linear product: rows, a matrix and what is added, by the names in its schema."""

from __future__ import annotations

from typing import Any


def operands(arguments: dict[str, Any]) -> tuple[Any, Any]:
    """The rows and the matrix of a linear product, by the names in its schema."""
    if "weight" in arguments:
        return arguments["input"], arguments["weight"]
    if "mat1" in arguments:
        return arguments["mat1"], arguments["mat2"]
    return arguments["self"], arguments.get("mat2", arguments.get("other"))


def bias_of(arguments: dict[str, Any]) -> Any:
    """The operand that is added to a linear product; None: nothing."""
    return arguments.get("bias") if "weight" in arguments else arguments.get("self") if "mat1" in arguments else None


def result_width(arguments: dict[str, Any]) -> Any:
    """The features of the result."""
    return arguments["weight"].shape[0] if "weight" in arguments else operands(arguments)[1].shape[1]
