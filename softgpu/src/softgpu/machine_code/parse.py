"""The text of `nvdisasm`, as a `Program` of the same machine as PTX."""

import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import triton

from softgpu.floats import Array, u4
from softgpu.machine_code.operation import Operation
from softgpu.memory import EmulatorError
from softgpu.program import Instruction, Program
from softgpu.ptx.operation import parts
from softgpu.ptx.parse import Kernel
from softgpu.threads import Run

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PARAMETERS = 0x210
"""Where a kernel's parameters begin in the bank of constants"""
OTHERS = {0x28: 0, 0x208: 0, 0x20C: 0}
"""The top of a stack, and what describes global memory"""
REGISTERS = {"R": (0, 255), "UR": (255, 63), "P": (318, 7), "UP": (325, 7), "L": (332, 32)}
"""Each kind's first number here, and how many there are beside the one that is constant; L: words of the stack"""
BYTES = 16  # of an instruction
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?)(U?P[0-9T]) +)?(.+?) *;")


class Code(Program):
    """A kernel's machine code, of its text; `kernel`: its PTX, which says how it is called."""

    def __init__(self, text: str, kernel: Kernel) -> None:
        super().__init__()
        self.name, self.threads, self.params = kernel.name, kernel.threads, kernel.params
        self.param_bytes, self.constants, self.specials = kernel.param_bytes, kernel.constants, {}
        self.shared_size = kernel.shared_size
        self.widths = [4] * 318 + [0] * 14 + [4] * 32
        self.at: dict[int, int] = {}
        first = None
        for number, line in enumerate(text.split("\n"), 1):
            if found := LINE.search(line):
                address = int(found[1], 16)
                first = address if first is None else first
                self.labels[f"{address:#x}"] = self.at[address - first] = len(self.instructions)
                self.instruction(found[4], number, found[3], bool(found[2]))
        self.split()

    def instruction(self, text: str, line: int, guard: str | None, negated: bool) -> None:
        ins = Instruction(text, line)
        if guard and not guard.endswith("T"):
            ins.guard = self.register(guard), negated
        name, *rest = text.split(None, 1)
        try:
            Operation(self, ins, name, parts(rest[0].replace(".reuse", "") if rest else "")).build()
        except (KeyError, IndexError, ValueError, EmulatorError) as error:
            raise EmulatorError(f"{self.name}, machine code line {line}: {text}: {error}") from error
        self.instructions.append(ins)

    def register(self, text: str) -> int:
        """A register's number; the constant ones have none."""
        found = re.fullmatch(r"(UR|R|UP|P|L)(\d+)", text)
        if found is None or int(found[2]) >= REGISTERS[found[1]][1]:
            raise EmulatorError(f"no register {text} is known")
        return REGISTERS[found[1]][0] + int(found[2])

    def special(self, name: str) -> int:
        """A register that holds one of the machine's own numbers, or a constant of the launch."""
        if name not in self.specials:
            self.specials[name] = len(self.widths)
            self.widths.append(4)
        return self.specials[name]

    def block_at(self, address: int) -> int:
        """The block to which a function returns."""
        return self.numbers[self.at[address]]

    @staticmethod
    def special_value(run: Run, name: str) -> Array:
        if found := re.fullmatch(r"c\[0x0\]\[0x([0-9a-f]+)\]", name):
            at = int(found[1], 16)
            if at >= PARAMETERS:
                return run.param[at - PARAMETERS : at - PARAMETERS + 4].view(u4)[0]
            return np.asarray(run.launch.grid[0] if at == 0xC else OTHERS[at])
        lane = run.thread % 32
        known: dict[str, Any] = {
            "SR_TID.X": run.thread,
            "SR_CTAID.X": run.ids["x"],
            "SR_CTAID.Y": run.ids["y"],
            "SR_LANEID": lane,
            "SR_LTMASK": (1 << lane) - 1,
            "SR_CgaCtaId": 0,
        }
        if name not in known:
            raise EmulatorError(f"no special register {name} is known")
        return np.asarray(known[name])


def disassembled(kernels: Sequence[Kernel]) -> list[str]:
    """Machine code of each as text, in which the first address is any, and jumps go to addresses.

    All are of one generation. `nvdisasm` takes longer to start than to write hundreds of kernels.
    """
    (target,) = {target_of(kernel) for kernel in kernels}
    codes = [code_in(kernel.binary, kernel.name) for kernel in kernels]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        command = [str(BIN / "nvdisasm"), "-ndf", "-b", f"SM{target}", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line for line in text.split("\n") if LINE.search(line)]
    if len(lines) != sum(map(len, codes)) // BYTES:
        raise EmulatorError(f"nvdisasm wrote {len(lines)} instructions of {sum(map(len, codes))} bytes")
    ends = list(accumulate(len(code) // BYTES for code in codes))
    return ["\n".join(lines[start:end]) for start, end in pairwise([0, *ends])]


def target_of(kernel: Kernel) -> str:
    """The GPU that a kernel is compiled for: 90a."""
    found = re.search(r"^\.target\s+sm_(\w+)", kernel.text, re.MULTILINE)
    if found is None:
        raise EmulatorError(f"{kernel.name}: its PTX names no target")
    return found[1]


def code_in(binary: bytes, name: str) -> bytes:
    """The instructions of a kernel in an ELF file, which has to be linked."""
    (table,) = struct.unpack_from("<Q", binary, 40)
    size, count, names = struct.unpack_from("<HHH", binary, 58)
    found = {}
    sections = [struct.unpack_from("<IIQQQQ", binary, table + i * size) for i in range(count)]
    for at, _, _, _, start, length in sections:
        at += sections[names][4]
        found[binary[at : binary.index(0, at)].decode()] = binary[start : start + length]
    if any(found.get(f".{kind}.text.{name}") for kind in ("rel", "rela")):
        raise EmulatorError(f"{name}: its machine code is still to be linked")
    return found[f".text.{name}"]
