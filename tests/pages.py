"""The code blocks of pages, run as a reader runs them: those of a page one after the other, in the current folder."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from tests.test_layout import ROOT

FENCED = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    language: str
    code: str


def blocks(page: str, section: str = "") -> list[Block]:
    """The blocks of a page, which is named by its path in the repository, or of what stands under one `## section`."""
    text = (ROOT / page).read_text()
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = FENCED.findall(text)
    return [Block(language, re.sub(f"(?m)^{indent}", "", code)) for indent, language, code in found]


def run(page: str, section: str = "", /, **names: Any) -> dict[str, Any]:
    """What is defined after all of the Python of a page, or of one section, with `names` defined before it.

    A block that begins with `# name.py` is written to that file, and runs as it.
    """
    sys.modules["page"] = module = ModuleType("page")  # torch 2.11's Dynamo imports it, for what functions read
    vars(module).update(names)
    names = vars(module)
    for number, code in enumerate(block.code for block in blocks(page, section) if block.language == "python"):
        if not torch.cuda.is_available():
            code = code.replace("GradScaler()", 'GradScaler("cpu")')  # its default is CUDA
        file = re.match(r"# (\w+\.py)\n", code)
        if file:
            Path(file[1]).write_text(code)
        exec(compile(code, file[1] if file else f"{page}, block {number}", "exec"), names)
    return names
