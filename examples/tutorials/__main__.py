"""python -m examples.tutorials [name ...] [--write]   runs tutorials, and checks what they assert.

A tutorial is a script in the percent format: `# %% [markdown]` begins text, `# %%` code. Each runs in a process of its
own. With --write what it prints and plots is kept: as a page and a notebook in docs/tutorials/.
"""

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from benchmarks.machine import about

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PAGES = ROOT / "docs" / "tutorials"
NAMES = ("from_float32_to_amp", "fp8", "hunting_a_nan", "where_are_my_casts")

FOUND_BY = "```{index} ! tutorial, ! tutorials, ! notebook, ! notebooks\n```"
"""What the site's search finds the first of them by."""


class Cell(NamedTuple):
    """Text or code of a tutorial."""

    kind: str
    """"markdown" or "code"."""
    text: str


class Output(NamedTuple):
    """What a cell printed and plotted."""

    printed: str
    pictures: list[str]
    """SVG."""


def cells(name: str) -> list[Cell]:
    """The cells of a tutorial."""
    found = []
    for part in re.split(r"(?m)^# %%", (FOLDER / f"{name}.py").read_text())[1:]:
        head, _, body = part.partition("\n")
        is_text = head.strip() == "[markdown]"
        text = re.sub(r"(?m)^# ?", "", body) if is_text else body
        found.append(Cell("markdown" if is_text else "code", text.strip()))
    return found


def execute(name: str) -> list[Output]:
    """Run a tutorial; what each cell printed and plotted."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.hashsalt": name, "svg.fonttype": "none"})
    from matplotlib import pyplot

    outputs, names = [], {"__name__": name}
    for index, cell in enumerate(cells(name)):
        printed, pictures = io.StringIO(), []
        if cell.kind == "code":
            with contextlib.redirect_stdout(printed):
                exec(compile(padded(name, index, cell), str(FOLDER / f"{name}.py"), "exec"), names)
            for number in pyplot.get_fignums():
                picture = io.StringIO()
                pyplot.figure(number).savefig(picture, format="svg", metadata={"Date": None})
                pictures.append(re.sub(r"(?m) +$", "", picture.getvalue()))
            pyplot.close("all")
        outputs.append(Output(printed.getvalue().replace(f"{ROOT}/", ""), pictures))
    return outputs


def padded(name: str, index: int, cell: Cell) -> str:
    """A cell's code on the lines that it has in its file, which errors and reports name."""
    before = "# %%".join(re.split(r"(?m)^# %%", (FOLDER / f"{name}.py").read_text())[: index + 1])
    return "\n" * (before.count("\n") + 1) + cell.text


def machine() -> str:
    """The machine in words."""
    here = about("cpu")
    units = ", ".join(here["low-precision instructions"]) or "no 16-bit units"
    return f"{here['processor']}, {here['cores']} cores, {units}; torch {here['packages']['torch']}"


def page(name: str, outputs: list[Output]) -> str:
    """A tutorial as Markdown, with what it printed and plotted."""
    parts = [FOUND_BY] if name == NAMES[0] else []
    for index, (cell, output) in enumerate(zip(cells(name), outputs, strict=True)):
        parts.append(cell.text if cell.kind == "markdown" else f"```python\n{cell.text}\n```")
        if output.printed:
            parts.append(f"```text\n{output.printed.rstrip()}\n```")
        parts += [f"![What the code above draws](pictures/{file})" for file in files_of(name, index, output)]
        if index == 0:
            parts.append(
                f"Output of a run on: {machine()}.\n[As a notebook]({name}.ipynb), to run in a checkout's root."
            )
    return "\n\n".join(["<!-- written by python -m examples.tutorials --write -->", *parts]) + "\n"


def files_of(name: str, index: int, output: Output) -> list[str]:
    """The names of a cell's pictures."""
    return [f"{name}_{index}_{number}.svg" for number in range(len(output.pictures))]


def notebook(name: str, outputs: list[Output]) -> str:
    """A tutorial as a notebook of Jupyter, with its output."""
    found: list[dict[str, Any]] = []
    for index, (cell, output) in enumerate(zip(cells(name), outputs, strict=True)):
        entry: dict[str, Any] = {
            "cell_type": cell.kind,
            "id": f"cell-{index}",
            "metadata": {},
            "source": cell.text.splitlines(keepends=True),
        }
        if cell.kind == "code":
            shown: list[dict[str, Any]] = []
            if output.printed:
                text = output.printed.splitlines(keepends=True)
                shown.append({"output_type": "stream", "name": "stdout", "text": text})
            shown += [
                {"output_type": "display_data", "metadata": {}, "data": {"image/svg+xml": picture.splitlines(True)}}
                for picture in output.pictures
            ]
            entry |= {"execution_count": None, "outputs": shown}
        found.append(entry)
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": found, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def write(name: str, outputs: list[Output]) -> None:
    """Keep a tutorial's output as a page, pictures and a notebook."""
    pictures = PAGES / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    for old in pictures.glob(f"{name}_*.svg"):
        old.unlink()
    for index, output in enumerate(outputs):
        for file, picture in zip(files_of(name, index, output), output.pictures, strict=True):
            (pictures / file).write_text(picture)
    (PAGES / f"{name}.md").write_text(page(name, outputs))
    (PAGES / f"{name}.ipynb").write_text(notebook(name, outputs))


def main() -> int:
    """Run one tutorial here, or each of several in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m examples.tutorials")
    parser.add_argument("names", nargs="*", choices=[*NAMES, []])
    parser.add_argument("--write", action="store_true", help="keep the output in docs/tutorials/")
    given = parser.parse_args()
    if len(given.names) == 1:
        os.chdir(ROOT)
        torch.set_num_threads(min(2, torch.get_num_threads()))
        outputs = execute(given.names[0])
        if given.write:
            write(given.names[0], outputs)
        return 0
    # What is kept has times in it: those of a machine that does nothing else.
    options, environ, together = (["--write"], {}, 1) if given.write else ([], {"OMP_NUM_THREADS": "1"}, 2)

    def fails(name: str) -> bool:
        start = perf_counter()
        command = [sys.executable, "-m", "examples.tutorials", name, *options]
        ended = subprocess.run(command, cwd=ROOT, env=os.environ | environ, check=False).returncode
        print(f"{name}: {'failed' if ended else 'as it says'}, {perf_counter() - start:.0f} s", flush=True)
        return ended != 0

    with ThreadPoolExecutor(together) as pool:
        return int(any([*pool.map(fails, given.names or NAMES)]))


if __name__ == "__main__":
    sys.exit(main())
