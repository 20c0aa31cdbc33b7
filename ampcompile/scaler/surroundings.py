"""What a captured step reads beside its arguments, as Python holds it, where a replay would not see a change."""

import contextlib
import dis
import functools
import io
import operator
import random
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, pairwise
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
_CALLED = ("__call__", "__getitem__", "forward")  # methods that nobody names
NUMBERS_OF = (LRScheduler, torch.amp.GradScaler)  # all plain attributes of these count
_END = object()  # behind all others: lists of different lengths differ there


class Surroundings:
    """What a step reaches: closure and globals, the `self` of a method, functions that it names, modules.

    `found`: what stands where, by names for messages; `modules`: those reached. `ignored`: places that aren't compared.
    """

    def __init__(self, roots: dict[str, Any], optimizers: Sequence[Any], ignored: Collection[str] = ()) -> None:
        self.found: dict[str, Any] = {}
        self.modules: list[nn.Module] = []
        self.generators: list[Any] = []  # of random numbers of the host
        self.iterators: list[str] = []
        self.ignored = ignored
        self._holders: dict[str, tuple[Any, Any]] = {}  # what holds it, and the key or attribute, by the same names
        self._codes: set[CodeType] = set()  # of the functions that were reached
        self._seen: dict[int, Any] = {}  # holds all, so that no other object gets the id of one
        self._objects: list[tuple[str, Any]] = []  # and classes, whose attributes count if a function names them
        # What is compared: all that some dicts and lists hold, what some keys hold, and some attributes.
        self._empty: list[Any] = []
        self._whole: list[Any] = []
        self._dicts, self._keys = list[dict[Any, Any]](), list[Any]()
        self._owners, self._attributes = list[Any](), list[str]()
        for i, optimizer in enumerate(optimizers):
            self._open_optimizer(f"optimizer {i}", optimizer)
        for name, root in roots.items():
            self._open(name, root)
        words, former = self.named(), None
        while words != former:  # what is opened has functions, which name more
            for name, value in self._objects:
                self._open_attributes(name, value, words)
            former, words = words, self.named()
        for name, hooks in private.global_hook_tables().items():
            self._add_all(name, hooks)
        self._values = list(self._now())

    def unchanged(self) -> bool:
        """Compare all by identity, in C."""
        try:
            return not any(self._empty) and all(map(operator.is_, self._now(), self._values))
        except (AttributeError, ValueError, RuntimeError):  # an emptied cell; a dict that another thread changes
            return False

    def _now(self) -> Iterator[Any]:
        keyed, attributes = map(dict.get, self._dicts, self._keys), map(getattr, self._owners, self._attributes)
        return chain(chain.from_iterable(self._whole), keyed, attributes, (_END,))

    def changes(self, now: "Surroundings") -> list[str]:
        """The places where something else stands now; plain values are compared by type and value."""
        names = dict.fromkeys((*self.found, *now.found))
        return [
            name
            for name in names
            if name not in self.ignored and not _same(self.found.get(name, _END), now.found.get(name, _END))
        ]

    def words(self, name: str, now: "Surroundings") -> str:
        """What stood there, and stands now."""
        return f"from {self.found.get(name)!r:.40} to {now.found.get(name)!r:.40}"

    def set_back(self, names: Collection[str]) -> None:
        """Put what stood there into these places, where they are attributes, variables or entries of a dict."""
        for name in names:
            holder, key = self._holders.get(name, (None, ""))
            if isinstance(holder, dict):
                holder[key] = self.found[name]
            elif holder is not None:
                setattr(holder, key, self.found[name])

    def is_attribute(self, name: str) -> bool:
        """Return True for a module's or an object's."""
        return isinstance(self._holders.get(name, (None,))[0], dict) and "." in name

    def reads_first(self, name: str) -> bool:
        """Return True if a function reads the attribute, and sets it further down."""
        attribute = name.rpartition(".")[2]
        for code in self._codes:
            if attribute in code.co_names:
                ops = [one.opname for one in dis.get_instructions(code) if one.argval == attribute]
                ops = [op for op in ops if op in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")]
                if "STORE_ATTR" in ops and ops[0] != "STORE_ATTR":
                    return True
        return False

    def reads_gradients(self) -> bool:
        """Return True if a function itself reads a parameter's `.grad`."""
        return any(
            then.opname == "LOAD_ATTR" and then.argval == "grad" and one.argval != "autograd"
            for code in self._codes
            if "grad" in code.co_names
            for one, then in pairwise(dis.get_instructions(code))
        )

    def named(self) -> set[str]:
        """What the functions that were reached name: attributes, and strings, by which these may be asked for."""
        return {word for code in self._codes for word in (*code.co_names, *code.co_consts) if isinstance(word, str)}

    def _open(self, name: str, value: Any, direct: bool = True) -> None:
        """Note what an object holds; `direct`: the step holds it itself."""
        if value is None or isinstance(value, (*PLAIN, Tensor, ModuleType)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._open_module(name, value)
        elif isinstance(value, torch.optim.Optimizer):
            for kind, hooks in private.hook_tables(value).items():
                self._open(f"{name}.{kind}", hooks)
        elif isinstance(value, MethodType):
            self._open(name, value.__self__, direct)
            self._open(name, value.__func__)
        elif isinstance(value, (property, staticmethod, classmethod)):
            self._open(name, getattr(value, "fget", None) or getattr(value, "__func__", None))
        elif isinstance(value, functools.partial):
            for part, held in (("func", value.func), ("args", value.args), ("keywords", value.keywords)):
                self._open(f"{name}.{part}", held, direct)
        elif isinstance(value, FunctionType):
            self._follow(name, value)
        elif isinstance(value, (random.Random, torch.Generator)) or hasattr(type(value), "_bit_generator"):
            self.generators.append(value)
        elif isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            self.iterators.append(name)
        elif isinstance(value, (dict, list, tuple)):
            if direct and len(value) <= MOST:
                if not isinstance(value, tuple):
                    self._add_all(name, value)
                for key, held in value.items() if isinstance(value, dict) else enumerate(value):
                    self._open(f"{name}[{key!r}]", held, direct=False)
        elif isinstance(value, type):
            self._objects += [(kind.__qualname__, kind) for kind in value.__mro__]
        elif direct and isinstance(getattr(value, "__dict__", None), dict) and not _is_known(type(value)):
            self._objects.append((name, value))
            self._open(name, type(value))

    def _open_module(self, root: str, module: nn.Module) -> None:
        for name, inner in module.named_modules(prefix=root):
            if inner is not module and id(inner) in self._seen:
                continue
            self._seen[id(inner)] = inner
            self.modules.append(inner)
            self._open(name, type(inner))
            self._open(f"{name}.forward", vars(inner).get("forward"))
            self._add_all(name, vars(inner), "{}.{}")
            for kind, held in list(vars(inner).items()):
                if kind in _PARTS:
                    self._add_all(name, held, "{}.{}")
                elif "hooks" in kind and "state_dict" not in kind:
                    self._open(f"{name}.{kind}", held)
            for key, param in inner._parameters.items():
                for kind in _HOOKS if type(param) is nn.Parameter else ():
                    self._add(f"{name}.{key}.{kind}", getattr(param, kind), param, kind)

    def _open_optimizer(self, name: str, optimizer: Any) -> None:
        """Note the settings, parameters and state of one that the step takes steps of."""
        self._open(name, optimizer)
        self._seen[id(optimizer.state)] = optimizer.state  # it isn't opened as a dict: other forms may add to it
        self._add(f"state of {name}", optimizer.state, optimizer, "state")
        self._add_all(f"groups of {name}", optimizer.param_groups)
        for i, group in enumerate(optimizer.param_groups):
            self._add_all(f"parameters of group {i} of {name}", group["params"])
            for key in optimizer.defaults.keys() & group.keys():
                self._add(setting(key, i, name), group[key], group, key)
            for j, param in enumerate(group["params"]):
                if state := optimizer.state.get(param):
                    self._add(f"state {j} of group {i} of {name}", state, optimizer.state, param)

    def _follow(self, name: str, function: FunctionType) -> None:
        """Note what a function names."""
        for wrapped in ("_torchdynamo_orig_callable", "__wrapped__"):
            self._open(name, vars(function).get(wrapped))
        if _is_known(function):
            return
        self._codes.update(codes := _nested(function.__code__))
        if function.__code__.co_filename.startswith(_INSTALLED):
            return
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it isn't set so far
                self._add(variable, cell.cell_contents, cell, "cell_contents")
        for key, held in (*enumerate(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()):
            self._open(f"{name}({key})", held)
        names = function.__globals__
        for key, attribute in sorted(set().union(*map(_loads, codes))):
            held = names.get(key)
            if not isinstance(held, (ModuleType, type)):
                if key in names:
                    self._add(key, held, names, key)
            elif (part := vars(held).get(attribute)) is not None and part is getattr(held, attribute, None):
                self._add(f"{key}.{attribute}", part, held, attribute)

    def _open_attributes(self, name: str, value: Any, words: set[str]) -> None:
        """Note the attributes of an object or class that functions name; all plain ones of a scheduler or scaler."""
        is_class = isinstance(value, type)
        for key, held in list(vars(value).items()) if is_class or len(vars(value)) <= MOST else ():
            if is_class and isinstance(held, (*PLAIN, FunctionType)) and (key in words or key in _CALLED):
                self._add(f"{name}.{key}", held, value, key)
            elif key in words and is_class:
                self._open(f"{name}.{key}", held)
            elif key in words or (isinstance(value, NUMBERS_OF) and isinstance(held, PLAIN)):
                self._add(f"{name}.{key}", held, vars(value), key)

    def _add(self, name: str, value: Any, holder: Any, key: Any) -> None:
        """Note one place, and open what stands there."""
        while self._holders.get(name, (holder,))[0] is not holder:
            name += "'"  # others have such a variable, too
        if name not in self.found and name not in self.ignored:
            if isinstance(holder, dict):
                self._dicts.append(holder)
                self._keys.append(key)
            else:
                self._owners.append(holder)
                self._attributes.append(key)
        self.found[name], self._holders[name] = value, (holder, key)
        self._open(name, value)

    def _add_all(self, name: str, held: Any, pattern: str = "{}[{!r}]") -> None:
        """Note all that a dict or list holds."""
        items = dict(held if isinstance(held, dict) else enumerate(held))
        names = {pattern.format(name, key): key for key in items}
        self.found |= {place: items[key] for place, key in names.items()}
        self._holders |= {place: (held, key) for place, key in names.items() if isinstance(held, dict)}
        if self.ignored and not names.keys().isdisjoint(self.ignored):
            kept = [key for place, key in names.items() if place not in self.ignored]
            self._dicts += [held] * len(kept)
            self._keys += kept
        elif items:
            self._whole.append(held.values() if isinstance(held, dict) else held)
        else:
            self._empty.append(held)


def setting(key: str, group: int, optimizer: str) -> str:
    """The name of an optimizer's setting."""
    return f"{key} of group {group} of {optimizer}"


def _same(a: Any, b: Any) -> bool:
    """Return True for one object, and for plain values, and tuples of them, of equal types and values."""
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, PLAIN) and a == b


def _is_known(value: Any) -> bool:
    """Return True for functions and classes that need no look; not for those of which some numbers count."""
    counts = isinstance(value, type) and issubclass(value, NUMBERS_OF)
    return not counts and str(value.__module__).partition(".")[0] in ("torch", "ampcompile")


def _nested(code: CodeType) -> list[CodeType]:
    """The code of a function, and of those defined in it."""
    return [code, *(nested for inner in code.co_consts if isinstance(inner, CodeType) for nested in _nested(inner))]


@functools.lru_cache(1024)
def _loads(code: CodeType) -> set[tuple[str, str]]:
    """The globals that a function reads, each with the attribute that it asks of it, if any."""
    pairs = pairwise(dis.get_instructions(code))
    return {(one.argval, str(then.argval)) for one, then in pairs if one.opname == "LOAD_GLOBAL"}
