"""docs/rooms.md is what the pipeline, the imports and the docstrings say now."""

from tests.rooms_page import PAGE, PHASES, page, passes


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "make rooms"


def test_every_phase_has_passes() -> None:
    assert all(passes(phase) for phase in PHASES)
