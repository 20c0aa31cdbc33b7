"""The command line: arguments and output. Results go to stdout, progress and errors to stderr."""

import argparse
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ampcompile.config import Options
from ampcompile.errors import AmpError, CommandLineError, first_line
from ampcompile.insight.ask import audit, explain
from ampcompile.records.graphs import plain

from .bench import bench
from .bench import table as bench_table
from .doctor import examine
from .doctor import table as doctor_table
from .target import Target, load

_TARGET = """PACKAGE.MODULE:FACTORY, or FILE.py:FACTORY, names a function without arguments that returns what to
run: (model, args) or (model, args, kwargs), where model is a module or any function, args a tuple, kwargs a dict."""
_INSIDE = ("<frozen", f"{torch.__path__[0]}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")

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
    parser.add_argument("--version", action="version", version=f"ampcompile {version('ampcompile')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON instead of tables")
    target = argparse.ArgumentParser(add_help=False, parents=[common])
    target.add_argument("target", metavar="PACKAGE.MODULE:FACTORY", help="see above")
    target.add_argument("--dtype", help="the low-precision type, such as bf16 or fp16 (default: the device's)")
    target.add_argument("--policy", default="default", help="such as 'op softmax=low, module head=fp32'")

    def add(name: str, command: Any, words: str, parent: argparse.ArgumentParser) -> argparse.ArgumentParser:
        about = f"{words}\n\n{_TARGET}" if parent is target else words
        form = argparse.RawDescriptionHelpFormatter
        added = commands.add_parser(name, help=words, description=about, formatter_class=form, parents=[parent])
        added.set_defaults(command=command, parser=added)
        return added

    page = add("explain", _explain, "every cast and op of one call, with its reason", target)
    page.add_argument("--html", metavar="FILE", help="write the report as a page, too")
    numbers = add("audit", _audit, "how wrong one call and its gradients are, and where", target)
    numbers.add_argument("--against", choices=("float64", "float32"), default="float64", help="what is exact")
    numbers.add_argument("--forward-only", action="store_true", help="no gradients")
    numbers.add_argument(
        "--loss-scale", type=float, default=1.0, metavar="SCALE", help="multiply the loss, as a GradScaler does (65536)"
    )
    numbers.add_argument("--suggest", type=float, metavar="TOLERANCE", help="find what to keep in float32")
    race = add(
        "bench", _bench, "the model in float32, under autocast and under amp, eagerly and through Inductor", target
    )
    race.add_argument("--forward-only", action="store_true", help="no gradients, though the model is in training mode")
    race.add_argument(
        "--seconds", type=float, default=10.0, help="how long to measure, compilation aside (default: 10)"
    )
    race.add_argument("--profile", action="store_true", help="where the time goes, and what would save some, too")
    health = add("doctor", _doctor, "whether low precision pays here, versions, what the devices can do", common)
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
        raise CommandLineError(_of_user(error, arguments.target)) from error


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


def _positive(value: float, option: str, what: str) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise CommandLineError(f"found {option} {value:g}; expected {what} above 0, such as {option} 1e-2.")


def _explain(arguments: argparse.Namespace) -> Result:
    if arguments.html and (Path(arguments.html).is_dir() or not Path(arguments.html).parent.is_dir()):
        raise CommandLineError(
            f"can't write {arguments.html}; expected a file in a folder that exists. Make the folder."
        )
    target = _load(arguments)
    _say("explaining")
    report = target.run(explain, **_options(arguments))
    if arguments.html:
        report.save(arguments.html)
        _say(f"wrote {arguments.html}")
    return {
        "graphs": [{"precision": graph.precision, "break": graph.reason} for graph in report.graphs],
        "casts": [plain(cast) for cast in report.casts],
        "ops": [plain(op) for op in report.ops],
        "unknown_ops": report.unknown_ops,
        "totals": [plain(total) for total in report.totals],
    }, lambda: str(report)


def _audit(arguments: argparse.Namespace) -> Result:
    if arguments.suggest is not None:
        _positive(arguments.suggest, "--suggest", "a relative error")
    _positive(arguments.loss_scale, "--loss-scale", "a factor")
    target = _load(arguments)
    _say("auditing")
    settings = {"against": arguments.against, "backward": not arguments.forward_only, **_options(arguments)}
    result = target.run(audit, loss_scale=arguments.loss_scale, **settings)
    if arguments.loss_scale == 1 and result.gradients and any(op.dtype is torch.float16 for op in result.ops):
        _say("gradients are those of a loss that isn't scaled: if a GradScaler scales yours, give --loss-scale 65536")
    if arguments.suggest is None:
        return result.as_dict(), lambda: str(result)
    policy = result.suggest(arguments.suggest, progress=lambda words: _say(f"searching: {words}"))
    error = target.run(audit, loss_scale=arguments.loss_scale, **settings | {"policy": policy}).error
    line = f"error {error:.2g}, at most {arguments.suggest:.2g}, with the policy\n{policy}"
    return {**result.as_dict(), "suggested": str(policy), "suggested_error": error}, lambda: f"{result}\n\n{line}"


def _bench(arguments: argparse.Namespace) -> Result:
    _positive(arguments.seconds, "--seconds", "a time")
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
