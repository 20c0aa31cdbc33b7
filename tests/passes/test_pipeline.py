"""Which passes run, and in which order."""

import pytest
import torch

from ampcompile.config import Options
from ampcompile.kernels import packed_linear
from ampcompile.passes.graph import Regions
from ampcompile.passes.pipeline import pipeline

BASE = ["assign_precision", "insert_casts", "spread_casts", "fold_casts", "move_casts"]
PACKED = ["pack_linears"] if packed_linear.available(torch.bfloat16) else []


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"weights": "every_call"}, [*BASE, "recompute_casts", "share_casts"]),
        ({"lower": "eager"}, [*BASE, "hoist_weights", "share_casts"]),
        ({}, [*BASE, "hoist_weights", "share_casts"]),
    ],
)
def test_the_order(options: dict[str, str], names: list[str]) -> None:
    passes = pipeline(Options.parse(options), Regions({}), lambda index, node: True)
    assert [each.name for each in passes] == names
    with torch.no_grad():
        inference = pipeline(Options.parse(options), Regions({}), lambda index, node: True)
    assert [each.name for each in inference if each.name not in names] == ([] if options else PACKED)
    # The only pass that rounds is the one that says so.
    assert [each.name for each in passes if not each.exact] == ["insert_casts"]
