"""python -m tests.mutations [--only TEXT] [--again] [--draw N --seed S]   does the suite notice one wrong line?

`tests/mutations.jsonl` lists mutations of one line each, over every room, and the test that noticed each of them. In a
copy of the repository each is put in the place of its line; one of the tests of its file or of its room must then
fail, and pass without it. What is tried is noted at once, so a run that was broken off goes on where it stopped:
mutations that have their test are left out unless `--again`, which tries that test first. `--draw` adds mutations.
Exits with 1 if fewer than 90 % are noticed, with 2 if a test fails by itself.
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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutations.jsonl")
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


def fails(folder: Path, tests: list[str], jobs: int) -> str | None:
    """The first test that fails in the copy, None if all pass."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / ".inductor"))
    command = [sys.executable, "-m", "pytest", "-x", "-m", "not slow", "--timeout=300", "-n", str(jobs), *tests]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=3600)
    if run.returncode in (0, 5):
        return None
    failed = [line.split(" ", 1)[1] for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"pytest exits with {run.returncode}"


def tests_of(path: str) -> list[str]:
    """The tests of a file, of its folder, and of all that folder's neighbours, nearest first."""
    inner = Path(path).relative_to("ampcompile") if path.startswith("ampcompile/") else Path(path)
    own = Path("tests", inner).with_name(f"test_{inner.name}")
    near = [own, own.parent] if own.parent != Path("tests") else [own]
    room = Path("tests", inner.parts[0]) if len(inner.parts) > 1 else Path("tests/compiler")
    return [str(test) for test in dict.fromkeys([*near, room]) if (ROOT / test).exists()]


def tried(mutation: Mutation, folder: Path, jobs: int) -> str:
    """The test that notices a mutation: the one that did, the tests of its file, then of its room; "" if none does."""
    path = folder / mutation.path
    text = path.read_text()
    changed = mutation.applied(text)
    assert changed is not None
    before = [mutation.caught] if mutation.caught and (folder / mutation.caught.split("::")[0]).exists() else []
    try:
        path.write_text(changed)
        return next((by for test in [*before, *tests_of(mutation.path)] if (by := fails(folder, [test], jobs))), "")
    finally:
        path.write_text(text)


def main() -> int:
    """Try them; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="add N mutations to the list first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="mutations of files whose path holds this text")
    parser.add_argument("--again", action="store_true", help="those that were tried, too")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    listed = read()
    listed += [mutation for mutation in drawn(given.seed, given.draw) if mutation not in listed]
    write(listed)
    sound: set[str] = set()
    with tempfile.TemporaryDirectory() as name:
        copied(folder := Path(name).resolve())
        for i, mutation in enumerate(listed):
            gone = not (ROOT / mutation.path).exists() or mutation.applied((ROOT / mutation.path).read_text()) is None
            if gone or given.only not in mutation.path or (mutation.caught is not None and not given.again):
                continue
            start = time.monotonic()
            by = tried(mutation, folder, given.jobs)
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
