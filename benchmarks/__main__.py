"""python -m benchmarks [STAGE ...] [--device cpu|cuda] [--out FILE]   measure, and write the results as JSON
python -m benchmarks decide RESULTS.json                               what a GPU run decides, by docs/gpu_decisions.md
python -m benchmarks docs                                              write docs/benchmarks.md from benchmarks/results/
"""

import importlib
import sys

COMMANDS = {
    "decide": "benchmarks.report.decisions",
    "docs": "benchmarks.report.page",
}


def main() -> int:
    """Run the command that the first argument names, else a measurement; returns the exit status."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    module = importlib.import_module(COMMANDS.get(command, "benchmarks.run"))
    return module.main(sys.argv[2:] if command in COMMANDS else sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
