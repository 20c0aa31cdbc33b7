"""python -m proof [PART ...] [--all] [--shard I/N] [--minutes M]   run what has no verdict yet, and write docs/proof.md
python -m proof docs                                              write docs/proof.md from proof/results/
"""

import sys

from proof import page, run


def main(arguments: list[str]) -> int:
    """Run the command that the arguments name; returns the exit status."""
    status = run.main(arguments) if arguments != ["docs"] else 0
    page.main()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
