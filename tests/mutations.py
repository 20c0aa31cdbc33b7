"""python -m tests.mutations [--only TEXT] [--again] [--draw N --seed S]   does the suite notice one wrong line?

`tests/mutations.jsonl` lists mutations of one line each, over every room, and the test that noticed each of them. In a
copy of the repository each is put in the place of its line; a test that runs the line must then fail, and pass without
it. Which tests run which lines is found first, in one run of the suite, and kept in `.mutations.json` (`--reach`: found
again). What is tried is noted at once, so a run that was broken off goes on where it stopped: mutations that have their
test are left out unless `--again`, which tries that test first. `--draw` adds mutations. Exits with 1 if fewer than
90 % are noticed, with 2 if a test fails by itself.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutations.jsonl")
REACHED = ROOT / ".mutations.json"
SECONDS = 90
"""How long the tests may take that are tried on one mutation, nearest and quickest first."""
PRODUCT = ("ampcompile", "passes", "kernels")
_OPPOSITE = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.BitAnd: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One line of a file as it is and as it is tried; `caught` by which test, "" by none, None if it wasn't tried."""

    path: str
    before: str
    after: str
    which: int = 0
    """Of the lines of the file that read alike."""
    caught: str | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.before.strip()}  ->  {self.after.strip()}"

    def key(self) -> str:
        """Of its line."""
        return f"{self.path}:{self.which}:{self.before}"

    def applied(self, text: str) -> str | None:
        """The file's text with the mutation, None if the line isn't there any more."""
        lines = text.split("\n")
        alike = [i for i, line in enumerate(lines) if line == self.before]
        if self.which >= len(alike):
            return None
        lines[alike[self.which]] = self.after
        return "\n".join(lines)


def mutations(path: Path) -> Iterator[Mutation]:
    """Every mutation of a file: comparisons turned round, `and` for `or`, `not` left out, numbers one off, calls not
    made. Not of annotations, assertions and named thresholds, nor of what makes the text of an error or a log line."""
    text = (ROOT / path).read_text()
    lines = text.split("\n")
    for node, changed in _changes(ast.parse(text)):
        if node.lineno != node.end_lineno:
            continue
        line = lines[node.lineno - 1]
        after = line[: node.col_offset] + changed + line[node.end_col_offset :]
        if after != line:
            yield Mutation(str(path), line, after, lines[: node.lineno - 1].count(line))


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    for node in _code(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPPOSITE:
            yield node, f"({_with(node, 'ops', [_OPPOSITE[type(node.ops[0])](), *node.ops[1:]])})"
        elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in _OPPOSITE:
            yield node, f"({_with(node, 'op', _OPPOSITE[type(node.op)]())})"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, f"({ast.unparse(node.operand)})"
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node, str(node.value + 1)
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield node, str(not node.value)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "pass"
        elif isinstance(node, ast.Return) and not isinstance(node.value, ast.Constant | None):
            yield node, "return None"


def _with(node: ast.expr, field: str, value: object) -> str:
    changed = copy.copy(node)
    setattr(changed, field, value)
    return ast.unparse(changed)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one that decide what is computed."""
    if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("log.", "_log.", "warnings.", "cast")):
        return
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and ast.unparse(node.targets[0]).isupper():
        return  # a threshold: one more or less is as good
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code(child)


def drawn(seed: int, count: int) -> list[Mutation]:
    """Mutations of as many files of each room as there are, room after room, until there are enough."""
    rng = random.Random(seed)
    rooms: dict[Path, list[Path]] = {}
    for folder in PRODUCT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            rooms.setdefault(path.parent, []).append(path.relative_to(ROOT))
    found: list[Mutation] = []
    while len(found) < count:
        for files in rooms.values():
            possible = [m for m in mutations(rng.choice(files)) if m not in found]
            found += [rng.choice(possible)] if possible else []
    return found[:count]


def read() -> list[Mutation]:
    """The list."""
    return [Mutation(**json.loads(line)) for line in LIST.read_text().splitlines()] if LIST.exists() else []


def write(listed: list[Mutation]) -> None:
    """Keep the list."""
    LIST.write_text("".join(json.dumps(asdict(mutation)) + "\n" for mutation in listed))


def copied(folder: Path) -> None:
    """The repository, with its sub-packages where Python looks for them."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for part in ("passes", "kernels"):
        (folder / "ampcompile" / part).symlink_to(folder / part)


def run_tests(folder: Path, tests: Sequence[str], jobs: int, *options: str) -> subprocess.CompletedProcess[str]:
    """Run tests in the copy, in file order of their names."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / ".inductor"))
    command = [sys.executable, "-m", "pytest", "-m", "not slow", "--timeout=300", "-n", str(jobs), *options, *tests]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=7200)


def fails(folder: Path, tests: Sequence[str], jobs: int) -> str | None:
    """The first test that fails in the copy, None if all pass."""
    run = run_tests(folder, tests, jobs, "-x")
    if run.returncode in (0, 5):
        return None
    failed = [line.split(" ", 1)[1] for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"pytest exits with {run.returncode}"


_PROBE = r"""
import os

_noted = set()


def reached(line):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test and (line, test) not in _noted:
        _noted.add((line, test))
        with open(FILE, "a") as notes:
            notes.write(f"{line} {test}\n")
"""


def probed(text: str, lines: dict[int, int]) -> str:
    """A file that notes when each of these lines runs, under a number; but for lines that Triton compiles."""
    tree = ast.parse(text)
    compiled = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _is_compiled(node)]
    for line, number in lines.items():
        if any(node.lineno <= line <= (node.end_lineno or 0) for node in compiled):
            continue
        blocks = [
            (statement.lineno, block, statement)
            for node in ast.walk(tree)
            for block in (getattr(node, field, None) for field in ("body", "orelse", "finalbody"))
            if isinstance(block, list)
            for statement in block
            if hasattr(statement, "end_lineno") and statement.lineno <= line <= statement.end_lineno
        ]
        _, block, statement = max(blocks, key=lambda found: found[0])
        block.insert(block.index(statement), ast.parse(f"__import__('probe').reached({number})").body[0])
    return ast.unparse(tree)


def _is_compiled(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def find_reached(listed: list[Mutation], folder: Path, jobs: int) -> None:
    """Run the suite once, and keep which tests run the line of each mutation, with their seconds."""
    numbers: dict[str, dict[int, int]] = {}
    for number, mutation in enumerate(listed):
        lines = (ROOT / mutation.path).read_text().split("\n") if (ROOT / mutation.path).exists() else []
        alike = [i for i, line in enumerate(lines, 1) if line == mutation.before]
        if mutation.which < len(alike):
            numbers.setdefault(mutation.path, {}).setdefault(alike[mutation.which], number)
    for path, lines_of in numbers.items():
        (folder / path).write_text(probed((ROOT / path).read_text(), lines_of))
    notes, report = folder / "reached.txt", folder / "report.xml"
    (folder / "probe.py").write_text(_PROBE.replace("FILE", repr(str(notes))))
    run = run_tests(folder, ["tests"], jobs, "--dist=worksteal", f"--junitxml={report}")
    if run.returncode > 1:
        raise RuntimeError(run.stdout[-3000:])
    seconds = {
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}": float(case.get("time", 0))
        for case in ElementTree.parse(report).iter("testcase")
        if not {child.tag for child in case} & {"failure", "error", "skipped"}
    }
    reached: dict[str, dict[str, float]] = {}
    for note in notes.read_text().splitlines():
        number_, test = note.split(" ", 1)
        if test in seconds:
            reached.setdefault(listed[int(number_)].key(), {})[test] = seconds[test]
    REACHED.write_text(json.dumps(reached))
    for path in numbers:
        (folder / path).write_text((ROOT / path).read_text())


def tests_of(mutation: Mutation, reached: dict[str, dict[str, float]]) -> list[list[str]]:
    """Tests that run its line, those of its file and folder first; of a line that Triton compiles, these as a whole."""
    inner = Path(mutation.path)
    own = Path("tests", inner.relative_to("ampcompile") if inner.parts[0] == "ampcompile" else inner)
    own = own.with_name(f"test_{own.name}")
    if mutation.key() not in reached:
        return [[str(test)] for test in (own, own.parent) if (ROOT / test).exists() and test != Path("tests")]
    found = reached[mutation.key()]

    def distance(test: str) -> tuple[int, float]:
        return 0 if test.startswith(str(own)) else 1 if test.startswith(f"{own.parent}/") else 2, found[test]

    batches: dict[bool, list[str]] = {}
    left = float(SECONDS)
    for test in sorted(found, key=distance):
        batches.setdefault(distance(test)[0] < 2, []).append(test)
        if (left := left - found[test]) < 0:
            break
    return list(batches.values())


def tried(mutation: Mutation, folder: Path, jobs: int, reached: dict[str, dict[str, float]]) -> str:
    """The test that notices a mutation: the one that did, or of those that run its line; "" if none does."""
    path = folder / mutation.path
    text = path.read_text()
    changed = mutation.applied(text)
    assert changed is not None
    before = [[mutation.caught]] if mutation.caught and (folder / mutation.caught.split("::")[0]).exists() else []
    try:
        path.write_text(changed)
        return next((by for tests in [*before, *tests_of(mutation, reached)] if (by := fails(folder, tests, jobs))), "")
    finally:
        path.write_text(text)


def main() -> int:
    """Try them; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="add N mutations to the list first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="mutations of files whose path holds this text")
    parser.add_argument("--again", action="store_true", help="those that were tried, too")
    parser.add_argument("--reach", action="store_true", help="find again which tests run which lines")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    listed = read()
    listed += [mutation for mutation in drawn(given.seed, given.draw) if mutation not in listed]
    write(listed)
    sound: set[str] = set()
    with tempfile.TemporaryDirectory() as name:
        copied(folder := Path(name).resolve())
        if given.reach or not REACHED.exists():
            find_reached(listed, folder, given.jobs)
        reached = json.loads(REACHED.read_text())
        for i, mutation in enumerate(listed):
            gone = not (ROOT / mutation.path).exists() or mutation.applied((ROOT / mutation.path).read_text()) is None
            if gone or given.only not in mutation.path or (mutation.caught is not None and not given.again):
                continue
            start = time.monotonic()
            by = tried(mutation, folder, given.jobs, reached)
            if by and by not in sound and by.startswith("tests/") and fails(folder, [by], 0):
                parser.error(f"{by} fails without any mutation")
            sound.add(by)
            listed[i] = replace(mutation, caught=by)
            write(listed)
            seconds = time.monotonic() - start
            print(f"{'caught' if by else 'MISSED'} {mutation}\n    {by} ({seconds:.0f} s)", flush=True)
    tested = [mutation for mutation in listed if mutation.caught is not None]
    noticed = sum(bool(mutation.caught) for mutation in tested)
    print(f"{noticed} of {len(tested)} noticed, {len(listed) - len(tested)} not tried")
    return int(noticed < 0.9 * len(tested))


if __name__ == "__main__":
    sys.exit(main())
