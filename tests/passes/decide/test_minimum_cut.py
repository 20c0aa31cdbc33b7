"""The cut is a minimum: no other set of vertices is cheaper to cut off."""

from itertools import chain, combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from ampcompile.passes.decide.minimum_cut import source_side

VERTICES = range(5)
EDGES = st.dictionaries(
    st.tuples(st.sampled_from(["s", *VERTICES]), st.sampled_from([*VERTICES, "t"])),
    st.sampled_from([0, 1, 2, 3, 7, float("inf")]),
    max_size=14,
)


def cost(capacities, side):
    return sum(c for (a, b), c in capacities.items() if a in side and b not in side)


@settings(max_examples=300, deadline=None)
@given(EDGES)
def test_no_other_cut_is_cheaper(capacities):
    capacities = {edge: c for edge, c in capacities.items() if edge[0] != edge[1]}
    subsets = chain.from_iterable(combinations(VERTICES, n) for n in range(len(VERTICES) + 1))
    least = min(cost(capacities, {"s", *subset}) for subset in subsets)
    if least == float("inf"):
        return
    found = source_side(capacities, "s", "t")
    assert "s" in found and "t" not in found
    assert cost(capacities, found) == least


def test_nothing_to_cut():
    assert source_side({}, "s", "t") == {"s"}
