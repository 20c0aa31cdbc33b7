"""python docs/reference.py   writes docs/reference.md: each public name, its arguments, errors and examples.

All of it is read from the source, by its syntax: nothing is imported, and the page is the same with every torch.
"""

import ast
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference.md"
ERRORS = "ampcompile.errors"
BEGINNING = """\
<!-- written by python docs/reference.py, from docstrings -->

# Reference

```{index} ! api, ! reference
```

All public names, with their arguments, results, shapes, dtypes, errors and examples. The tests run the examples. Each
begins with

```python
import torch
from torch import nn

import ampcompile

model, x = nn.Linear(64, 4), torch.randn(8, 64)
compiled = torch.compile(model, backend="amp")
```

`torch.compile(model, backend="amp")` itself needs no import of ampcompile: torch finds the backend by its name.
[Options](options.md) are given as `options={...}`. A compiled model takes and returns what the model takes and returns;
[what is low in it leaves in float32](numerics.md#what-leaves-the-call). From a shell:
[`python -m ampcompile`](explain.md#command-line).
"""
ALL = "*"
"""Every public member."""


class Name(NamedTuple):
    """A name on the page: where it is defined, what users call it, and which of its members are shown."""

    module: str
    name: str
    shown: str = ""
    members: tuple[str, ...] = ()
    arguments: str = ""
    """Instead of those in the source."""


OF_OPTIMIZERS = 'params, *args, masters=None, states="float32", seed=0, **kwargs'
SECTIONS: dict[str, list[Name]] = {
    "Steering": [
        Name("ampcompile.policy", "Policy", members=("parse",)),
        Name("ampcompile.precision", "precision"),
        Name("ampcompile.precision", "keep_fp32"),
        Name("ampcompile.rules.table", "register_op"),
    ],
    "Compiling methods": [Name("ampcompile.compiler.methods", "compile_methods")],
    "Explaining": [
        Name("ampcompile.insight.ask", "explain"),
        Name("ampcompile.insight.report", "Report", members=(ALL,)),
        Name("ampcompile.records.graphs", "Record", members=(ALL,)),
        Name("ampcompile.records.graphs", "OpRecord", members=(ALL,)),
        Name("ampcompile.records.graphs", "CastRecord", members=(ALL,)),
        Name("ampcompile.records.graphs", "GraphRecord", members=(ALL,)),
        Name("ampcompile.records.graphs", "Total", members=(ALL,)),
    ],
    "Auditing and comparing": [
        Name("ampcompile.insight.ask", "audit"),
        Name("ampcompile.insight.audit", "Audit", members=(ALL,)),
        Name("ampcompile.records.graphs", "Numbers", members=(ALL,)),
        Name("ampcompile.insight.ask", "record"),
        Name("ampcompile.insight.recording", "Recording", members=(ALL,)),
        Name("ampcompile.insight.recording", "Returned", members=(ALL,)),
        Name("ampcompile.insight.compare", "compare"),
        Name("ampcompile.insight.compare", "Comparison", members=(ALL,)),
        Name("ampcompile.insight.compare", "Row", members=(ALL,)),
        Name("ampcompile.insight.compare", "Measure", members=(ALL,)),
    ],
    "Watching": [
        Name("ampcompile.insight.watch", "watch"),
        Name("ampcompile.insight.watch", "Watch", members=("report",)),
        Name("ampcompile.insight.watch", "WatchReport", members=(ALL,)),
        Name("ampcompile.insight.watch", "OutOfRange", members=(ALL,)),
        Name("ampcompile.passes.after.record_magnitudes", "WatchedValue", members=(ALL,)),
        Name("ampcompile.insight.watch", "Magnitude", members=(ALL,)),
    ],
    "Timing a step": [
        Name("ampcompile.timing.step_profile", "profile_step"),
        Name("ampcompile.timing.step_profile", "StepProfile", members=(ALL,)),
        Name("ampcompile.timing.step_profile", "Tried", members=(ALL,)),
        Name("ampcompile.timing.trace", "Trace", members=(ALL,)),
    ],
    "Optimizers": [
        Name("ampcompile.optim", "AdamW", "optim.AdamW", arguments=OF_OPTIMIZERS),
        Name("ampcompile.optim", "Adam", "optim.Adam", arguments=OF_OPTIMIZERS),
        Name("ampcompile.optim", "SGD", "optim.SGD", arguments=OF_OPTIMIZERS),
        Name("ampcompile.optim", "FusedOptimizer", "optim", ("clip_grad_norm_",), "..."),
        Name("ampcompile.optim.keep_masters", "keep_masters"),
        Name("ampcompile.optim.keep_masters", "KeptMasters", members=("remove",)),
    ],
    "Training in float16, and in one CUDA graph": [
        Name(
            "ampcompile.scaler.grad_scaler",
            "GradScaler",
            members=(
                "clip_grad_norm_",
                "clip_grad_value_",
                "step",
                "update",
                "step_skipped",
                "last_step_skipped",
                "load_state_dict",
            ),
        ),
        Name("ampcompile.scaler.captured_step", "capture_step"),
        Name("ampcompile.scaler.captured_step", "CapturedStep"),
    ],
    "Copies of weights": [
        Name("ampcompile.weights.store", "invalidate"),
        Name("ampcompile.weights.store", "free_copies"),
        Name("ampcompile.weights.store", "weight_stats"),
        Name("ampcompile.weights.store", "WeightStats", members=(ALL,)),
        Name("ampcompile.weights.release", "release_masters"),
        Name("ampcompile.weights.release", "ReleasedMasters", members=("restore",)),
    ],
    "FSDP2": [
        Name("ampcompile.sharding.decide", "shard_policy"),
        Name("ampcompile.sharding.decide", "ShardPolicy", members=("records", "bytes_saved")),
        Name("ampcompile.sharding.weight", "GatherRecord", members=(ALL,)),
    ],
    "Exporting": [Name("ampcompile.compiler.export", "export")],
    "Inside Accelerate": [
        Name("ampcompile.integrations.accelerate", "AmpPlugin", "integrations.accelerate.AmpPlugin", (), "**fields")
    ],
}
FROM_USER = {"Policy", "precision", "GradScaler"}
"""Classes that users make; the others are results."""


@cache
def tree(module: str) -> ast.Module:
    """A module's syntax."""
    parts = module.split(".")[1:]
    base = ROOT if parts[0] in ("passes", "kernels") else ROOT / "ampcompile"
    path = base.joinpath(*parts)
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def definition(module: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    """Where a function or class is defined."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return next(node for node in tree(module).body if isinstance(node, kinds) and node.name == name)


@cache
def errors() -> list[str]:
    """The names of all errors."""
    return [node.name for node in tree(ERRORS).body if isinstance(node, ast.ClassDef)]


def entry(found: Name) -> str:
    """A function, class or constant, with its members."""
    shown = f"ampcompile.{found.shown or found.name}"
    if found.name == "keep_fp32":
        return f"### `{shown}`\n\n`precision(torch.float32)`: see [`ampcompile.precision`](#ampcompileprecision)."
    node = definition(found.module, found.name)
    parts = [f"### `{shown if is_public(found) else found.name}`"]
    members = {member: part for member, part in members_of(node) if ALL in found.members or member in found.members}
    if isinstance(node, ast.ClassDef):
        if found.arguments != "...":
            if found.arguments or found.name in FROM_USER:
                inside = split(found.arguments) if found.arguments else arguments_of_class(node)
                parts.append(code(call_of(shown, inside), "py"))
            else:
                parts.append("A result: nothing that you make.")
            parts.append(document(ast.get_docstring(node) or ""))
        else:
            parts.append("Of all three optimizers:")
    else:
        parts += [code(signature(shown, node), "py"), table_of(node), document(ast.get_docstring(node) or "")]
    fields = [wrapped(part) for part in members.values() if not part.startswith("####")]
    parts += ["\n".join(fields), *(part for part in members.values() if part.startswith("####"))]
    return "\n\n".join(filter(None, parts))


def is_public(found: Name) -> bool:
    """True for what users import: functions, what they make themselves, and optimizers."""
    return found.name in FROM_USER or found.name[0].islower() or bool(found.arguments)


def arguments_of_class(node: ast.ClassDef) -> list[str]:
    """The arguments that make one."""
    return arguments_in(next(f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"))


def arguments_in(node: ast.FunctionDef) -> list[str]:
    """Arguments as they are written, without `self` or `cls`."""
    return [each for each in split(ast.unparse(node.args)) if each not in ("self", "cls")]


def split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found if part.strip()]


def signature(name: str, node: ast.FunctionDef) -> str:
    """A function's call with types."""
    return call_of(name, arguments_in(node), f" -> {ast.unparse(node.returns)}" if node.returns else "")


def call_of(name: str, inside: list[str], result: str = "") -> str:
    """A call, over several lines where it is long."""
    line = f"{name}({', '.join(inside)}){result}"
    return line if len(line) <= 110 else f"{name}(\n" + "".join(f"    {each},\n" for each in inside) + f"){result}"


def table_of(node: ast.FunctionDef) -> str:
    """Arguments with types and defaults."""
    rows = []
    for each in arguments_in(node):
        if each not in ("*", "/"):
            head, _, default = each.partition(" = ") if " = " in each else each.partition("=")
            name, _, type_ = head.partition(":")
            rows.append([f"`{name.strip()}`", f"`{type_.strip()}`" if type_ else "", f"`{default}`" if default else ""])
    lines = ["| argument | type | default |", "|---|---|---|"]
    return (
        "\n".join([*lines, *("| " + " | ".join(escaped(cell) for cell in row) + " |" for row in rows)]) if rows else ""
    )


def escaped(cell: str) -> str:
    """Text for a cell of a table."""
    return cell.replace("|", "\\|")


def members_of(node: ast.FunctionDef | ast.ClassDef) -> list[tuple[str, str]]:
    """Public members of a class: a field or property as a line, a method as a heading of its own."""
    found = []
    body = node.body if isinstance(node, ast.ClassDef) else []
    for each, following in zip(body, [*body[1:], None], strict=False):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id[0] != "_":
            said = following.value.value if isinstance(following, ast.Expr) and is_text(following.value) else ""
            words = f": {line(said)}" if said else ""
            found.append((each.target.id, f"`{each.target.id}`, `{ast.unparse(each.annotation)}`{words}"))
        elif isinstance(each, ast.FunctionDef) and each.name[0] != "_":
            decorators = {ast.unparse(decorator) for decorator in each.decorator_list}
            said = ast.get_docstring(each) or ""
            if decorators & {"property", "cached_property", "functools.cached_property"}:
                type_ = f", `{ast.unparse(each.returns)}`" if each.returns else ""
                found.append((each.name, f"`{each.name}`{type_}: {line(said)}"))
            else:
                parts = [
                    f"#### `{node.name}.{each.name}`",
                    code(signature(f"{node.name}.{each.name}", each), "py"),
                    document(said),
                ]
                found.append((each.name, "\n\n".join(filter(None, parts))))
    return found


def is_text(value: ast.expr) -> bool:
    """True for a string."""
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def wrapped(text: str) -> str:
    """An item of a list, in lines of at most 120 characters."""
    return textwrap.fill(f"- {text}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def line(text: str) -> str:
    """A docstring in one line."""
    return " ".join(text.split())


def code(text: str, language: str) -> str:
    """A block of code."""
    return f"```{language}\n{text}\n```"


def document(text: str) -> str:
    """A docstring as Markdown: examples as blocks, and the errors that it names as links."""
    parts = []
    for part in re.split(r"\n\s*\n", text):
        if part.lstrip().startswith(">>>"):
            parts.append(code(textwrap.dedent(part), "pycon"))
        else:
            before, mark, example = part.partition("\n>>>")
            parts += [before, *([code(f">>>{example}", "pycon")] if mark else [])]
    named = [name for name in errors() if re.search(rf"\b{name}\b", re.sub(r"(?m)^\s*(>>>|\.\.\.).*", "", text))]
    links = ", ".join(f"[`{name}`](#{name.lower()})" for name in named)
    return "\n\n".join([*parts, *([f"Errors: {links}."] if links else [])])


def error(name: str) -> str:
    """An error with its base classes."""
    node = definition(ERRORS, name)
    assert isinstance(node, ast.ClassDef)
    bases = ", ".join(f"`{ast.unparse(base)}`" for base in node.bases)
    text = document(ast.get_docstring(node) or "")
    return (
        f"### `{name}`\n\n{'An' if bases[1] in 'AEIO' else 'A'} {bases}.\n\n{re.sub(r'Errors: .*$', '', text).rstrip()}"
    )


def write() -> str:
    """The page."""
    parts = [BEGINNING.rstrip()]
    for section, names in SECTIONS.items():
        parts += [f"## {section}", *map(entry, names)]
    words = "All are in `ampcompile` itself. Their messages say what was found, what was expected, and what to do."
    parts += ["## Errors", words, *map(error, errors())]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(write())
    print(PAGE)
