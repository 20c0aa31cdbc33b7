"""Every way to write a weight that we know of: those that must be seen always, and those that a sample sees."""

import contextlib
import copy
import ctypes
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, prune, vector_to_parameters

import ampcompile
from ampcompile.weights.table import places

ALIASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "alias: .data": lambda w: w.data,
    "alias: view of .data": lambda w: w.data.t() if w.dim() == 2 else w.data.flatten(0, 1),
    "alias: detach": lambda w: w.detach(),
    "alias: .data.detach()": lambda w: w.data.detach(),
    "alias: numpy": lambda w: w.detach().numpy(),
}


class Net(nn.Module):
    """Weights of several layouts; `aliases` share their memory, made before the first call: those the writer needs."""

    def __init__(self, writer: str = "") -> None:
        super().__init__()
        self.linear = nn.Linear(24, 18)
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(20, 12).t())
        self.frozen = nn.Parameter(torch.randn(16, 10), requires_grad=False)
        self.register_buffer("table", torch.randn(30, 4))
        if writer.startswith("tied"):
            self.tied = nn.Linear(24, 18)
            self.tied.weight = nn.Parameter(self.linear.weight.data)
        self.aliases = [ALIASES[writer](weight) for weight in self.weights()] if writer in ALIASES else []

    def weights(self) -> list[torch.Tensor]:
        return [self.linear.weight, self.conv.weight, self.transposed, self.frozen, self.table]

    def parameters_written(self) -> list[nn.Parameter]:
        return [self.linear.weight, self.conv.weight, self.transposed]


def unsampled(weight: torch.Tensor) -> tuple[int, ...]:
    """The index of an element that the sample does not look at."""
    addresses, nbytes = places(weight)
    words = {(place + i) // 4 for place in addresses.tolist() for i in range(0, nbytes, 4)}
    for index in np.ndindex(*weight.shape):
        offset = sum(i * s for i, s in zip(index, weight.stride(), strict=True)) * weight.element_size()
        if (weight.data_ptr() + offset) // 4 not in words:
            return index
    raise AssertionError("every element is sampled")


def unseen(tensor: torch.Tensor) -> np.ndarray:
    """A dense float32 tensor's memory, by its address alone: only a sample shows what is written there."""
    flat = np.ctypeslib.as_array((ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr()))
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, [4 * stride for stride in tensor.stride()])


def add_one(memory: Any, at: tuple[int, ...]) -> None:
    """To one number of a tensor or an array."""
    memory[at] += 1


def place_of(tensor: torch.Tensor, at: tuple[int, ...]) -> int:
    """Where an element lies in its storage, in elements."""
    return tensor.storage_offset() + sum(i * s for i, s in zip(at, tensor.stride(), strict=True))


def add_to_an_item(tensor: torch.Tensor, at: tuple[int, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a storage that has a type
        storage, place = tensor.detach().storage(), place_of(tensor, at)
        storage[place] = storage[place] + 1


def write_a_byte(tensor: torch.Tensor, at: tuple[int, ...]) -> None:
    storage, place = tensor.untyped_storage(), 4 * place_of(tensor, at) + 3
    storage[place] = 64 + (storage[place] == 64)


def fill_a_slice(tensor: torch.Tensor, at: tuple[int, ...]) -> None:
    begin = 4 * place_of(tensor, at)
    tensor.untyped_storage()[begin : begin + 4].fill_(0x3C)


def copy_the_storage(tensor: torch.Tensor, at: tuple[int, ...]) -> None:
    new = tensor.untyped_storage().clone()
    write_a_byte(torch.empty(0).set_(new, tensor.storage_offset(), tensor.shape, tensor.stride()), at)
    tensor.untyped_storage().copy_(new)


def write_below_the_counters(tensor: torch.Tensor, at: tuple[int, ...]) -> None:
    with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
        tensor += 1


def announce(tensor: torch.Tensor, at: tuple[int, ...]) -> None:
    add_one(unseen(tensor), at)
    ampcompile.invalidate([tensor])


@contextlib.contextmanager
def with_gradient(tensor: torch.Tensor, at: tuple[int, ...]) -> Iterator[nn.Parameter]:
    """A parameter, the tensor itself if it may be, with a gradient at one place for one step."""
    trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
    param = tensor if trained else nn.Parameter(tensor.detach())
    param.grad = torch.zeros_like(param)
    param.grad[at] = 1.0
    yield param
    param.grad = None


def step(tensor: torch.Tensor, at: tuple[int, ...]) -> None:
    with with_gradient(tensor, at) as param:
        torch.optim.SGD([param], lr=1.0, fused=True).step()


class Broken(torch.optim.SGD):
    """Writes its parameters unseen, and fails."""

    def step(self, closure: Any = None) -> None:
        super().step()
        raise ArithmeticError


def break_a_step(tensor: torch.Tensor, at: tuple[int, ...]) -> None:
    with with_gradient(tensor, at) as param, contextlib.suppress(ArithmeticError):
        Broken([param], lr=1.0, fused=True).step()


@torch.jit.script
def run_a_script(tensor: torch.Tensor) -> None:
    tensor.data.add_(1.0)


def other_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(tensor).detach()


ONE_PLACE: dict[str, Callable[[torch.Tensor, tuple[int, ...]], object]] = {
    "in place": torch.no_grad()(add_one),
    "inference_mode": torch.inference_mode()(add_one),
    ".data": lambda t, at: add_one(t.data, at),
    ".data in inference_mode": torch.inference_mode()(lambda t, at: add_one(t.data, at)),
    "foreach": torch.no_grad()(lambda t, at: torch._foreach_add_([t], 1.0)),
    "foreach on .data": lambda t, at: torch._foreach_mul_([t.data], 0.5),
    "foreach on a detached .data": lambda t, at: torch._foreach_add_([t.data.detach().view(t.shape)[at]], 1.0),
    "apply_": lambda t, at: t.detach().apply_(lambda v: v + 1),
    "map_": lambda t, at: t.detach().map_(torch.ones(t.shape, dtype=t.dtype), lambda v, one: v + one),
    "a script": lambda t, at: run_a_script(t),
    "an item of the storage": add_to_an_item,
    "a byte of the storage": write_a_byte,
    "a slice of the storage": fill_a_slice,
    "storage": copy_the_storage,
    "below the counters": write_below_the_counters,
    "a fused optimizer": step,
    "a fused optimizer that fails": break_a_step,
    "a raw pointer, announced": announce,
    "numpy": lambda t, at: add_one(t.detach().numpy(), at),
    "dlpack": lambda t, at: add_one(torch.from_dlpack(t.detach()), at),
    "dlpack, to numpy": lambda t, at: add_one(np.from_dlpack(t.detach()), at),
    "data = new": lambda t, at: setattr(t, "data", other_numbers(t)),
    "set_": torch.no_grad()(lambda t, at: t.set_(other_numbers(t))),
    "swap_tensors": lambda t, at: torch.utils.swap_tensors(t, as_it_is(t, other_numbers(t))),
}
"""Writes to any tensor at one place, which no sample need cover, or to all of it."""


def as_it_is(tensor: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Other numbers as a parameter, if the tensor is one."""
    return nn.Parameter(numbers, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else numbers


Write = Callable[[Net], object]
EXACT: dict[str, Write] = {}


def exact(name: str) -> Callable[[Write], Write]:
    return lambda write: EXACT.setdefault(name, write)


def to_each(write: Callable[[torch.Tensor, tuple[int, ...]], object]) -> Write:
    """The same at one place of each weight."""

    def write_each(net: Net) -> None:
        for weight in net.weights():
            write(weight, unsampled(weight))

    return write_each


EXACT |= {name: to_each(write) for name, write in ONE_PLACE.items()}


def through(alias: Callable[[Net], list[torch.Tensor]]) -> Write:
    """Adds to a single element, which no sample sees, of what `alias(net)` gives."""

    def write(net: Net) -> None:
        with torch.no_grad():
            for tensor in alias(net):
                add_one(tensor, unsampled(tensor))

    return write


THROUGH: dict[str, Callable[[Net], list[torch.Tensor]]] = {
    "in place, one weight": lambda net: [net.transposed],
    "detach": lambda net: [w.detach() for w in net.weights()],
    "view": lambda net: [w.t() if w.dim() == 2 else w.flatten(1) for w in net.weights()],
    ".data of a frozen weight": lambda net: [net.frozen.data],
    ".data.data": lambda net: [w.data.data for w in net.weights()],
    ".detach().data": lambda net: [w.detach().data for w in net.weights()],
    "view of .data": lambda net: [w.data.view(-1) for w in (net.linear.weight, net.frozen)],
    "state_dict().data": lambda net: [net.state_dict()["linear.weight"].data],
    **{name: lambda net: net.aliases for name in ALIASES if name != "alias: numpy"},
    "tied weight": lambda net: [net.tied.weight],
    "tied weight's .data": lambda net: [net.tied.weight.data],
}
EXACT |= {name: through(alias) for name, alias in THROUGH.items()}


def new_state(net: Net) -> dict[str, torch.Tensor]:
    state = copy.deepcopy(net.state_dict())
    for value in state.values():
        if value.numel() > 64:
            value[unsampled(value)] += 1
    return state


EXACT |= {
    "init": lambda net: nn.init.xavier_uniform_(net.linear.weight),
    "new buffer": lambda net: setattr(net, "table", torch.randn_like(net.table)),
    "load_state_dict": lambda net: net.load_state_dict(new_state(net)),
    "load_state_dict(assign=True)": lambda net: net.load_state_dict(new_state(net), assign=True),
    "prune": lambda net: prune.l1_unstructured(net.linear, "weight", amount=0.5),
    "sharded optimizer": lambda net: Sharded(net).step(),
}


def run_a_kernel(net: Net) -> None:
    """One that raises no version."""
    numbers = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
    for weight in net.weights():
        lists = [weight.detach()], [torch.ones_like(weight)], []
        torch._fused_sgd_(*lists, **numbers, nesterov=False, maximize=False, is_first_step=True)


SAMPLED: dict[str, Write] = {
    "alias: numpy": lambda net: [alias.__imul__(0.5) for alias in net.aliases],
    "raw memory": lambda net: [ctypes.memset(w.data_ptr(), 0x3C, w.nbytes) for w in net.weights()],
    "a kernel that raises no version": run_a_kernel,
}


@exact("a storage's bytes swapped")
def _(net: Net) -> None:
    weight = net.linear.weight
    row, column = unsampled(weight)
    at = 4 * (row * weight.stride(0) + column)
    weight.data[row, column] = 1.5
    net.look()  # casts again: what follows is the only write since
    weight.untyped_storage()[at : at + 4].byteswap(torch.float32)


@exact("a byte of a storage that was kept over a call")
def _(net: Net) -> None:
    storage, place = net.frozen.untyped_storage(), 4 * place_of(net.frozen, unsampled(net.frozen)) + 3
    net.look()
    storage[place] = 64 + (storage[place] == 64)


@exact("data = an average, swapped back and in again after another update of it")
def _(net: Net) -> None:
    averages = [weight.detach().clone() for weight in net.weights()]
    own = [weight.data for weight in net.weights()]
    net.swap = lambda values: [setattr(w, "data", v) for w, v in zip(net.weights(), values, strict=True)]
    net.swap(averages)
    net.look()
    net.swap(own)
    net.look()
    for average in averages:
        average[unsampled(average)] += 1
    net.swap(averages)


@exact("data = t, and t written later")
def _(net: Net) -> None:
    values = [torch.randn_like(weight) for weight in net.weights()]
    for weight, value in zip(net.weights(), values, strict=True):
        weight.data = value
    net.look()
    for value in values:
        value[unsampled(value)] += 1


@exact("new parameter")
def _(net: Net) -> None:
    net.linear.weight = nn.Parameter(torch.randn_like(net.linear.weight))
    net.transposed = nn.Parameter(torch.randn_like(net.transposed))


@exact("new parameter on the same memory")
def _(net: Net) -> None:
    net.transposed = nn.Parameter(net.transposed.data)
    net.look()
    with torch.no_grad():
        net.transposed[unsampled(net.transposed)] += 1


@exact("load_state_dict by swapping")
def _(net: Net) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net.load_state_dict(new_state(net))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@exact("vector_to_parameters")
def _(net: Net) -> None:
    params = list(net.linear.parameters())
    vector_to_parameters(parameters_to_vector(params) * 0.5, params)


@exact("module.to and back")
def _(net: Net) -> None:
    net.double()
    with torch.no_grad():
        net.linear.weight += 1e-3
    net.float()


@exact("prune.remove")
def _(net: Net) -> None:
    prune.random_unstructured(net.linear, "weight", amount=0.5)
    net.look()
    prune.remove(net.linear, "weight")


@exact("parametrize: weight_norm")
def _(net: Net) -> None:
    parametrizations.weight_norm(net.linear)
    with parametrize.cached():  # else each access is a new tensor
        assert net.linear.weight.requires_grad
        net.look()
        with torch.no_grad():
            net.linear.weight[unsampled(net.linear.weight)] += 1
        net.look()
    with torch.no_grad():
        net.linear.parametrizations.weight.original0.mul_(2)  # else rounding alone would make the weight another one
    parametrize.remove_parametrizations(net.linear, "weight")


@exact("weight_norm, a hook")
def _(net: Net) -> None:
    # What torch.nn.utils.weight_norm does before each forward: a new tensor under the weight's name.
    direction, magnitude = net.linear.weight.detach().clone(), torch.rand(18, 1)
    del net.linear.weight
    net.linear.weight = torch._weight_norm(direction, magnitude)
    net.look()
    net.linear.weight = torch._weight_norm(direction, 2 * magnitude)


@exact("embedding(max_norm=)")
def _(net: Net) -> None:
    with torch.no_grad():
        F.embedding(torch.tensor([1, 3]), net.linear.weight, max_norm=1e-3)


@exact("averaged model")
def _(net: Net) -> None:
    source = copy.deepcopy(nn.Sequential(net.linear, net.conv))
    averaged = torch.optim.swa_utils.AveragedModel(nn.Sequential(net.linear, net.conv), use_buffers=True)
    averaged.module = nn.Sequential(net.linear, net.conv)
    averaged.n_averaged += 1
    with torch.no_grad():
        source[0].weight[unsampled(source[0].weight)] += 1
    averaged.update_parameters(source)


FORMS = {"default": {}, "foreach": {"foreach": True}, "loop": {"foreach": False}, "fused": {"fused": True}}
OPTIMIZERS = [(kind, form) for kind in ("SGD", "Adam", "AdamW") for form in FORMS]
OPTIMIZERS += [("Adagrad", "fused"), ("Rprop", "default")]
OPTIMIZERS += [(kind, "default") for kind in ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop")]
COMPILED = [("Adam", "loop"), ("AdamW", "foreach"), ("SGD", "fused")]


def stepped(kind: str, form: str, compiled: bool) -> Write:
    """A step that changes one element of each weight, which no sample sees."""
    options = {"lr": 0.1, **FORMS[form], **({} if kind == "Rprop" else {"weight_decay": 0.0})}
    if kind == "ASGD":
        options["lambd"] = 0.0

    def write(net: Net) -> None:
        params = net.parameters_written()
        before = [param.detach().clone() for param in params]
        optimizer = getattr(torch.optim, kind)(params, **options)
        for param in params:
            param.grad = torch.zeros_like(param)
            param.grad[unsampled(param)] = 1.0
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        step()
        for param, old in zip(params, before, strict=True):
            assert (param != old).sum() == 1

    return write


EXACT |= {f"{kind}, {form}": stepped(kind, form, compiled=False) for kind, form in OPTIMIZERS}
EXACT |= {f"{kind}, {form}, compiled": stepped(kind, form, compiled=True) for kind, form in COMPILED}


class Sharded(torch.optim.SGD):
    """Owns a shard that shares no memory with the weights, and fills them without a trace, as collectives do."""

    def __init__(self, net: Net) -> None:
        self.net = net
        super().__init__([nn.Parameter(torch.zeros(1))], lr=0.1)

    def step(self, closure: None = None) -> None:
        for weight in self.net.parameters_written():
            unseen(weight)[unsampled(weight)] += 1


@exact("GradScaler, fused")
def _(net: Net) -> None:
    params = net.parameters_written()
    scaler = torch.amp.GradScaler("cpu")
    for param in params:
        param.grad = torch.zeros_like(param)
        param.grad[unsampled(param)] = 1.0
    scaler.scale(torch.ones(1))
    scaler.step(torch.optim.SGD(params, lr=0.1, fused=True))
    scaler.update()


class Wrapped(torch.Tensor):
    """Hands out the array of a tensor that it holds."""

    def numpy(self, *, force: bool = False) -> Any:
        return super().numpy(force=force)


EXPORTS: dict[str, Callable[[torch.Tensor], Any]] = {
    ".data": lambda t: t.data,
    "numpy()": lambda t: t.numpy(),
    "numpy() of a subclass": lambda t: t.as_subclass(Wrapped).numpy(),
    "numpy(force=True)": lambda t: t.numpy(force=True),
    "numpy() of .data": lambda t: t.data.numpy(),
    "np.asarray": np.asarray,
    "a view of the array": lambda t: t.numpy()[::-1][::-1],
    "memoryview": lambda t: np.asarray(memoryview(t.numpy())),
    "torch.from_numpy": lambda t: torch.from_numpy(t.numpy()),
    "torch.frombuffer": lambda t: torch.frombuffer(t.numpy(), dtype=t.dtype),
    "np.from_dlpack": np.from_dlpack,
    "torch.from_dlpack": torch.from_dlpack,
    "to_dlpack": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
    "torch.to_dlpack": lambda t: torch.from_dlpack(torch.to_dlpack(t)),
}
"""Ways to get writable memory of a tensor whose writers raise no counter that PyTorch knows of."""
