"""The text of a kernel, as a `Program`: declarations, statements, labels, lines of Triton's source."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from softgpu.floats import Array, u4, u8
from softgpu.memory import EmulatorError
from softgpu.program import UNSIGNED, Instruction, Program
from softgpu.ptx.operation import TYPES, Operation, parts, size_of
from softgpu.threads import Run

STATEMENT = re.compile(r"\s*(?:([\w$%.]+):(?!:)|(\{)|(\})|([^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)")
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)(?:\s+\.ptr[^,\[]*?)?\s+([A-Za-z_$][\w$]*)(\[\d+\])?")
VARIABLE = re.compile(
    r"\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$.]+)\s*(?:\[(\d*)\])?\s*(?:=\s*\{([^}]*)\})?;"
)
SPECIAL = re.compile(
    r"%(n?tid|n?ctaid)\.[xyz]|%(laneid|warpid|nwarpid|n?clusterid\.[xyz]|cluster_n?cta(id\.[xyz]|rank))"
)
NUMBER = re.compile(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|-?0[xX][0-9a-fA-F]+U?|-?\d+U?")
IGNORED = (".pragma", ".param", ".loc", ".callprototype", ".section")


class Kernel(Program):
    """A kernel in PTX; `binary`: its machine code, if Triton loaded it."""

    binary = b""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.specials = text, {}
        self.symbols: dict[str, int] = {}
        self.scopes: list[dict[str, int]] = [{}]
        entry = re.search(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{", text)
        if entry is None:
            raise EmulatorError("found no kernel in the text: expected `.entry name(...)`")
        self.name = entry[1]
        for kind, name, count in PARAMETER.findall(entry[2]):
            size = int(count[1:-1]) if count else size_of(kind)
            unit = 64 if count else size
            self.symbols[name] = -(-self.param_bytes // unit) * unit
            self.params.append((name, self.symbols[name], size))
            self.param_bytes = self.symbols[name] + size
        threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", entry[3])
        self.threads = int(threads[1]) if threads else 128
        self.variables(text[: entry.start()])
        body = text[entry.end() :].split("// -- End function")[0]
        self.variables(body)
        files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text))
        for statement, line, source in self.statements(body, text.count("\n", 0, entry.end()) + 1, files):
            self.statement(statement, line, source)
        self.split()

    def variables(self, text: str) -> None:
        """Declare arrays; those of global memory are filled, and get their address."""
        for space, _, kind, name, count, content in VARIABLE.findall(text):
            size = int(count or (1 if space != "shared" else 0)) * size_of(kind)
            if space in ("shared", "local"):
                before = self.shared_size if space == "shared" else self.local_size
                self.symbols[name] = -(-before // 16) * 16
                setattr(self, f"{space}_size", self.symbols[name] + size)
            else:
                data = np.zeros(int(count or 1), TYPES[kind])
                values = [int(each, 0) for each in content.split(",") if each.strip()]
                data[: len(values)] = np.array(values, np.int64).astype(data.dtype)
                self.constants.append(data)
                self.symbols[name] = data.ctypes.data

    def statements(self, body: str, first: int, files: dict[str, str]) -> Iterator[tuple[str, int, Any]]:
        """Each statement, the line on which it ends, and its place in Triton's source; labels and scopes are noted."""
        source, depth, rest = None, 0, ""
        for number, raw in enumerate(body.split("\n"), first):
            if found := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", raw):
                source = (files.get(found[1], found[1]), int(found[2]))
                continue
            line, at = f"{rest} {raw.split('//')[0]}", 0
            rest = ""
            while line[at:].strip():
                found = STATEMENT.match(line, at)
                if found is None:
                    rest = line[at:]
                    break
                at = found.end()
                if found[1]:
                    self.labels[found[1]] = len(self.instructions)
                elif found[2]:
                    depth += 1
                    self.scopes.append({})
                elif found[3]:
                    if depth == 0:
                        return
                    depth -= 1
                    self.scopes.pop()
                elif found[4].strip():
                    yield found[4].strip(), number, source

    def statement(self, text: str, line: int, source: tuple[str, int] | None) -> None:
        """A declaration of registers, or an instruction."""
        if found := re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.DOTALL):
            width = 0 if found[1] == "pred" else size_of(found[1])
            for name in parts(found[2]):
                if several := re.match(r"(.*)<(\d+)>", name):
                    for i in range(int(several[2])):
                        self.declare(f"{several[1].strip()}{i}", width)
                else:
                    self.declare(name, width)
            return
        if text.startswith(IGNORED) or VARIABLE.fullmatch(text + ";") or re.match(r"(@!?%\w+\s+)?st\.param", text):
            return  # the last is what a function of the device is called with; the call itself is an error
        ins = Instruction(" ".join(text.split()), line, source)
        if found := re.match(r"@(!?)\s*([%\w$]+)\s+(.*)", text, re.DOTALL):
            ins.guard, text = (self.register(found[2]) or 0, bool(found[1])), found[3]
        name, *rest = text.split(None, 1)
        try:
            Operation(self, ins, name, parts(rest[0] if rest else "")).build()
        except (KeyError, IndexError, EmulatorError) as error:
            raise EmulatorError(f"{self.name}, PTX line {line}: {ins.text}: {error}") from error
        self.instructions.append(ins)

    def declare(self, name: str, width: int) -> int:
        self.scopes[-1][name] = len(self.widths)
        self.widths.append(width)
        return len(self.widths) - 1

    def register(self, name: str) -> int | None:
        """A register's number; None for `_`, which nobody reads."""
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        if SPECIAL.fullmatch(name):
            if name not in self.specials:
                self.specials[name] = self.scopes[0][name] = len(self.widths)
                self.widths.append(4)
            return self.specials[name]
        if name == "_":
            return None
        raise EmulatorError(f"no register {name} is known")

    def operand(self, text: str, t: str) -> Any:
        """A register's number, or a constant of a type."""
        if NUMBER.fullmatch(text):
            kind = np.dtype(TYPES[t])
            if text[1:2] in ("f", "F") and len(text) == 10:
                value = np.array(int(text[2:], 16), u4)
                return value.view(kind if kind.itemsize == 4 else u4)[()]
            if text[1:2] in ("d", "D") and len(text) == 18:
                return np.array(int(text[2:], 16), u8).view(kind if kind.itemsize == 8 else u8)[()]
            number = int(text.rstrip("U"), 0)
            if kind == np.bool_:
                return np.bool_(number != 0)
            return np.array(number & ((1 << 8 * kind.itemsize) - 1), UNSIGNED[kind.itemsize]).view(kind)[()]
        if text in self.symbols:
            return u8(self.symbols[text]) if size_of(t) == 8 else u4(self.symbols[text])
        return self.register(text)

    @staticmethod
    def special_value(run: Run, name: str) -> Array:
        """What a special register holds, for each thread."""
        root, _, axis = name[1:].partition(".")
        if root in ("tid", "ntid"):
            return (run.thread, run.per_program)[root == "ntid"] if axis == "x" else np.full((), root == "ntid")
        if root in ("ctaid", "nctaid"):
            return run.ids[axis] if root == "ctaid" else run.launch.grid["xyz".index(axis)]
        warps = {"laneid": run.thread % 32, "warpid": run.thread // 32, "nwarpid": -(-run.per_program // 32)}
        return np.asarray(warps.get(root, int("ncta" in root or "nclusterid" in root)))  # a cluster is one program
