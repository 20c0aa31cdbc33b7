"""python -m proof.fuzz KIND SEED   run one random program; if it fails, print what is left of it that still does."""

import dataclasses
import sys
from typing import Any

from proof.fuzz.sweep import KINDS, PROGRAMS, judged, shared_code


def shorter(how: Any, of: Any) -> Any:
    """A program without any line that it fails without."""
    for line in reversed(range(len(of.lines))):
        lines = of.lines[:line] + of.lines[line + 1 :]
        without = dataclasses.replace(of, lines=lines)
        try:
            if how.judge(without)[1]:
                of = without
        except Exception:  # what is left is no program
            continue
    return of


def main(arguments: list[str]) -> int:
    """Print it, and what is wrong with it; 1 if something is."""
    if len(arguments) != 2 or arguments[0] not in KINDS:
        sys.exit(f"{__doc__}kinds: {', '.join(KINDS)}")
    kind, seed = arguments[0], int(arguments[1])
    how: Any = KINDS[kind]
    program = how.program(seed)
    with shared_code():
        found = how.judge(program)[1]
        if found:
            program = shorter(how, program)
            found = how.judge(program)[1]
        else:  # perhaps it takes what those before it in its group have compiled
            found = [judged(kind, each) for each in range(seed // PROGRAMS * PROGRAMS, seed + 1)][-1][1]
    print(program, *(f"{word}: {text}" for word, text in found or [("holds", "")]), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
