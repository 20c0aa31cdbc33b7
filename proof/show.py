"""Results as text: what each part tries, how many cases hold, and which don't and why."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import Records
from benchmarks.tables import table
from proof import expected, results
from proof.part import HOMES, load_part
from proof.results import Failure


def show(names: Iterable[str] = HOMES, folder: Path = results.RESULTS) -> str:
    """The chapters of all parts that have results."""
    found = {name: list(results.find_records(name, folder)) for name in names}
    return "\n".join("\n".join(show_part(name, files)) for name, files in found.items() if files)


def show_part(name: str, files: Sequence[Records]) -> Iterator[str]:
    """The chapter about one part's results."""
    found, part = results.read_verdicts(files), load_part(name)
    yield f"## {part.title}\n\n{part.says}\n{_list_machines(files)}"
    asked = set(part.groups(False))
    known = asked & {verdict.group for verdict in found}
    if known < asked:
        yield f"So far {len(known)} of the sample's {len(asked)} groups of cases.\n"
    yield part.tabulate(found)
    if rows := sorted(_list_failures(expected.explain_failures(name, found))):
        yield "Not so:\n"
        yield table(["", "what", "cases", "stock too", "why"], rows)


def _list_machines(files: Iterable[Records]) -> str:
    lines = {
        f"{a['processor']}, {', '.join(a['low-precision instructions']) or 'no 16-bit units'}; {a['system']}, "
        f"Python {a['python']}, torch {a['torch']}; commit {a['commit']}."
        for records in files
        for a in records.about["runs"]
    }
    return "\n".join(sorted(lines)) + "\n"


def share_held(held: int, failed: int) -> str:
    """How many cases hold, in a sentence."""
    share = f"{held / (held + failed):.2%}" if held else "none"
    return f"{share} hold: {held} of {held + failed} that eager autocast runs and stock AOTAutograd gets right."


def tabulate_counts(rows: dict[str, Counter[str]], columns: Sequence[str]) -> str:
    """A table of counts: a line for each row and one for all together, a column for each outcome that came up."""
    total = sum(rows.values(), Counter())
    used = [name for name in columns if total[name]]
    used += sorted(total.keys() - set(columns))
    lines = [(name, *(str(counts[each]) for each in used)) for name, counts in (rows | {"together": total}).items()]
    return table(["", *used], lines)


def _list_failures(failures: Iterable[tuple[str, Failure, expected.Expected | None]]) -> Iterator[tuple[str, ...]]:
    """Those of one kind and cause as one, told by the first."""
    alike: dict[Any, list[tuple[str, Failure]]] = {}
    for group, failure, entry in failures:
        of = group if entry is None else entry.name
        alike.setdefault((of, failure.kind, failure.stock, entry), []).append((group, failure))
    for (of, kind, stock, entry), found in alike.items():
        group, first = found[0]
        where = f"{group.removeprefix(of).removeprefix(', ')}: " if group != of else ""
        text = " ".join(f"{entry.reason if entry else 'cause not known yet'}; {where}{first.text}".split())
        times = str(sum(each.times for _, each in found))
        yield f"`{of}`", kind, times, "yes" if stock else "no", text.replace("|", "\\|")
