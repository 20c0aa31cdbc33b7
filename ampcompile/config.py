"""The options of the backend: parsed and checked at `torch.compile`, then frozen."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch

from ampcompile.torch_private import compilations

from .dtypes import LOW, hint_at_policy, named
from .errors import OptionError
from .policy import Policy

_CHOICES = {
    "weights": ("cached", "every_call"),
    "numerics": ("eager", "relaxed"),
    "lower": ("inductor", "aot_eager", "eager"),
    "outputs": ("float32", "autocast"),
    "products": ("auto", "float32", "torch"),
}
_OTHER_NAMES = {"precision": "dtype", "autocast": "dtype"}  # what users may call an option, where its name isn't near


@dataclass(frozen=True)
class Options:
    """The options of `torch.compile(model, backend="amp", options={...})`.

    An option is one of these fields, else a key of `torch._inductor.config`, else an OptionError.
    """

    dtype: torch.dtype | None = None
    """The low-precision type, torch.bfloat16 or torch.float16, given as such or by name ("bf16"). None: that of an
    ambient `torch.autocast`, else `torch.get_autocast_dtype(device)`."""
    policy: Policy = field(default_factory=Policy)
    weights: str = "cached"
    numerics: str = "eager"
    range_guards: bool = True
    lower: str = "inductor"
    outputs: str = "float32"
    """The type of low-precision results of the outermost compiled callable if no autocast is open around its call."""
    products: str = "auto"
    """Kernels of 16-bit products on the CPU: "auto" float32, on rounded operands, where the CPU has no units for the
    type; "float32" the same on every CPU; "torch" always torch's own 16-bit kernels. Copies of weights take 4 bytes a
    number instead of 2 where products run in float32."""
    dynamic: bool | None = None
    """As torch.compile's. Like `fullgraph` and `mode` it may be one of the options, since torch doesn't accept `mode`
    beside options."""
    fullgraph: bool | None = None
    """As torch.compile's."""
    watch: bool = False
    """True: graphs count infinite and NaN numbers and record magnitudes, for `ampcompile.watch`. They are compiled
    anew in each process."""
    activation_memory_budget: float | None = None
    """The share, from 0 to 1, of what backward would keep that it may keep; the rest is computed again. None: torch's
    own setting, 1 by default."""
    saved: Policy = field(default_factory=Policy)
    """What is kept for backward in 8 bits, by module, from "fp8" or a dict of patterns, each with "fp8" or None."""
    inductor: tuple[tuple[str, Any], ...] = ()
    """Settings for Inductor: a mode's, then those given by name."""

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None = None, mode: str | None = None) -> Self:
        """Parse and check the options given to torch.compile. Raises OptionError."""
        ours = {f.name for f in fields(cls)} - {"inductor"}
        values: dict[str, Any] = {}
        remaining = dict(options or {})
        inductor = _of_mode(remaining.pop("mode", mode))
        for key, value in remaining.items():
            if key in ours:
                values[key] = _checked(key, value)
            else:
                inductor[_inductor_key(key, value, ours)] = value
        if values.get("saved") and "custom_partitioner_fn" in inductor:
            raise OptionError(
                "found saved beside custom_partitioner_fn: both cut forward from backward. Expected one of the two."
            )
        for key in ("watch", "activation_memory_budget", "saved"):
            if values.get(key) not in (None, False, Policy()) and values.get("lower") == "eager":
                given = f"{key}={values[key]}"
                raise OptionError(f"found {given} with lower='eager', which differentiates no graph: expected another.")
        return cls(**values, inductor=tuple(inductor.items()))


def _of_mode(mode: str | None) -> dict[str, Any]:
    if mode in (None, "default"):
        return {}
    modes = compilations.inductor_modes()
    if mode not in [*modes]:
        raise OptionError(
            f"mode={mode!r} is not a mode of torch.compile; expected one of {', '.join(modes)}. torch.compile takes "
            "mode or options, not both: write it among the options, as options={'mode': 'max-autotune', 'dtype': ...}."
        )
    return dict(modes[mode])


def _checked(key: str, value: Any) -> Any:
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            expected = ", ".join(map(repr, _CHOICES[key]))
            raise OptionError(f"option {key}={value!r}: expected one of {expected}.")
    elif key == "dtype":
        if (dtype := named(value)) not in (None, *LOW):
            raise OptionError(
                f"option dtype={value!r}: expected torch.bfloat16 or torch.float16, or a name such as 'bf16'. For "
                "float32 leave backend='amp' out, or call the model inside torch.autocast(device_type, enabled=False)."
                + hint_at_policy(value)
            )
        return dtype
    elif key in ("range_guards", "watch"):
        if not isinstance(value, bool):
            raise OptionError(f"option {key}={value!r}: expected True or False.")
    elif key == "activation_memory_budget":
        if isinstance(value, bool) or not (value is None or (isinstance(value, int | float) and 0 <= value <= 1)):
            raise OptionError(
                f"option {key}={value!r}: expected a number from 0 to 1, or None for torch's own setting."
            )
        return None if value is None else float(value)
    elif key == "saved":
        given = {"*": value} if isinstance(value, str) else value or {}
        if not isinstance(given, Mapping) or not all(how in ("fp8", None) for how in given.values()):
            raise OptionError(
                f"option saved={value!r}: expected 'fp8', None, or a dict of patterns for paths of modules, each with "
                "'fp8' or None."
            )
        return Policy(modules=tuple((glob, how or "default") for glob, how in given.items()))
    elif key in ("dynamic", "fullgraph"):
        if not isinstance(value, bool) and value is not None:
            raise OptionError(f"option {key}={value!r}: expected True, False or None, as torch.compile's {key}.")
    elif not isinstance(value, Policy | str | Mapping):
        raise OptionError(
            f"option policy={value!r}: expected an ampcompile.Policy or its string form, or a dict of its fields."
        )
    else:
        return Policy.parse(value)
    return value


def _inductor_key(key: str, value: Any, ours: set[str]) -> str:
    inductor_options = compilations.inductor_options()
    name = key.replace("-", "_")
    if kind := inductor_options.get(name):
        if not isinstance(value, kind):
            raise OptionError(
                f"option {key}={value!r}: expected {kind.__name__}, the type of torch._inductor.config.{name}."
            )
        return name
    if key == "options":
        raise OptionError(
            "found options={...} as an option; expected each by its own name: explain(f, dtype=torch.float16), or "
            'torch.compile(f, backend="amp", options={"dtype": torch.float16}).'
        )
    near = [_OTHER_NAMES[name]] if name in _OTHER_NAMES else difflib.get_close_matches(name, [*ours, "mode"], n=3)
    near += difflib.get_close_matches(name, inductor_options, n=3, cutoff=0.7)
    hint = f" Did you mean {' or '.join(map(repr, near[:3]))}?" if near else ""
    hint = hint_at_policy(name) or hint
    expected = f"Expected one of {', '.join(sorted({*ours, 'mode'}))}, or a key of torch._inductor.config."
    raise OptionError(f"option {key!r} is unknown.{hint} {expected}")
