"""The user's steering of precision: overrides per op and per module path on top of the device's table."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Self

import torch
from torch._ops import OpOverload

from ampcompile import rules
from ampcompile.errors import PolicyError
from ampcompile.rules import Rule

_ALIASES = {"low": "lower_precision_fp"}
OP_VALUES = ("lower_precision_fp", "fp32", "promote", "fp32_inside", "as_arrives", "default", *_ALIASES)
_MODULE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "low": None}
MODULE_VALUES = (*_MODULE_DTYPES, "default")
_SEPARATORS = ",= \t\n"

Overrides = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Policy:
    """Overrides of the device's op table; `Policy()` is the table itself. A hashable value: `parse(str(p)) == p`.

    `ops`: (glob on an op name, what to do), e.g. `("softmax*", "low")`, `("mylib::*", "fp32")`. A glob without
    `::` is about aten ops; one without an overload covers all overloads. Values: `OP_VALUES`.
    `modules`: (glob on a module path as `named_modules` spells it, dtype), e.g. `("encoder.*.norm", "fp32")`;
    `*` also matches dots, and a module's rule covers all inside it. Values: `MODULE_VALUES`.

    In each tuple the last match wins; a module rule beats an op rule; `"default"` gives back to the table.
    """

    ops: Overrides = ()
    modules: Overrides = ()

    def __post_init__(self) -> None:
        _check("op", self.ops, OP_VALUES)
        _check("module", self.modules, MODULE_VALUES)

    def __str__(self) -> str:
        entries = [f"op {glob}={value}" for glob, value in self.ops]
        entries += [f"module {glob}={value}" for glob, value in self.modules]
        return ", ".join(entries) or "default"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The policy that `str` printed: `"op softmax*=low, module encoder.*.norm=fp32"`, or `"default"`."""
        found: dict[str, list[tuple[str, str]]] = {"op": [], "module": []}
        for entry in [] if text.strip() in ("", "default") else text.split(","):
            kind, _, override = entry.strip().partition(" ")
            glob, equals, value = override.partition("=")
            if kind not in found or not equals:
                raise PolicyError(
                    f"policy entry {entry.strip()!r} is neither `op <glob>=<rule>` nor `module <glob>=<dtype>`; "
                    "separate entries by commas, as in 'op softmax*=low, module encoder.*.norm=fp32'."
                )
            found[kind].append((glob.strip(), value.strip()))
        return cls(tuple(found["op"]), tuple(found["module"]))

    def rule_for(self, op: OpOverload, device_type: str, module_path: str = "") -> Rule | None:
        """The rule for an op of the module at `module_path`; None: it runs in whatever dtype arrives."""
        for glob, value in reversed(self.modules):
            if any(fnmatchcase(path, glob) for path in _and_ancestors(module_path)):
                if value == "default":
                    break
                return _module_rule(op, glob, value)
        for glob, value in reversed(self.ops):
            if any(fnmatchcase(name, glob) for name in _spellings(op.name())):
                if value == "default":
                    break
                return Rule(_ALIASES.get(value, value), f"policy: op {glob}={value}")
        return rules.rule_for(op, device_type)

    def unmatched(self, op_names: Iterable[str], module_paths: Iterable[str]) -> dict[str, list[str]]:
        """Globs that match none of these full op names and module paths, each with the nearest existing names."""
        ops = {name for full in op_names for name in _spellings(full)}
        paths = {path for full in module_paths for path in _and_ancestors(full)}
        return {
            glob: difflib.get_close_matches(glob, sorted(names), n=3, cutoff=0.4)
            for overrides, names in ((self.ops, ops), (self.modules, paths))
            for glob, _ in overrides
            if not any(fnmatchcase(name, glob) for name in names)
        }


def _module_rule(op: OpOverload, glob: str, value: str) -> Rule | None:
    because = f"policy: module {glob}={value}"
    if op.is_view or op.namespace == "prim":
        return None  # moves no digits; casting here would cut the alias
    if op._schema.is_mutable:
        return Rule("follow_destination", f"{because}; writes into its first argument, whose dtype stays")
    if value == "fp32":
        return Rule("fp32", because)
    return Rule("lower_precision_fp", because, dtype=_MODULE_DTYPES[value])


def _spellings(full: str) -> list[str]:
    """`aten::softmax.int` may be written so, `aten::softmax`, `softmax.int` or `softmax`."""
    names = [full, full.partition(".")[0]]
    return names + [name.removeprefix("aten::") for name in names if name.startswith("aten::")]


def _and_ancestors(path: str) -> list[str]:
    """`a.b` lies in `a.b`, in `a` and in the root, whose path is empty."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def _check(kind: str, overrides: Overrides, values: tuple[str, ...]) -> None:
    for glob, value in overrides:
        if not glob or any(character in glob for character in _SEPARATORS):
            raise PolicyError(
                f"policy {kind} glob {glob!r} is empty or holds a comma, an equals sign or a blank; "
                "write `?` in the place of such a character."
            )
        if value not in values:
            near = difflib.get_close_matches(str(value), values, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise PolicyError(f"policy {kind} {glob!r} has value {value!r}; expected one of {', '.join(values)}.{hint}")
