"""A pattern of PTX that NVIDIA's assembler compiles wrongly: ptxas 12.8.93, which Triton 3.6 and 3.7.1 bring.

Two 8-bit conversions are packed by one `mov.b32 {a, b}`, and one of them is read behind a branch, too. From -O1 on the
assembler makes one instruction of the pair, and behind the branch reads what only the other way there wrote: numbers
are lost. The PTX is right, and so is its emulation; tests/emulated/lost.ptx is a short example.
"""

import re
from typing import Any

JUMP = re.compile(r"(?:@!?%\w+\s+)?(?:bra|ret|exit)\b")
CONVERSION = re.compile(r"cvt\.\S*(?:e4m3x2|e5m2x2)\.f32\s+(%\w+)")
WRITTEN = re.compile(r"(?<!%)\b(?!st\b|red\b|bra\b)[a-z]\w*(\.[\w:]+)*\s+(\{[^}]*\}|[%\w]+(\|[%\w]+)?)\s*,")
"""An instruction's name and what it writes"""
PACKED = re.compile(r"mov\.b32\s+%\w+,\s*\{\s*(%\w+)\s*,\s*(%\w+)\s*\}")


class LosesNumbers(AssertionError):
    """The assembler may lose numbers of a kernel."""


def risks(ptx: str) -> list[str]:
    """Conversions at risk, with their lines."""
    targets = set(re.findall(r"\bbra(?:\.uni)?\s+([\w$]+)", ptx))
    made: list[tuple[str, int, str]] = []  # register, basic block, text
    packed: set[tuple[str, int]] = set()
    read: dict[str, set[int]] = {}
    block = 0
    for number, raw in enumerate(ptx.splitlines(), 1):
        line = raw.split("//")[0].strip()
        if line.endswith(":"):
            block += line[:-1] in targets
            continue
        if line.startswith(".") or not line:
            continue
        if found := CONVERSION.search(line):
            made.append((found[1], block, f"line {number}: {line}"))
        registers = re.findall(r"%\w+", WRITTEN.sub("", line))
        if found := PACKED.search(line):
            packed |= {(found[1], block), (found[2], block)}
        for register in registers:
            read.setdefault(register, set()).add(block)
        block += bool(JUMP.match(line))
    behind = {register for register, at, _ in made if read.get(register, set()) - {at}}
    return [text for register, at, text in made if register in behind and (register, at) in packed]


def check(ptx: str) -> None:
    if found := risks(ptx):
        name = re.search(r"\.entry\s+([\w$]+)", ptx)
        raise LosesNumbers(
            f"{name[1] if name else 'a kernel'}: found 8-bit numbers that are packed in one branch and read behind it, "
            f"which ptxas loses. Write them to memory in the branch, and read them there. {'; '.join(found)}"
        )


def watch() -> None:
    """Check all PTX that Triton hands to the assembler in this process."""
    from triton.backends.nvidia.compiler import CUDABackend

    make = CUDABackend.make_cubin

    def checked(self: Any, src: str, *arguments: Any) -> Any:
        check(src)
        return make(self, src, *arguments)

    if make.__name__ != "checked":
        CUDABackend.make_cubin = checked
