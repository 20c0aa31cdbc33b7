"""Which passes run, and in which order."""

import pytest
import torch

from ampcompile.config import Options
from ampcompile.kernels import packed_linear
from ampcompile.passes.graph import Regions
from ampcompile.passes.pipeline import pipeline

BASE = ["assign_precision", "insert_casts"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"weights": "every_call"}, BASE),
        ({"lower": "eager"}, [*BASE, "hoist_weights"]),
        ({}, [*BASE, "hoist_weights", *(["pack_linears"] if packed_linear.available(torch.bfloat16) else [])]),
    ],
)
def test_the_order(options: dict[str, str], names: list[str]) -> None:
    passes = pipeline(Options.parse(options), Regions({}), lambda index, node: True)
    assert [each.name for each in passes] == names
    # The only pass that rounds is the one that says so.
    assert [each.name for each in passes if not each.exact] == ["insert_casts"]
