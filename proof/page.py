"""docs/proof.md, written from the results."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import Records
from benchmarks.report.tables import table
from proof import expected, results, versions
from proof.part import HOMES, part
from proof.results import Failure

PAGE = Path(__file__).parents[1] / "docs" / "proof.md"
HEAD = """# Proof: what holds, case by case

<!-- Written by `python -m proof docs` from the files in proof/results/: change those, or the generator. -->

`make proof` tries what is told here, case by case, and writes this page; `make proof PART=ops`, one part of it. It goes
on where it stopped, `SHARD=1/4` takes every fourth group of cases, and `ALL=1` every case instead of a sample that is
always the same. Each group runs in a process that is replaced when it dies, so that a crash is a result too.
"""


def page(folder: Path = results.RESULTS) -> str:
    """The whole document."""
    found = {name: list(results.of_part(name, folder)) for name in HOMES}
    chapters = [chapter(name, files) for name, files in found.items() if files]
    chapters.insert(-1 if found["dashboard"] else len(chapters), versions.chapter(folder))
    return HEAD + "".join(f"\n{text}" for lines in chapters for text in lines)


def chapter(name: str, files: Sequence[Records]) -> Iterator[str]:
    """The chapter about one part's results."""
    found = results.verdicts(files)
    yield f"## {part(name).title}\n"
    yield part(name).says
    yield machines(files)
    asked = set(part(name).groups(False))
    known = asked & {verdict.group for verdict in found}
    if known < asked:
        yield f"So far {len(known)} of the sample's {len(asked)} groups of cases.\n"
    yield part(name).tabulate(found)
    if rows := sorted(_not_so(expected.failures(name, found))):
        yield "Not so:\n"
        yield table(["", "what", "cases", "stock too", "why"], rows)


def machines(files: Iterable[Records]) -> str:
    """The machines and versions of the results."""
    lines = {
        f"{a['processor']}, {', '.join(a['low-precision instructions']) or 'no 16-bit units'}; {a['system']}, "
        f"Python {a['python']}, torch {a['torch']}{a.get('with', '')}; commit {a['commit']}."
        for records in files
        for a in records.about["runs"]
    }
    return "\n".join(sorted(lines)) + "\n"


def share_held(held: int, failed: int) -> str:
    """How many cases hold, in a sentence."""
    share = f"{held / (held + failed):.2%}" if held else "none"
    return f"{share} hold: {held} of {held + failed} that eager autocast runs and stock AOTAutograd gets right."


def outcomes(rows: dict[str, Counter[str]], columns: Sequence[str]) -> str:
    """A table of counts: a line for each row and one for all together, a column for each outcome that came up."""
    total = sum(rows.values(), Counter())
    used = [name for name in columns if total[name]]
    used += sorted(total.keys() - set(columns))
    lines = [(name, *(str(counts[each]) for each in used)) for name, counts in (rows | {"together": total}).items()]
    return table(["", *used], lines)


def _not_so(failures: Iterable[tuple[str, Failure, expected.Expected | None]]) -> Iterator[tuple[str, ...]]:
    """Those of one kind and cause as one, told by the first."""
    alike: dict[Any, list[tuple[str, Failure]]] = {}
    for group, failure, entry in failures:
        of = group if entry is None else entry.name
        alike.setdefault((of, failure.kind, failure.stock, entry), []).append((group, failure))
    for (of, kind, stock, entry), found in alike.items():
        group, first = found[0]
        why = entry.reason + (f" ({entry.upstream})" if entry.upstream else "") if entry else "cause not known yet"
        where = f"{group.removeprefix(of).removeprefix(', ')}: " if group != of else ""
        text = " ".join(f"{why}; {where}{first.text}".split()).replace("|", "\\|")
        yield f"`{of}`", kind, str(sum(each.times for _, each in found)), "yes" if stock else "no", text


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())
