"""What a captured step reads beside its arguments, as Python holds it, where a replay would not see a change."""

import contextlib
import dis
import functools
import operator
import sysconfig
from collections.abc import Collection, Iterator
from itertools import chain, repeat
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ampcompile.torch_private import optimizers as private

PLAIN = (int, float, complex, bool, str, bytes, torch.dtype, torch.device)
MOST = 64  # entries of a dict, list or object that is opened
_PARTS = ("_parameters", "_buffers", "_modules")  # of a module
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a parameter
_INSTALLED = tuple({*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))})
_END = object()  # behind all others: lists of different lengths differ there


class Surroundings:
    """What a step reaches: closure and globals, the `self` of a method, functions that it names, modules.

    `found`: what stands where, by names for messages; `modules`: those reached. `ignored`: places that aren't compared.
    """

    def __init__(self, step: Any, optimizers: Collection[Any], ignored: Collection[str] = frozenset()) -> None:
        self.found: dict[str, Any] = {}
        self.modules: list[nn.Module] = []
        self._ignored = ignored
        self._holders: dict[str, tuple[Any, Any]] = {}  # a dict and a key, or a cell, by the same names
        self._named: set[CodeType] = set()  # of the functions that were reached
        self._methods: set[CodeType] = set()  # of the classes of modules and objects
        self._seen: dict[int, Any] = {}  # holds all, so that no other object gets the id of one
        self._objects: list[tuple[str, Any]] = []  # to be opened once all functions are known
        # What is compared: all that some dicts and lists hold, what some keys and cells hold, hooks of parameters.
        self._empty: list[Any] = []
        self._whole: list[Any] = []
        self._keyed: list[tuple[Any, Any]] = []
        self._cells: list[Any] = []
        self._params: list[Tensor] = []
        self._open("the step", step)
        for i, optimizer in enumerate(optimizers):
            self._open(f"optimizer {i}", optimizer)
        while self._objects:
            self._open_attributes(*self._objects.pop(0))
        for name, hooks in private.global_hook_tables().items():
            self._add_all(name, hooks)
        self._dicts, self._keys = [keyed[0] for keyed in self._keyed], [keyed[1] for keyed in self._keyed]
        self._values = list(self._now())

    def unchanged(self) -> bool:
        """Compare all by identity, in C."""
        try:
            return not any(self._empty) and all(map(operator.is_, self._now(), self._values))
        except (ValueError, RuntimeError):  # an emptied cell; a dict that another thread changes
            return False

    def _now(self) -> Iterator[Any]:
        keyed = map(dict.get, self._dicts, self._keys)
        cells = map(operator.attrgetter("cell_contents"), self._cells)
        hooks = (map(getattr, self._params, repeat(name)) for name in _HOOKS)
        return chain(chain.from_iterable(self._whole), keyed, cells, *hooks, (_END,))

    def changes(self, now: "Surroundings") -> list[str]:
        """The places where something else stands now; plain values are compared by type and value."""
        names = dict.fromkeys((*self.found, *now.found))
        return [
            name
            for name in names
            if name not in self._ignored and not _same(self.found.get(name, _END), now.found.get(name, _END))
        ]

    def set_back(self, names: Collection[str]) -> None:
        """Put what stood there into these places, where they are attributes, variables or entries of a dict."""
        for name in names:
            holder, key = self._holders.get(name, (None, None))
            if isinstance(holder, dict):
                holder[key] = self.found[name]
            elif holder is not None:
                holder.cell_contents = self.found[name]

    def is_attribute(self, name: str) -> bool:
        """Return True for a module's or an object's."""
        return isinstance(self._holders.get(name, (None,))[0], dict) and "." in name

    def reads_first(self, name: str) -> bool:
        """Return True if a function reads the attribute, and sets it further down."""
        attribute = name.rpartition(".")[2]
        for code in self._named | self._methods:
            if attribute in code.co_names:
                ops = [
                    instruction.opname for instruction in dis.get_instructions(code) if instruction.argval == attribute
                ]
                ops = [op for op in ops if op in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")]
                if "STORE_ATTR" in ops and ops[0] != "STORE_ATTR":
                    return True
        return False

    def named(self) -> set[str]:
        """What the functions that were reached name, and the methods of modules and objects that these may call."""
        former, words = set[str](), _words(self._named)
        while former != words:
            former, words = words, words | _words([code for code in self._methods if code.co_name in words])
        return words

    def _open(self, name: str, value: Any, direct: bool = True) -> None:
        """Note what an object holds; `direct`: the step holds it itself."""
        if value is None or isinstance(value, (*PLAIN, Tensor, ModuleType, type)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._open_module(name, value)
        elif isinstance(value, torch.optim.Optimizer):
            for kind, hooks in private.hook_tables(value).items():
                self._add_all(f"{name}.{kind}", hooks)
        elif isinstance(value, MethodType):
            self._open(name, value.__self__, direct)
            self._follow(name, type(value.__self__), value.__func__)
        elif isinstance(value, functools.partial):
            for part, held in (("func", value.func), ("args", value.args), ("keywords", value.keywords)):
                self._open(f"{name}.{part}", held, direct)
        elif isinstance(value, FunctionType):
            self._follow(name, type(None), value)
        elif isinstance(value, (dict, list, tuple)):
            if direct and len(value) <= MOST:
                if not isinstance(value, tuple):
                    self._add_all(name, value)
                for key, held in value.items() if isinstance(value, dict) else enumerate(value):
                    self._open(f"{name}[{key!r}]", held, direct=False)
        elif direct and hasattr(value, "__dict__"):
            self._objects.append((name, value))
            self._follow(name, type(value), vars(type(value)).get("__call__"))

    def _open_module(self, root: str, module: nn.Module) -> None:
        for name, inner in module.named_modules(prefix=root):
            if inner is not module and id(inner) in self._seen:
                continue
            self._seen[id(inner)] = inner
            self.modules.append(inner)
            self._note_methods(type(inner))
            self._add_all(name, vars(inner), "{}.{}")
            for kind, held in list(vars(inner).items()):
                if kind in _PARTS:
                    self._add_all(name, held, "{}.{}")
                elif "hooks" in kind and "state_dict" not in kind and isinstance(held, dict):
                    self._add_all(f"{name}.{kind}", held)
            for key, param in inner._parameters.items():
                if type(param) is nn.Parameter:
                    self._params.append(param)
                    for kind in _HOOKS:
                        self.found[f"{name}.{key}.{kind}"] = hooks = getattr(param, kind)
                        if hooks:
                            self._add_all(f"{name}.{key}.{kind}", hooks)
        for name, inner in module.named_modules(prefix=root):
            for method in (vars(inner).get("forward"), type(inner).forward):
                self._open(f"{name}.forward", method)

    def _follow(self, name: str, owner: type, function: Any) -> None:
        """Note what a function names, and the methods of its owner among them."""
        function = getattr(function, "fget", getattr(function, "__func__", function))
        if not isinstance(function, FunctionType):
            return
        for wrapped in ("_torchdynamo_orig_callable", "__wrapped__"):
            self._open(name, vars(function).get(wrapped))
        package, code = (function.__module__ or "").partition(".")[0], function.__code__
        if code in self._named or code.co_filename.startswith(_INSTALLED) or package in ("torch", "ampcompile"):
            return
        self._named.update(codes := _nested(code))
        words, names = _words(codes), function.__globals__
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it isn't set so far
                self._add(variable, cell.cell_contents, cell)
        for key, held in (*enumerate(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()):
            self._open(f"{name}({key})", held)
        for key in sorted(words & names.keys()):
            if not isinstance(names[key], (ModuleType, type)):
                self._add(key, names[key], names, key)
        for word in words:
            for kind in owner.__mro__:  # `super()` may ask for any of them
                self._follow(name, owner, vars(kind).get(word))

    def _open_attributes(self, name: str, value: Any) -> None:
        """Note the attributes of an object that a function names; all plain ones of a scheduler or scaler."""
        self._note_methods(type(value))
        known, words = isinstance(value, (LRScheduler, torch.amp.GradScaler)), _words(self._named)
        for key, held in list(vars(value).items()) if len(vars(value)) <= MOST else ():
            if key in words or (known and isinstance(held, PLAIN)):
                self._add(f"{name}.{key}", held, vars(value), key)
        if len(_words(self._named)) > len(words):  # functions among them name more
            self._objects.append((name, value))

    def _note_methods(self, kind: type) -> None:
        own = [
            base for base in kind.__mro__ if (base.__module__ or "").partition(".")[0] not in ("torch", "ampcompile")
        ]
        functions = [value for one in own for value in vars(one).values() if isinstance(value, FunctionType)]
        self._methods.update(code for function in functions for code in _nested(function.__code__))

    def _add(self, name: str, value: Any, holder: Any, key: Any = None) -> None:
        """Note one place, and open what stands there."""
        if name not in self.found and name not in self._ignored:
            self._keyed.append((holder, key)) if isinstance(holder, dict) else self._cells.append(holder)
        self.found[name], self._holders[name] = value, (holder, key)
        self._open(name, value)

    def _add_all(self, name: str, held: Any, pattern: str = "{}[{!r}]") -> None:
        """Note all that a dict or list holds."""
        items = dict(held if isinstance(held, dict) else enumerate(held))
        names = {pattern.format(name, key): key for key in items}
        self.found |= {place: items[key] for place, key in names.items()}
        self._holders |= {place: (held, key) for place, key in names.items() if isinstance(held, dict)}
        if self._ignored and not names.keys().isdisjoint(self._ignored):
            self._keyed += [(held, key) for place, key in names.items() if place not in self._ignored]
        elif items:
            self._whole.append(held.values() if isinstance(held, dict) else held)
        else:
            self._empty.append(held)


def _same(a: Any, b: Any) -> bool:
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, PLAIN) and a == b


def _nested(code: CodeType) -> list[CodeType]:
    """The code of a function, and of those defined in it."""
    return [code, *(nested for inner in code.co_consts if isinstance(inner, CodeType) for nested in _nested(inner))]


def _words(codes: Collection[CodeType]) -> set[str]:
    """What functions name: globals, attributes, and strings, by which attributes may be asked for."""
    return {word for code in codes for word in (*code.co_names, *code.co_consts) if isinstance(word, str)}
