"""python -m tests.mutations [--seed N] [--count N] [--only TEXT]   does the suite notice when one line is wrong?

Seeded mutations of one line each, over passes, weights and scaler, in a copy of the repository. Each must fail one of
the room's tests that `make test` runs, and that test must pass without it. Prints a line per mutation, and how many
were caught; exits with 1 below 90 %, with 2 if a test fails by itself.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = {"passes": "tests/passes", "ampcompile/weights": "tests/weights", "ampcompile/scaler": "tests/scaler"}
_OPPOSITE = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.BitAnd: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One line of a file as it is and as it is tried."""

    path: Path
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before.strip()}  ->  {self.after.strip()}"


def mutations(path: Path) -> Iterator[Mutation]:
    """Every mutation of a file: comparisons turned round, `and` for `or`, `not` left out, numbers one off, calls not
    made. Not of annotations, assertions and named thresholds, nor of what makes the text of an error or a log line."""
    text = (ROOT / path).read_text()
    lines = text.splitlines()
    for node, changed in _changes(ast.parse(text)):
        if node.lineno != node.end_lineno:
            continue
        line = lines[node.lineno - 1]
        after = line[: node.col_offset] + changed + line[node.end_col_offset :]
        if after != line:
            yield Mutation(path, node.lineno, line, after)


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


def chosen(seed: int, count: int, only: str) -> list[Mutation]:
    """As many of each room, from as many files as there are; `only` from files whose path holds this text."""
    rng, found = random.Random(seed), []
    rooms = [
        [path.relative_to(ROOT) for path in sorted((ROOT / room).rglob("*.py")) if path.name != "__init__.py"]
        for room in ROOMS
    ]
    rooms = [files for room in rooms if (files := [path for path in room if only in str(path)])]
    for files in rooms:
        rng.shuffle(files)
        for path in files[: -(-count // len(rooms))]:
            if possible := list(mutations(path)):
                found.append(rng.choice(possible))
    rng.shuffle(found)
    return found[:count]


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
    command = [sys.executable, "-m", "pytest", "-x", "--timeout=300", "-n", str(jobs), *tests]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=3600)
    if run.returncode in (0, 5):
        return None
    failed = [line.split(" ", 1)[1] for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"pytest exits with {run.returncode}"


def room_of(mutation: Mutation) -> str:
    """The tests of the room that a mutation is in."""
    return next(tests for room, tests in ROOMS.items() if mutation.path.is_relative_to(room))


def tried(mutation: Mutation, folder: Path, jobs: int) -> str | None:
    """The test that catches a mutation: of its own file first, then of its room."""
    room = room_of(mutation)
    within = mutation.path.relative_to("passes") if mutation.path.is_relative_to("passes") else mutation.path.name
    own = Path(room) / Path(within).with_name(f"test_{mutation.path.name}")
    path = folder / mutation.path
    lines = path.read_text().splitlines(keepends=True)
    try:
        path.write_text("".join([*lines[: mutation.line - 1], mutation.after + "\n", *lines[mutation.line :]]))
        return ((folder / own).exists() and fails(folder, [str(own)], 0)) or fails(folder, [room], jobs)
    finally:
        path.write_text("".join(lines))


def main() -> int:
    """Try them; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--only", default="", help="files whose path holds this text")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    caught, sound = 0, set()
    with tempfile.TemporaryDirectory() as name:
        copied(folder := Path(name).resolve())
        to_try = chosen(given.seed, given.count, given.only)
        for mutation in to_try:
            start = time.monotonic()
            by = tried(mutation, folder, given.jobs)
            if by and by not in sound and by.startswith("tests/") and fails(folder, [by], 0):
                parser.error(f"{by} fails without any mutation")
            sound.add(by)
            caught += by is not None
            print(
                f"{'caught' if by else 'MISSED'} {mutation}\n    {by or ''} ({time.monotonic() - start:.0f} s)",
                flush=True,
            )
    print(f"{caught} of {len(to_try)} caught")
    return int(caught < 0.9 * len(to_try))


if __name__ == "__main__":
    sys.exit(main())
