"""python -m benchmarks.fp8_errors   how far a training step in fp8 is from float64, by recipe, on a CPU."""

from typing import Any

import torch

import ampcompile
from benchmarks.machine import about
from benchmarks.models import GPT, GPTConfig
from benchmarks.records import RESULTS, Records

SMALL = GPTConfig(layers=2, width=128, heads=4, vocab=256, context=32)
STAGE = "GPT of 2 layers of width 128, 2x32: distance of a step from float64"
RECIPES = ("bfloat16", "fp8", "fp8_e4m3", "fp8_rowwise")


def errors(recipe: str) -> dict[str, Any]:
    """The errors of the loss and of all gradients together, by an audit."""
    torch.manual_seed(0)
    model = GPT(SMALL)
    tokens = torch.randint(SMALL.vocab, (2, 33))
    options: dict[str, Any] = {} if recipe == "bfloat16" else {"policy": f"module blocks.*={recipe}"}
    audit = ampcompile.audit(model, dtype=torch.bfloat16, products="torch", **options)(tokens[:, :-1])
    return {"outputs": max(audit.outputs), "gradients": audit.gradient_error}


def main() -> None:
    """Note the errors of each recipe."""
    records = Records(RESULTS / "cpu-fp8-errors.json", about("cpu"))
    for recipe in RECIPES:
        records.add(STAGE, recipe, **errors(recipe))
        print(recipe, records.stages[STAGE][recipe], flush=True)


if __name__ == "__main__":
    main()
