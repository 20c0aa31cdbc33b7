"""python -m tests.rooms_page   writes docs/rooms.md: the data flow and the rooms, from the pipeline and the imports."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter

from tests.test_layout import ROOT, SOURCES, imports, room

PAGE = ROOT / "docs" / "rooms.md"
PIPELINE = "ampcompile.passes.pipeline"
PHASES = {
    "pipeline": "Decide, then act, before differentiation",
    "fusion": "Fuse",
    "after": "On the joint graph of forward and backward",
    "replay": "On a graph that autograd itself differentiates",
}


def passes(phase: str) -> list[str]:
    """The modules of a phase's passes, in order, each once: of the classes that its function in the pipeline makes."""
    tree = ast.parse(SOURCES[PIPELINE].read_text())
    homes = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ampcompile.passes.")
        for alias in node.names
    }
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == phase)
    made = [node for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    made.sort(key=lambda call: (call.lineno, call.col_offset))
    found = [homes[call.func.id] for call in made if homes.get(call.func.id, "").count(".") == 3]
    return list(dict.fromkeys(module for module in found if not module.endswith("matching")))


def summary(module: str) -> str:
    """The first sentence of a file's docstring."""
    text = ast.get_docstring(ast.parse(SOURCES[module].read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def flow() -> list[str]:
    """A graph's way through the passes, drawn in characters."""
    down = {name: title for name, title in PHASES.items() if name != "replay"}
    steps = ["torch.compile: Dynamo's graph", "Capture: pre-dispatch ATen", *down.values()]
    steps.insert(steps.index(PHASES["after"]), "AOTAutograd: forward and backward")
    lines = [line for step in steps for line in (step, "  ↓")]
    lines[lines.index(PHASES["pipeline"]) + 1] += f"   ↘ {PHASES['replay']}"
    lines += ["Inductor, or eager kernels: the code that runs"]
    return [*lines, "  ↑", "weights/: copies, up to date at each call", "  ↑", "scaler/: the fused step"]


def rooms() -> list[str]:
    """Rows of a table: each room, above those it imports, and these, but for what is reached through another one."""
    edges: dict[str, set[str]] = {}
    for module in SOURCES:
        name = room(module)[1]
        edges.setdefault(name, set()).update(room(o)[1] for o in imports(module) & SOURCES.keys() if room(o)[1] != name)
    order = list(TopologicalSorter({name: sorted(edges[name]) for name in sorted(edges)}).static_order())
    reached: dict[str, set[str]] = {}
    for name in order:
        reached[name] = edges[name].union(*(reached[other] for other in edges[name]))
    rows = []
    for name in reversed(order):
        through = set().union(*(reached[other] for other in edges[name]))
        rows.append(f"| `{name}` | {', '.join(f'`{other}`' for other in sorted(edges[name] - through)) or 'none'} |")
    return rows


def page() -> str:
    """The whole page."""
    blocks = [
        "# Source layout: passes and rooms",
        "Written by `make rooms` from the pipeline, the imports and the docstrings; a test compares it.",
    ]
    blocks += ["## How a graph flows", "\n".join(["```", *flow(), "```"])]
    for phase, title in PHASES.items():
        rows = [f"| `{module.rpartition('.')[2]}` | {summary(module)} |" for module in passes(phase)]
        blocks += [f"### {title}", "\n".join(["| pass | does |", "|---|---|", *rows])]
    told = [
        f"| `{module.removeprefix('ampcompile.')}` | {summary(module)} |"
        for module, path in SOURCES.items()
        if path.name == "__init__.py" and module != "ampcompile"
    ]
    blocks += ["## What each room is for", "\n".join(["| room | is for |", "|---|---|", *told])]
    blocks += ["## Which room imports which", "A room may also import what those beside it import."]
    blocks += ["\n".join(["| room | imports |", "|---|---|", *rooms()])]
    return "\n\n".join(blocks) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
