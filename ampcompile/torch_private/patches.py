"""Every patch of torch that the project makes: what, when, why, and how it is undone.

A patch changes what torch does: it replaces an attribute, adds an entry to one of torch's tables, or changes a single
object that torch made for us. `TABLE` names them all, and only the functions below it make them. The replacements are
defined in the rooms above, where they belong, and passed in. State that torch lets users set, such as autocast's or a
configuration's, is no patch; nor is Dynamo's state of the frame that it is tracing.
"""

import contextlib
import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_resolve = cache(resolve_name)


@dataclass(frozen=True, eq=False)
class Group:
    """Patches that come and go together: why each is made, by the full name of what is changed."""

    name: str
    when: str
    undone: str
    patches: dict[str, str]


COMPILED_CALLS = Group(
    "compiled calls",
    when="when the backend is loaded",
    undone="never: for other backends it changes nothing, or mends a call",
    patches={
        "torch._dynamo.eval_frame.OptimizeContext.__call__": (
            "what is compiled for our backend is called under autocast; torch has no public hook around calls"
        ),
        "torch._dynamo.variables.builder.VariableBuilder.wrap_module": (
            "notices when another backend compiles a module that was compiled for ours"
        ),
        "torch._dynamo.variables.torch_function.TorchFunctionModeVariable.__init__": (
            "forgets where a mode's class is: then Dynamo fails where `keep_fp32` decorates in a compiled function"
        ),
    },
)
REGIONS = Group(
    "regions",
    when="when the backend is loaded",
    undone="never: what torch.autocast does stays the same",
    patches={
        "torch.amp.autocast_mode.autocast.__enter__": "shows which device a region is for, and who asks for it",
        "torch.amp.autocast_mode.autocast.__exit__": "shows which region ends",
        "torch.utils.checkpoint._get_autocast_kwargs": (
            "a checkpoint that begins where autocast is off, by no region, is recomputed under the same conditions"
        ),
    },
)
TRACING = Group(
    "tracing",
    when="at the first call or graph for a device type",
    undone="never: outside of our calls it changes nothing",
    patches={
        "torch._ops.OpOverload.py_impl": (
            "registers kernels of ours: ops whose mixed dtypes eager autocast refuses promote them instead"
        ),
        "torch._subclasses.fake_impls.op_implementations_dict": "`_grouped_mm` of float32 and float16 traces",
    },
)
LOWERING = Group(
    "lowering",
    when="before Inductor compiles a graph of ours",
    undone="never: only ops without a lowering get one",
    patches={"torch._inductor.lowering.lowerings": "ops of ours, and torch's that our graphs keep whole"},
)
SCHEDULING = Group(
    "scheduling",
    when="before Inductor compiles a graph of ours",
    undone="never: what other backends compile becomes right too, and warns as before",
    patches={
        "torch._inductor.scheduler.SchedulerNode.recompute_size_and_body": (
            "before 2.15 forgets which write comes before a read: on CPUs, gradients are read before they are summed"
        ),
        "torch._inductor.scheduler.Scheduler.fusable_weak_dep": (
            "before 2.15 writes a buffer in the loop that reads other places of it, if it was written before"
        ),
        "torch._inductor.lowering.mutate_to": (
            "before 2.15 forgets writes through views: the next write of the whole value comes before them"
        ),
        "torch._inductor.async_compile.AsyncCompile.triton": (
            "from 2.13 on warns, as our graphs are compiled to round, that there is no CUDA toolkit"
        ),
    },
)
ONE_GRAPH = Group(
    "one graph",
    when="when a graph of ours is traced or compiled",
    undone="when that ends; on a compiled graph's own functions, when the graph is freed",
    patches={
        "torch._functorch._aot_autograd.runtime_wrappers.RuntimeWrapper.post_compile": (
            "shows which autograd functions AOTAutograd makes or loads"
        ),
        "torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode.__torch_dispatch__": (
            "one trace's: takes apart composite ops without a rule; gives an op that returns its argument a node"
        ),
        "torch.autograd.Function.forward": "one compiled graph's: keeps its inputs for a second backward",
        "torch.autograd.Function.backward": (
            "one compiled graph's, and its `_backward_impl`: differentiates again, keeps what another backward reads"
        ),
    },
)
EXPLAINING = Group(
    "explaining",
    when="when `explain` or `audit` runs a call",
    undone="when the call returns",
    patches={
        "torch._dynamo.pgo._CODE_STATE": "Dynamo learns no sizes from the call",
        "torch._dynamo.convert_frame._bytecode_hooks": "shows whose compiled code is to be dropped",
        "torch.nn.Module._compiled_call_impl": "one module's, which `compile()` set: it is compiled anew",
    },
)
SHARDED_WEIGHTS = Group(
    "sharded weights",
    when="when `shard_policy` is called",
    undone="never: only our own class of weights is seen otherwise",
    patches={
        "torch._dynamo.variables.builder.infer_subclass_type": "Dynamo traces the class as a plain parameter",
        "torch._dynamo.variables.builder.VariableBuilder.wrap_tensor": (
            "notices when another backend compiles a weight that FSDP gathers in 16 bits"
        ),
    },
)
OPTIMIZER_HOOKS = Group(
    "optimizer hooks",
    when="when the first copy of a weight is made; one more by each capture, for its time",
    undone="never: without copies they do nothing",
    patches={
        "torch.optim.optimizer._global_optimizer_pre_hooks": "an optimizer is about to write its parameters",
        "torch.optim.optimizer._global_optimizer_post_hooks": "an optimizer has written its parameters",
    },
)
COPIES = Group(
    "copies",
    when="when the first copy of a weight is made",
    undone="never: without copies they change nothing",
    patches={
        "torch.Tensor.data": "gives out an alias with a version counter of its own",
        **dict.fromkeys(
            ("torch.Tensor.numpy", "torch.Tensor.__dlpack__", "torch.utils.dlpack.to_dlpack", "torch.to_dlpack"),
            "gives out memory to write without a version counter",
        ),
        "torch.Tensor.untyped_storage": "gives out the storage, whose methods write without a version counter",
        "torch.Tensor.set_": "shares another tensor's memory, not its version counter",
    },
)
SHARDS = Group(
    "shards",
    when="when the first copy of a DTensor's part is made",
    undone="never: without copies it changes nothing",
    patches={
        "torch.distributed.tensor._dispatch.OpDispatcher._dispatch_fast_path_python_tail": (
            "operations on DTensors write their parts without raising a version"
        ),
    },
)
READS = Group(
    "reads on the host",
    when="while `capture_step` warms up a step on a CPU",
    undone="when that call returns",
    patches={
        "torch.Tensor.item": "waits for a GPU, which a CUDA graph can't: refused on a CPU as it would be there",
        "torch.Tensor.tolist": "the same",
        "torch.Tensor.__bool__": "the same, as in `if tensor`",
        "torch.Tensor.__float__": "the same",
        "torch.Tensor.__int__": "the same",
        "torch.Tensor.__index__": "the same",
    },
)
MAY_READ = ("torch.optim", "torch._dynamo", "torch._functorch", "torch._inductor", "torch._subclasses", "torch.fx")
"""Modules of torch that read counts, which stay on the host, and numbers while they compile."""
TABLE = tuple(group for group in list(vars().values()) if isinstance(group, Group))

Wrap = Callable[[Any], Any]  # makes the replacement of an attribute from its original
_MISSING = object()
_installed: set[Group] = set()
_replaced: defaultdict[Group, list[tuple[Any, str, Any]]] = defaultdict(list)


def install(group: Group, wraps: Mapping[str, Wrap]) -> None:
    """Replace the attributes of a group, unless that was done: `wraps` has the wrap of each by its place.

    Raises AttributeError or ImportError where this torch has no such attribute; nothing is replaced then.
    """
    if group in _installed:
        return
    assert wraps.keys() == set(map(place_of, group.patches))
    uninstall(group)  # what an interrupted call replaced
    places = [(*owner_and_name(what), wraps[place_of(what)]) for what in group.patches]
    originals = [getattr(owner, name) for owner, name, _ in places]
    for (owner, name, wrap), original in zip(places, originals, strict=True):
        _replaced[group].append((owner, name, vars(owner).get(name, _MISSING)))
        _replace(owner, name, wrap(original))
    _installed.add(group)


def place_of(what: str) -> str:
    """The names of owner and attribute, such as `Tensor.data`."""
    return ".".join(what.split(".")[-2:])


def owner_and_name(what: str) -> tuple[Any, str]:
    """The object that holds what is patched, and its name there. Raises AttributeError or ImportError for none."""
    owner, _, name = what.rpartition(".")
    return _resolve(owner), name


def is_installed(group: Group) -> bool:
    """Return True if all patches of a group are installed."""
    return group in _installed


def uninstall(group: Group) -> None:
    """Put back what `install` replaced, if anything."""
    _installed.discard(group)
    replaced = _replaced[group]
    while replaced:
        owner, name, original = replaced[-1]
        if original is not _MISSING:
            setattr(owner, name, original)
        elif name in vars(owner):
            delattr(owner, name)
        replaced.pop()


def _replace(owner: Any, name: str, replacement: Any) -> None:
    if not isinstance(replacement, property):  # so that it pickles as the original
        kind = getattr(owner, "__qualname__", "")
        replacement.__qualname__ = f"{kind}.{name}".strip(".")
        replacement.__module__ = owner.__module__ if kind else owner.__name__
    setattr(owner, name, replacement)


@contextlib.contextmanager
def replaced(place: str, wrap: Wrap) -> Iterator[None]:
    """Temporarily replace one attribute of the table."""
    owner, name = owner_and_name(next(what for group in TABLE for what in group.patches if place_of(what) == place))
    with _restored(owner, name) as original:
        _replace(owner, name, wrap(original))
        yield


@contextlib.contextmanager
def _restored(owner: Any, name: str) -> Iterator[Any]:
    original = getattr(owner, name)
    try:
        yield original
    finally:
        setattr(owner, name, original)


def replace_on(instance: Any, name: str, replacement: Any) -> None:
    """Replace an attribute of a single object that torch made for us, for as long as the object lives."""
    setattr(instance, name, replacement)


def add_tracing_kernel(op: Any, key: Any, kernel: Callable[..., Any]) -> None:
    """Make the Python dispatcher, which only tracing switches on, call a kernel for an op at a dispatch key."""
    op.py_impl(key)(kernel)


def add_fake_kernel(op: Any, kernel: Callable[..., Any]) -> None:
    """Make fake tensors run `kernel(mode, op, *args, **kwargs)` for an op without one; NotImplemented: as before."""
    from torch._subclasses import fake_impls

    if op not in fake_impls.op_implementations_dict:
        fake_impls.register_op_impl(op)(kernel)


def add_lowering(op: Any, lower: Callable[..., Any]) -> None:
    """Add a function as Inductor's lowering of an op, unless it has one."""
    from torch._inductor.lowering import lowerings, register_lowering

    if op not in lowerings:
        register_lowering(op, type_promotion_kind=None)(lower)


def add_optimizer_hooks(before: Callable[..., None], after: Callable[..., None]) -> None:
    """Add functions to be called before and after the step of every optimizer."""
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


@contextlib.contextmanager
def before_steps(hook: Callable[..., None]) -> Iterator[None]:
    """Call a function before the step of every optimizer, in the context."""
    handle = register_optimizer_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def watch_dynamo(hook: Any) -> Iterator[None]:
    """Call `hook(original code, compiled code)` for all that Dynamo compiles; forget the sizes that it learns."""
    from torch._dynamo import convert_frame, pgo

    with _restored(pgo, "_CODE_STATE") as sizes:
        pgo._CODE_STATE = copy.deepcopy(sizes)
        with convert_frame.register_bytecode_hook(hook):
            yield


@contextlib.contextmanager
def uncompiled(f: Any) -> Iterator[None]:
    """Temporarily undo `module.compile()`; callables that aren't modules stay as they are."""
    if not isinstance(f, torch.nn.Module) or f._compiled_call_impl is None:
        yield
        return
    with _restored(f, "_compiled_call_impl"):
        f._compiled_call_impl = None
        yield


def missing() -> list[str]:
    """Return the names of patches whose place the installed torch lacks. Imports Dynamo and Inductor to look."""

    def is_there(what: str) -> bool:
        try:
            return hasattr(*owner_and_name(what))
        except (AttributeError, ImportError):
            return False

    return [what for group in TABLE for what in group.patches if not is_there(what)]


@contextlib.contextmanager
def messages_of(logger: logging.Logger) -> Iterator[list[str]]:
    """Collect what a logger of torch's says meanwhile."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
