"""The code blocks of pages, run as a reader runs them: those of a page one after the other, in the current folder."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.test_layout import ROOT

FENCE = re.compile(r"^( *)(?:<!-- not run: (.+?) -->\n+ *)?```(\S*)[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
"""A block, and the mark above it that says why it isn't run."""
STAND_INS = {'"cuda"': '"cpu"', "GradScaler()": 'GradScaler("cpu")'}
"""What a machine without a CUDA device runs."""


class Block(NamedTuple):
    language: str
    code: str
    not_run: str


def blocks(page: str) -> list[Block]:
    """The blocks of a page, which is named by its path in the repository."""
    found = FENCE.findall((ROOT / page).read_text())
    return [Block(language, re.sub(f"(?m)^{indent}", "", code), why) for indent, why, language, code in found]


def run(page: str, **names: Any) -> dict[str, Any]:
    """What is defined after all of a page's Python, with `names` defined before it.

    A block that begins with `# name.py` is written to that file, and runs as it.
    """
    names["__name__"] = "page"
    for number, code in enumerate(b.code for b in blocks(page) if b.language == "python" and not b.not_run):
        for device, stand_in in STAND_INS.items() if not torch.cuda.is_available() else ():
            code = code.replace(device, stand_in)
        file = re.match(r"# (\w+\.py)\n", code)
        if file:
            Path(file[1]).write_text(code)
        exec(compile(code, file[1] if file else f"{page}, block {number}", "exec"), names)
    return names
