"""The pages are plain: few numbers in running text, short sentences, and not too many lines."""

import pytest

from tests import pages, prose
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


def test_pages_written_by_hand_are_not_many_lines() -> None:
    """Tutorials count as the scripts that they are made of; what a program prints doesn't count."""
    scripts = (ROOT / "examples" / "tutorials").glob("[!_]*.py")
    written = {page: (ROOT / page).read_text() for page in BY_HAND if "/tutorials/" not in page}
    assert len(written.pop("README.md").splitlines()) <= 110
    lines = sum(len(path.read_text().splitlines()) for path in scripts)
    for text in written.values():
        outputs = [block[0] for block in pages.FENCED.finditer(text) if block[2] in ("", "text")]
        lines += len(text.splitlines()) - sum(len(output.splitlines()) for output in outputs)
    assert lines <= 3800
