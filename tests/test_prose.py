"""The pages are plain: few numbers in running text, short sentences, and not too many words."""

import pytest

from tests import prose
from tests.test_layout import ROOT

BY_HAND = [page for page in prose.PAGES if page not in prose.GENERATED]
TRIED = "docs/tried_and_dropped.md"


@pytest.mark.parametrize("page", BY_HAND)
def test_few_numbers_and_short_sentences(page: str) -> None:
    found = prose.prose(page)
    assert not found.long, f"sentences of more than {prose.WORDS} words"
    assert page == TRIED or found.numbers_in_100_words <= prose.NUMBERS, "python -m tests.prose counts them"


def test_what_counts() -> None:
    text = "# 1\n\n1 of 20 [is 3](a/4.md): `5` in float32, fp8.\nAVX-512 2^-18\n\n"
    text += "| 6 |\n\n```\n7\n```\n\n- 16-bit. torch 2.11."
    one, other = prose.paragraphs(text)
    assert one == "1 of 20 is 3: Code in float32, fp8. AVX-512 2^-18" and other == "16-bit. torch 2.11."
    assert prose.NUMBER.findall(one) == ["1", "20", "3", "512", "2", "18"]
    assert prose.SENTENCE.split(other) == ["16-bit.", "torch 2.11."]


def test_pages_written_by_hand_are_not_many_words() -> None:
    """As `wc -w` counts: tables, code and what programs print too."""
    counts = {page: len((ROOT / page).read_text().split()) for page in BY_HAND}
    assert counts.pop("README.md") <= 1100
    assert sum(counts.values()) <= 45_000
