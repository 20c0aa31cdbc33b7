"""Which passes run, and in which order."""

import pytest
import torch

from ampcompile.config import Options
from ampcompile.kernels import packed_linear
from ampcompile.passes.analysis.products import WideProducts
from ampcompile.passes.graph import Regions
from ampcompile.passes.pipeline import after, pipeline, replay

BASE = ["assign_precision", "insert_casts", "fold_casts"]
PACKED = ["pack_weights"] if packed_linear.available(torch.float32) else []
HALF = frozenset({torch.float16})
AFTER = [
    "bind_weights",
    "drop_casts",
    "widen_late",
    "widen_weight_gradients",
    "share_every_cast",
    "add_embedding_gradients",
    "write_for_products",
    "recompute_casts",
    "save_old_values",
    "write_roundings",
]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"weights": "every_call"}, [*BASE, "share_casts"]),
        ({"lower": "eager"}, [*BASE, "hoist_weights", "share_casts"]),
        ({}, [*BASE, "hoist_weights", "share_casts"]),
    ],
)
def test_the_order(options: dict[str, str], names: list[str]) -> None:
    passes = pipeline(Options.parse(options), Regions({}))
    assert [each.name for each in passes] == names
    with torch.no_grad():
        inference = pipeline(Options.parse(options), Regions({}))
        asserting = pipeline(Options.parse({**options, "size_asserts": True}), Regions({}))
    assert [each.name for each in inference if each.name not in names] == ([] if options else PACKED)
    assert [each.name for each in asserting] == names, "a packed tensor has no strides"
    # The only pass that rounds is the one that says so.
    assert [each.name for each in passes if not each.exact] == ["insert_casts"]


def test_after_differentiation_only_gradients_and_forgotten_roundings_change_digits() -> None:
    assert [each.name for each in after()] == AFTER
    assert [each.name for each in after() if not each.exact] == [
        "widen_weight_gradients",
        "add_embedding_gradients",
        "write_for_products",
        "write_roundings",
    ]
    emulating, small, dense = (
        [each.name for each in after(WideProducts(**{which: types}))]
        for which, types in (("all", HALF), ("small", True), ("dense", frozenset({torch.bfloat16})))
    )
    at = AFTER.index("widen_weight_gradients") + 1
    assert emulating == small == dense == [*AFTER[:at], "widen_products", *AFTER[at:]]
    assert [each.name for each in replay() if each.exact] == ["enable_second_backward", "bind_weights_eagerly"]
