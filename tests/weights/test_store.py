"""What is announced, or marked as unproven, is cast again."""

from ampcompile.weights import invalidate, mark_unproven
from ampcompile.weights.store import store
from tests.weights.bindings import Case
from tests.weights.writers import unsampled, unseen


def test_copies_unproven_and_announced() -> None:
    case = Case()
    for announce in (lambda: mark_unproven(store.keys), lambda: invalidate(case.weight)):
        unseen(case.weight)[unsampled(case.weight)] += 1
        assert not case.right(), "what nothing shows"
        announce()
        assert case.right()
