"""python -m proof [PART ...] [--all] [--shard I/N] [--minutes M]   run what has no verdict yet, and print all results
python -m proof [PART ...] --show                                print the results that are there
"""

import sys

from benchmarks.machine import ROOT
from proof.run import parse, run
from proof.show import show

PAGE = ROOT / "build" / "proof.md"


def main(arguments: list[str]) -> int:
    """Run and print; build/proof.md holds what is printed. Returns 1 if groups are left for another run."""
    options = parse(arguments)
    left = 0 if options.show else run(options)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text := show(options.parts, options.results))
    print(text, f"{left} groups left: the same command goes on with them" if left else "nothing is left", sep="\n")
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
