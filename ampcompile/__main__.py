"""`python -m ampcompile bench | doctor`: arguments and output. Results go to stdout, progress and errors to stderr."""

import argparse
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ampcompile.about import VERSION
from ampcompile.config import Options
from ampcompile.errors import AmpError, OptionError, first_line

from .command_line.bench import Target, bench, load
from .command_line.bench import table as bench_table
from .command_line.doctor import examine
from .command_line.doctor import table as doctor_table

_BENCH = "the model in float32, under autocast and under amp, eagerly and through Inductor"
_DOCTOR = "whether low precision pays here, versions, what the devices can do"
_TARGET = """PACKAGE.MODULE:FACTORY, or FILE.py:FACTORY, names a function without arguments that returns what to
run: (model, args) or (model, args, kwargs), where model is a module or any function, args a tuple, kwargs a dict."""
_INSIDE = ("<frozen", f"{torch.__path__[0]}{os.sep}", f"{Path(__file__).parent}{os.sep}")

Result = tuple[Any, Callable[[], str]]  # the value that `--json` prints, and the text printed without it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0, or 2 for an error of the user's."""
    arguments, unknown = _parser().parse_known_args(argv)
    if unknown:
        arguments.parser.error(f"found {' '.join(unknown)}; expected what the usage above lists")
    try:
        value, text = arguments.command(arguments)
    except AmpError as error:
        _say(f"error: {error}")
        return 2
    print(json.dumps(value, indent=1) if arguments.json else text())
    return 0


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m ampcompile", description="Mixed precision as a compiler pass.")
    parser.add_argument("--version", action="version", version=f"ampcompile {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON instead of tables")
    race = commands.add_parser(
        "bench",
        help=_BENCH,
        description=f"{_BENCH}\n\n{_TARGET}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    race.set_defaults(command=_bench, parser=race)
    race.add_argument("target", metavar="PACKAGE.MODULE:FACTORY", help="see above")
    race.add_argument("--dtype", help="the low-precision type, such as bf16 or fp16 (default: the device's)")
    race.add_argument("--policy", default="default", help="such as 'op softmax=low, module head=fp32'")
    race.add_argument("--forward-only", action="store_true", help="no gradients, though the model is in training mode")
    race.add_argument(
        "--seconds", type=float, default=10.0, help="how long to measure, compilation aside (default: 10)"
    )
    race.add_argument("--profile", action="store_true", help="where the time goes, and what would save some, too")
    health = commands.add_parser("doctor", help=_DOCTOR, description=_DOCTOR, parents=[common])
    health.set_defaults(command=_doctor, parser=health)
    health.add_argument("--all", action="store_true", help="what is patched in torch, too")
    return parser


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"policy": arguments.policy} | ({"dtype": arguments.dtype} if arguments.dtype else {})


def _load(arguments: argparse.Namespace) -> Target:
    """Load the target, after checking all other arguments."""
    Options.parse(_options(arguments))
    _say(f"loading {arguments.target}")
    try:
        return load(arguments.target)
    except AmpError:
        raise
    except Exception as error:  # the user's module or factory may raise any error
        raise OptionError(_of_user(error, arguments.target)) from error


def _of_user(error: Exception, target: str) -> str:
    """One line about an error of a module or factory: the error, the user's own source line, and the remedy."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename}:{frame.lineno}" for frame in frames if not frame.filename.startswith(_INSIDE)]
    # A file that doesn't parse has no frame, but a SyntaxError names its line itself.
    where = f" at {places[-1]}" if places and not isinstance(error, SyntaxError) else ""
    return (
        f"loading {target} raises {type(error).__name__}{where}: {first_line(error).rstrip('.')}. Expected a function "
        "that returns a model and its arguments; call it in Python to see the whole traceback."
    )


def _bench(arguments: argparse.Namespace) -> Result:
    if not (arguments.seconds > 0 and math.isfinite(arguments.seconds)):
        raise OptionError(f"found --seconds {arguments.seconds:g}; expected a time above 0, such as --seconds 10.")
    target = _load(arguments)
    how = _options(arguments), not arguments.forward_only, arguments.seconds, _say, arguments.profile
    results = target.call(lambda: bench(target, *how))
    return results.as_dict(), lambda: bench_table(results)


def _doctor(arguments: argparse.Namespace) -> Result:
    _say("multiplying matrices")
    findings = examine()
    return findings, lambda: doctor_table(findings, arguments.all)


if __name__ == "__main__":
    sys.exit(main())
