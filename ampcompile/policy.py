"""The user's overrides of precision, per op and per module path, on top of the device's table."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Self

import torch

from ampcompile.passes.analysis.op_traits import LINEAR_PRODUCTS, STATISTICS, arguments_of, computes, has
from ampcompile.rules.table import Rule
from ampcompile.torch_private.dispatcher import OpOverload

from .dtypes import FP8, named
from .errors import OptionError
from .rules import table as rules
from .rules.autocast_lists import Category

_LOWERING = ("low", "bf16", "fp16", *FP8)
OP_VALUES = (*_LOWERING, "fp32", "promote", "fp32_inside", "as_arrives", "default")
MODULE_VALUES = (*_LOWERING, "fp32", "default")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_VALUES = {"lower_precision_fp": "low", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_CALLERS = {"addmm": "linear", "mm": "linear matmul", "bmm": "matmul", "convolution": "conv1d conv2d conv3d"}
"""Ops that graphs don't have, because torch calls them inside other ops; and these other ops, which graphs do have."""

_QUOTED = re.compile(r"""[\s,;='"]""")
_ENTRY = re.compile(
    r"""\s* (op|module) \s+ (?: (['"]) ((?:(?!\2).|\2\2)*) \2 | ([^\s,;='"]+) ) \s*=\s* ([^\s,;='"]+) \s* (,|\Z)""",
    re.DOTALL | re.VERBOSE,
)
Overrides = tuple[tuple[str, str], ...]
Given = Mapping[str, str | torch.dtype] | Sequence[tuple[str, str | torch.dtype]]
Names = Collection[str]


@dataclass(frozen=True)
class Policy:
    """Overrides of the device's op table; `Policy()` is the table itself. A hashable value: `parse(str(p)) == p`.

    `ops`: (glob on op names, rule), as `("softmax*", "low")` or `("mylib::*", "fp32")`. A name without `::` is an aten
    op; one without an overload stands for all of them. `("softmax@blocks.3", "fp32")` is about softmax inside the
    module `blocks.3` alone; behind the `@` stands a glob on module paths. The rule is `"low"`, `"fp32"`, `"promote"`
    (operands in the widest of their dtypes), `"fp32_inside"` (float32 inside, low precision out, as norms may want
    it), `"as_arrives"` or `"default"`; or `"fp8"`, `"fp8_e4m3"`, `"fp8_rowwise"`, for linear products alone: see
    docs/fp8.md.
    `modules`: (glob on module paths as `named_modules` gives them, dtype), as `("encoder.*.norm", "fp32")`. The dtype
    is `"low"`, `"bf16"`, `"fp16"`, `"fp32"`, `"default"`, or one of fp8's. A path stands for all inside it; `*` matches
    dots. There, every op that computes runs in that dtype, whatever its own rule; with `"fp8"`, every linear product,
    and all else as without it.

    Of several matches the last wins, a module beats an op, and `"default"` goes back to the table. Both may be dicts; a
    dtype may be torch's, or have any usual name, and `"lower_precision_fp"` is `"low"`. A name that holds `*`, `?` or
    `[` matches itself, too. Raises OptionError for values that aren't listed.

    >>> policy = ampcompile.Policy(ops={"softmax": "low"}, modules={"head": torch.float32, "blocks.a b": "fp16"})
    >>> print(policy)
    op softmax=low, module head=fp32, module "blocks.a b"=fp16
    >>> careful = torch.compile(model, backend="amp", options={"policy": policy})
    """

    ops: Overrides = ()
    modules: Overrides = ()

    def __init__(self, ops: Given = (), modules: Given = ()) -> None:
        object.__setattr__(self, "ops", _checked("op", ops, OP_VALUES))
        object.__setattr__(self, "modules", _checked("module", modules, MODULE_VALUES))

    def __str__(self) -> str:
        entries = [_entry("op", *override) for override in self.ops]
        return ", ".join(entries + [_entry("module", *override) for override in self.modules]) or "default"

    @classmethod
    def parse(cls, given: str | Mapping[str, Given] | Self) -> Self:
        """The policy that `str` wrote: `"op softmax*=low, module encoder.*.norm=fp32"`, or `"default"`.

        Names that hold a blank or one of `,;='"` stand in quotes, and a quote inside is written twice. A dict of the
        fields, as `{"modules": {"head": "fp32"}}`, and a Policy are read too. Raises OptionError.

        >>> ampcompile.Policy.parse("module head=fp32").modules
        (('head', 'fp32'),)
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping) and given.keys() <= {"ops", "modules"}:
            return cls(**given)
        if not isinstance(given, str):
            raise OptionError(
                f"found the policy {given!r}; expected an ampcompile.Policy, a string such as 'op softmax*=low, module "
                "head=fp32', or a dict such as {'ops': {'softmax*': 'low'}, 'modules': {'head': 'fp32'}}."
            )
        overrides: dict[str, list[tuple[str, str]]] = {"op": [], "module": []}
        position: int = 0
        more: Any = given.strip() not in ("", "default")
        while more:
            if (entry := _ENTRY.match(given, position)) is None:
                raise OptionError(
                    f"policy entry {given[position:].partition(',')[0].strip()!r} is neither 'op <glob>=<rule>' nor "
                    "'module <glob>=<dtype>'. Write entries with commas between them, as 'op softmax*=low, module "
                    "encoder.*.norm=fp32', and quotes around a name with blanks or one of ,;= in it."
                )
            kind, quote, quoted, plain, value, more = entry.groups()
            overrides[kind].append((quoted.replace(2 * quote, quote) if quote else plain, value))
            position = entry.end()
        return cls(overrides["op"], overrides["module"])

    def rule_for(self, op: OpOverload, device_type: str, module_path: str = "") -> Rule | None:
        """Return the rule of an op called in the module at `module_path`; None: it runs in whatever dtype arrives."""
        return self._override(op, module_path) or rules.rule_for(op, device_type)

    def asks_fp8(self) -> bool:
        """Return True if any op or module is to be quantized."""
        return any(value in FP8 for _, value in (*self.ops, *self.modules))

    def of_module(self, module_path: str) -> str:
        """Return what the entries about modules say of the one at `module_path`, such as `fp32`, or `default`."""
        paths = and_ancestors(module_path)
        return _last_match(self.modules, lambda glob: _matches(glob, paths))[1]

    def unread(self, seen: Iterable[str], owners: Iterable[str]) -> dict[str, list[str]]:
        """Globs of modules that match no path in `seen` but some in `owners`; each with these."""
        matched = {
            glob: [path for path in owners if _matches(glob, and_ancestors(path))]
            for glob, value in self.modules
            if value != "default" and not any(_matches(glob, and_ancestors(path)) for path in seen)
        }
        return {glob: paths for glob, paths in matched.items() if paths}

    def entries_about(self, calls: Iterable[tuple[str, str]]) -> list[str]:
        """Entries that concern calls of functions, each given by its name, as `linear`, and its module's path."""
        spelled = [([*_spellings(f"aten::{name}"), f"{name}_loss"], and_ancestors(path)) for name, path in calls]

        def concerns(glob: str) -> bool:
            return any(all(_matches(part, n) for part, n in _op_and_module(glob, *of)) for of in spelled)

        ops = [("op", glob, value) for glob, value in self.ops if concerns(glob)]
        modules = [
            ("module", glob, value) for glob, value in self.modules if any(_matches(glob, of[1]) for of in spelled)
        ]
        return [_entry(*entry) for entry in ops + modules if entry[2] != "default"]

    def needs_decomposition(self, op: OpOverload, device_type: str, module_path: str = "") -> bool:
        """Return True if an op must be decomposed, because there are rules for ops inside it, not for it."""
        if self._override(op, module_path) is not None:
            return False
        return rules.composite_needs_decomposition(op, device_type)

    def unmatched(
        self, op_names: Iterable[str], module_paths: Iterable[str], classes: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, list[str]]:
        """Globs that match none of these op names (`aten::softmax.int`) or module paths, with the nearest ones.

        `classes`: names of modules' classes, by path. Near to a glob that matches a class are the paths of its modules.
        """
        ops = {name for op in op_names for name in _spellings(op)}
        modules = {path for module in module_paths for path in and_ancestors(module)}
        parts = [(glob, *part) for glob, _ in self.ops for part in _op_and_module(glob, ops, modules)]
        parts += [(glob, glob, modules) for glob, _ in self.modules]

        def near(part: str, names: Names) -> list[str]:
            of_class = [path or "*" for path, name in classes.items() if names is modules and _matches(part, [name])]
            callers = [op for op in _CALLERS.get(part.removeprefix("aten::"), "").split() if op in names]
            close = difflib.get_close_matches(part.replace("*", "").lower(), sorted(names), cutoff=0.5)
            return of_class[:3] or callers or close

        return {glob: near(part, names) for glob, part, names in parts if not _matches(part, names)}

    def _override(self, op: OpOverload, module_path: str) -> Rule | None:
        names, paths = _spellings(op.name()), and_ancestors(module_path)

        def concerns(glob: str) -> bool:
            return all(_matches(part, those) for part, those in _op_and_module(glob, names, paths))

        for kind, overrides, matches in (
            ("module", self.modules, lambda glob: _matches(glob, paths)),
            ("op", self.ops, concerns),
        ):
            about = [override for override in overrides if override[1] not in FP8 or has(op, LINEAR_PRODUCTS)]
            glob, value = _last_match(about, matches)
            if value != "default" and computes(op):
                _, at, module = glob.partition("@") if kind == "op" else ("", "@", glob)
                named = at == "@" and _matches(module, [module_path])
                return _rule(op, value, f"policy: {_entry(kind, glob, value)}", named)
        return None


def _entry(kind: str, glob: str, value: str) -> str:
    if _QUOTED.search(glob):
        glob = '"{}"'.format(glob.replace('"', '""'))
    return f"{kind} {glob}={value}"


def _last_match(overrides: Sequence[tuple[str, str]], matches: Callable[[str], bool]) -> tuple[str, str]:
    return next((override for override in reversed(overrides) if matches(override[0])), ("", "default"))


def _matches(glob: str, names: Iterable[str]) -> bool:
    return any(name == glob or fnmatchcase(name, glob) for name in names)


def _op_and_module(glob: str, ops: Names, paths: Names) -> list[tuple[str, Names]]:
    """Split `softmax@blocks.3` into its globs, each with the names of which it must match one."""
    op, at, module = glob.partition("@")
    return [(op, ops), (module, paths)] if at else [(op, ops)]


def _rule(op: OpOverload, value: Any, because: str, named: bool) -> Rule:
    statistics = tuple(a.name for a in arguments_of(op) if a.name in STATISTICS)
    category: Category = "lower_precision_fp" if value in _LOWERING else value  # the others are categories' own names
    if statistics and category == "lower_precision_fp":
        return Rule("as_arrives", f"{because}, except that running statistics stay as they are")
    fp8 = value if value in FP8 else ""
    return Rule(category, because, dtype=_DTYPES.get(value), keeps=statistics, fp8=fp8, named=named)


def _spellings(name: str) -> list[str]:
    """All spellings of an op's name: `aten::softmax.int` is also `aten::softmax`, `softmax.int` and `softmax`."""
    names = [name, name.partition(".")[0]]
    return names + [short.removeprefix("aten::") for short in names if short.startswith("aten::")]


def and_ancestors(path: str) -> list[str]:
    """Paths of a module and its parents: `a.b` and `a` for `a.b`; the empty path stands for no module."""
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _checked(kind: str, given: Given, values: tuple[str, ...]) -> Overrides:
    pairs: Any = [*given.items()] if isinstance(given, Mapping) else given
    if not isinstance(pairs, tuple | list) or not all(isinstance(p, tuple | list) and len(p) == 2 for p in pairs):
        raise OptionError(
            f"Policy got {given!r} for its {kind}s; expected a dict, as {{glob: value}}, or pairs, as "
            "((glob, value), ...)."
        )
    overrides = []
    for glob, value in pairs:
        if not isinstance(glob, str) or not glob:
            raise OptionError(f"policy {kind} glob {glob!r} is no name; expected a string such as 'softmax' or 'head'.")
        word = _VALUES.get(named(value), value) if isinstance(value, str | torch.dtype) else value
        if word not in values:
            near = difflib.get_close_matches(str(value).removeprefix("torch."), values, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise OptionError(
                f"policy {kind} {glob} has the value {value!r}; expected one of {', '.join(values)}.{hint}"
            )
        overrides.append((glob, word))
    return tuple(overrides)
