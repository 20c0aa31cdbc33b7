"""python -m tests.prose   counts numbers and long sentences of each page; with -v it prints these.

Only running text counts: no code, tables, headings, pictures or comments. What stands between backticks is one word,
and digits behind a letter are part of a name: `float32`, fp8, H200.
"""

import re
import sys
from typing import NamedTuple

from tests.pages import FENCED
from tests.test_layout import ROOT

NUMBERS, WORDS = 4, 30
"""At most so many numbers in 100 words, and words in a sentence."""
GENERATED = {"docs/reference.md"}
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]

NUMBER = re.compile(r"(?<![A-Za-z_\d.])\d+(?:[.,]\d+)*")
SENTENCE = re.compile(r"(?<=[.!?])[\"”)]?\s+(?=[A-Z\d\"“(]|torch|amp\b|b?float|fp8|oneDNN)")
BESIDE_TEXT = re.compile(r"\s*(\||#|!\[|\[\d+\]: |:\w+:)")


class Prose(NamedTuple):
    words: int
    numbers: int
    long: list[str]

    @property
    def numbers_in_100_words(self) -> float:
        return 100 * self.numbers / max(self.words, 1)


def paragraphs(text: str) -> list[str]:
    """Running text, an entry of a list each, without marks."""
    text = re.sub(r"<!--.*?-->", "", FENCED.sub("\n", text), flags=re.DOTALL)
    found = [""]
    for line in text.splitlines():
        entry = re.match(r"\s*(?:[-*]|\d+\.) ", line)
        if entry or not line.strip() or BESIDE_TEXT.match(line):
            found.append("")
        if not BESIDE_TEXT.match(line):
            found[-1] += " " + (line[entry.end() :] if entry else line).strip()
    for pattern, instead in (
        (r"!\[[^\]]*\]\([^)]*\)", ""),
        (r"\[([^\]]*)\]\([^)]*\)", r"\1"),
        (r"(\{\w+\})?`[^`]+`", "Code"),
        (r"\*+", ""),
    ):
        found = [re.sub(pattern, instead, paragraph) for paragraph in found]
    return [paragraph.strip() for paragraph in found if paragraph.strip()]


def words(text: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def prose(page: str) -> Prose:
    text = paragraphs((ROOT / page).read_text())
    sentences = [sentence for paragraph in text for sentence in SENTENCE.split(paragraph)]
    long = [sentence for sentence in sentences if words(sentence) > WORDS]
    return Prose(sum(map(words, text)), sum(len(NUMBER.findall(paragraph)) for paragraph in text), long)


def main() -> None:
    """A line for each page."""
    for page in PAGES:
        counted = prose(page)
        print(f"{page:40} {counted.words:6} words, {counted.numbers_in_100_words:4.1f} numbers in 100", end="")
        print(f", {len(counted.long):2} long sentences")
        if "-v" in sys.argv:
            print(*(f"    {words(sentence)}: {sentence}" for sentence in counted.long), sep="\n")


if __name__ == "__main__":
    main()
