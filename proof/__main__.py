"""python -m proof [PART ...] [--all] [--shard I/N] [--minutes M]   run what has no verdict yet, and write docs/proof.md
python -m proof dashboard                                         run PyTorch's own benchmark scripts, and write it too
python -m proof docs                                              write docs/proof.md from proof/results/
"""

import sys

from proof import page, run


def main(arguments: list[str]) -> int:
    """Run the command that the arguments name; returns the exit status."""
    status = 0 if arguments == ["docs"] else run.main(arguments)
    page.main()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
