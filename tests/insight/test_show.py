"""A table of texts: rows under their headings, folded where the terminal is narrow."""

import pytest

from ampcompile.insight.show import human_bytes, render_table


def test_columns_are_as_wide_as_their_texts_and_nothing_trails() -> None:
    assert render_table(("name", "of"), [("a", "[1]"), ("longer", "2")]).splitlines() == [
        "name    of",
        "a       [1]",
        "longer  2",
    ]


def test_without_headings_there_is_no_line_for_them() -> None:
    assert render_table(("", ""), [("a", "b")]) == "a  b"


def test_it_folds_where_the_terminal_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    lines = render_table(("text",), [("word " * 20,)]).splitlines()
    assert len(lines) > 4 and max(map(len, lines)) <= 20


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (2**30, "1.0 GiB"),
        (3 * 2**50, "3072.0 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert human_bytes(count) == text
