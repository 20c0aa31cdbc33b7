"""Run every call of an amp-compiled callable under autocast, under which Dynamo also traces it.

Code that reads a dtype (`.to(h.dtype)`, `finfo(h.dtype).min`, a branch) then sees eager autocast's dtypes, code between
graph breaks is under autocast too, and a graph that begins in a disabled region differs from one without autocast.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from ampcompile.config import Options
from ampcompile.errors import OptionError, warn_user
from ampcompile.torch_private import autocast, compilations, dynamo, marks, patches

from . import current_call, mixed_operands, within_call
from .containers import HOLD_NOTHING, NEAREST, walk
from .module_names import Calls, module_of, named, warn_of_saved
from .results import Habits, Widening


def runs_as_written(device_type: str) -> bool:
    """True if a call runs without autocast: the device has none, or the user disabled it around the call."""
    return not autocast.is_available(device_type) or autocast.disabled_by_user(device_type)


@contextlib.contextmanager
def autocast_for(device_type: str, options: Options) -> Iterator[None]:
    """Enter the autocast state in which a graph is rewritten.

    In a call of an amp-compiled callable this is the current state: the call's own, or that of the user's region around
    the graph. Elsewhere the options' dtype beats an ambient autocast's, which beats the device's default.
    """
    mixed_operands.install(device_type)
    if current_call.callable is not None:
        yield
        return
    with within_call(callable=options):
        written = runs_as_written(device_type)
        with contextlib.nullcontext() if written else torch.autocast(device_type, options.dtype, cache_enabled=False):
            yield


def device_type_of(parameter: torch.Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A call's device type: that of a module's first parameter, or of the inputs if that is offloaded to the CPU.

    Without parameters it is that of the inputs: of the first tensor that is on neither CPU nor meta, else of the first.
    Without tensors it is the accelerator's, or the CPU's. Of containers the nearest parts are looked at.
    """
    if parameter is not None and not parameter.is_cpu:
        return parameter.device.type
    tensor, values = parameter, (*args, *kwargs.values())
    for value in values:
        if not isinstance(value, torch.Tensor) and type(value) not in HOLD_NOTHING:
            values = (*islice(walk(values, {}, room=0), NEAREST),)
            break
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_cpu and not value.is_meta:
                return value.device.type
            tensor = value if tensor is None else tensor
    if tensor is not None:
        return "cpu" if tensor.is_cpu else "meta"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


class FirstParameter:
    """Finds a module's first parameter as it is now, in half a microsecond where its submodules are the same."""

    def __init__(self, module: torch.nn.Module | None) -> None:
        self._module: Any = module
        # The submodules on the way to it, each as (owner, name, submodule); its owner and name. Found in a call: a deep
        # copy gets its parameters only after its compiled call.
        self._place: tuple[list[tuple[Any, str, Any]], torch.nn.Module, str] | None = None

    def find(self) -> torch.Tensor | None:
        """Return it; None without a module, and where all parameters are on meta: those are loaded in the call."""
        if self._place is not None:
            steps, owner, name = self._place
            parameter = owner._parameters.get(name)
            for outer, step, inner in steps:
                if outer._modules.get(step) is not inner:
                    break
            else:
                if parameter is not None and not parameter.is_meta:
                    return parameter
        return self._search() if self._module is not None else None

    def _search(self) -> torch.Tensor | None:
        for path, owner in self._module.named_modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None and not parameter.is_meta:
                    steps, inner = list[tuple[Any, str, Any]](), self._module
                    for step in path.split(".") if path else ():
                        outer, inner = inner, inner._modules[step]
                        steps.append((outer, step, inner))
                    self._place = steps, owner, name
                    return parameter
        return None


def options_of(backend: Any) -> Options | None:
    """The options of a backend of ours, from the object that Dynamo holds; None for others. Raises OptionError."""
    read = getattr(getattr(backend, "compiler_fn", backend), "amp_options", None)
    return None if read is None else read(**getattr(backend, "kwargs", {}))


def _shapes_and_breaks(backend: Any, dynamic: bool | None, fullgraph: bool) -> tuple[bool | None, bool]:
    """`dynamic` and `fullgraph` from our options, else from torch.compile's arguments. Raises OptionError."""
    options = options_of(backend)
    if options is None:
        return dynamic, fullgraph
    for name, beside, ours in (
        ("dynamic", dynamic, options.dynamic),
        ("fullgraph", fullgraph or None, options.fullgraph),
    ):
        if None not in (beside, ours) and beside != ours:
            raise OptionError(f"{name}={beside} beside options={{{name!r}: {ours}}}: expected one of the two.")
    return dynamic if options.dynamic is None else options.dynamic, bool(fullgraph or options.fullgraph)


def _wrap(backend: Any, fn: Any, compiled: Any) -> Any:
    options = options_of(backend)
    if options is None:
        return compiled
    if options.watch:
        dynamo.compile_apart(backend)
    if inspect.isgeneratorfunction(inspect.unwrap(fn)):
        warn_user(
            f"{getattr(fn, '__qualname__', fn)} is a generator function: torch.compile compiles nothing of it, and its "
            "body runs after backend 'amp' has switched autocast off again. Compile the functions it calls."
        )
    if dynamo.compiles_nothing(fn):
        name = type(fn.__self__).__name__
        warn_user(
            f"{name}.compile() compiles no layer of torch.nn: Dynamo steps over them, so they run eagerly under "
            "autocast. Use torch.compile(module, backend='amp'), or call them in a module class of your own."
        )
    module, widens = module_of(fn), options.outputs == "float32"
    first_parameter = FirstParameter(module)
    warn_of_region = functools.cache(functools.partial(_warn_of_region, fn, options.dtype))
    if options.saved.modules:
        warn_of_saved(options.saved, fn)
    calls, habits = Calls(compiled, fn, options.policy), Habits()

    @functools.wraps(compiled)
    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        callback, opened = dynamo.set_frame_callback(None), None
        outer, cached = current_call.callable, torch.is_autocast_cache_enabled()
        try:
            try:
                first = first_parameter.find()
                device_type = device_type_of(first, args, kwargs)
                mixed_operands.install(device_type)
                current_call.callable = fn
                run = calls.run_uncompiled if dynamo.cannot_compile() else calls.run
                ambient = autocast.is_on(device_type)
                if not ambient and runs_as_written(device_type):
                    if options.dtype is not None and outer is None and autocast.is_available(device_type):
                        warn_of_region(device_type)
                    return run(*args, **kwargs)
                ambient_dtype = torch.get_autocast_dtype(device_type)
                leaves_wide = widens and outer is None and not ambient
                low = options.dtype or ambient_dtype
                torch.set_autocast_cache_enabled(False)
                if not ambient or low is not ambient_dtype:  # does what `torch.autocast` does, in a third of its time
                    opened = device_type, ambient, ambient_dtype
                    torch.set_autocast_dtype(device_type, low)
                    torch.set_autocast_enabled(device_type, autocast.takes(device_type, low))
                if not leaves_wide:
                    return run(*args, **kwargs)
                widening = Widening(low, (*args, *kwargs.values()), fn, module, first, habits)
                current_call.before_compiling = widening.note_arguments
                # The list alone holds the result. Given as an argument, it would be held by this frame's stack, too.
                return widening.widen([run(*args, **kwargs)])
            finally:
                _restore(outer, callback, cached, opened)
        except BaseException:  # an interrupt may have come during `_restore`
            _restore(outer, callback, cached, opened)
            raise

    marks.pass_over(under_autocast)
    under_autocast._torchdynamo_inline = _make_inlined(compiled)  # type: ignore[attr-defined]
    return under_autocast


def _warn_of_region(fn: Any, dtype: torch.dtype | None, device_type: str) -> None:
    warn_user(
        f"{named(fn)} runs in float32: found torch.autocast({device_type!r}, enabled=False) around its call, "
        f"which beats options={{'dtype': {dtype}}}; expected no region. Remove it. Or, if it switches amp on and "
        f"off, name the type there instead of in the options: torch.autocast({device_type!r}, {dtype}, enabled=...)."
    )


def _restore(outer: Any, callback: Any, cached: bool, opened: tuple[str, bool, torch.dtype] | None) -> None:
    """Restore the thread's state from before a call; `opened`: the autocast state that the call replaced, if any."""
    current_call.callable = outer
    if outer is None:
        current_call.before_compiling = None
    dynamo.set_frame_callback(callback)
    torch.set_autocast_cache_enabled(cached)
    if opened is not None:
        device_type, enabled, dtype = opened
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)


marks.pass_over(_restore)


def _make_inlined(compiled: Any) -> Any:
    """The function that Dynamo traces for a callable of ours that is called inside another compiled function."""
    name, fn = getattr(compiled, "__qualname__", repr(compiled)), compiled._torchdynamo_inline

    def inlined(*args: Any, **kwargs: Any) -> Any:
        _warn_inside_another(name)
        return fn(*args, **kwargs)

    return inlined


@torch.compiler.assume_constant_result
def _warn_inside_another(name: str) -> None:
    """Warn if Dynamo is compiling for another backend, which then compiles our callable too."""
    if current_call.callable is None:
        warn_user(
            f"{name} was compiled with backend 'amp' and is called inside a function that another backend compiles: "
            "that one compiles it too, and without autocast it runs in float32. Compile the outer function with "
            "backend 'amp', or keep this one out of it by torch.compiler.disable."
        )


def _warn_of_second_backend(compiled: Any) -> None:
    """Warn if what another backend compiles was compiled for ours: Dynamo then takes the original."""
    how = compilations.how_compiled(compiled)
    if how is not None and options_of(how.backend) is not None:
        warn_user(
            f"{named(how.original)} was compiled with backend 'amp' and is compiled again by another backend: that one "
            "takes the original, and without autocast it runs in float32. Compile it once."
        )


@functools.cache
def install() -> bool:
    """Let torch.compile wrap all callables that it compiles for our backend; False, with one warning, if it can't."""
    try:
        patches.install(
            patches.COMPILED_CALLS,
            {
                "OptimizeContext.__call__": dynamo.wrap_call(_wrap, _shapes_and_breaks, _warn_of_second_backend),
                "VariableBuilder.wrap_module": dynamo.watch_inlined_modules(_warn_inside_another),
                "TorchFunctionModeVariable.__init__": dynamo.complete_modes,
            },
        )
        patches.install(
            patches.REGIONS,
            {
                "autocast.__enter__": autocast.watch_entries,
                "autocast.__exit__": autocast.watch_exits,
                "checkpoint._get_autocast_kwargs": autocast.carry_through_checkpoints,
            },
        )
        autocast.carry_through_open_checkpoints()
    except (AttributeError, ImportError) as error:
        warn_user(
            f"ampcompile can't watch compiled calls and autocast regions in torch {torch.__version__} ({error}): open "
            "torch.autocast around the call yourself, or code that reads dtypes sees float32."
        )
        return False
    return True
