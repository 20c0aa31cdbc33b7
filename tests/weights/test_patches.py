"""Where there are copies torch is patched, invisibly."""

import contextlib
import importlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models import Net
from tests.weights.bindings import bind
from tests.weights.writers import unsampled


class Copied:
    """A weight, and a graph that reads its copy."""

    def __init__(self) -> None:
        self.weight, self.binding = nn.Parameter(torch.randn(6, 8)), bind([torch.bfloat16])
        self.look()

    def look(self) -> None:
        assert torch.equal(self.binding.copies([self.weight])[0], self.weight.detach().bfloat16())


@pytest.fixture
def copied() -> Iterator[Copied]:
    found = Copied()
    yield found
    found.look()


@contextlib.contextmanager
def torchs_own_data() -> Iterator[None]:
    patched = vars(Tensor)["data"]
    del Tensor.data
    try:
        yield
    finally:
        Tensor.data = patched


def reads_data(x: Tensor) -> Tensor:
    return x.data * 2 + x


TRANSFORMS: dict[str, Callable[[Tensor], Any]] = {
    "vmap": torch.func.vmap(reads_data),
    "grad": torch.func.grad(lambda x: reads_data(x).sum()),
    "functionalize": torch.func.functionalize(reads_data),
    "jvp": lambda x: torch.func.jvp(reads_data, (x,), (x,)),
    "make_fx": lambda x: make_fx(reads_data)(x).code,
    "pre-dispatch": lambda x: make_fx(reads_data, pre_dispatch=True)(x).code,
    "fake": lambda x: make_fx(reads_data, tracing_mode="fake")(x).code,
    "export": lambda x: export_of_data(x, strict=False),
    "strict export": lambda x: export_of_data(x, strict=True),
    "vmap over another": lambda x: torch.func.vmap(lambda row: row + x.data.sum())(x.detach()),
}


def export_of_data(weight: Tensor, strict: bool) -> str:
    reads = Net(lambda m, x: x @ m.weight.data.t(), weight=weight)
    return str(torch.export.export(reads, (torch.ones(3, 8),), strict=strict).graph)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_data_of_tensors_in_transforms_and_traces(name: str, copied: Copied) -> None:
    def outcome() -> Any:
        try:
            return repr(TRANSFORMS[name](copied.weight))
        except RuntimeError as error:
            return str(error).partition("\n")[0]

    ours = outcome()
    with torchs_own_data():
        assert outcome() == ours
    copied.weight.data[2, 3] += 1


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Seen, Dispatched])
def test_modes_see_what_they_see_without_us(mode: type, copied: Copied) -> None:
    def use(tensor: Tensor) -> list[str]:
        with mode() as seen:
            tensor.data.add_(1)
            tensor.data = tensor.data.view(6, 8)
        return seen.names

    ours = use(copied.weight)
    assert ours == use(nn.Parameter(torch.randn(6, 8)))
    with torchs_own_data():
        assert ours == use(copied.weight)


def numpys_sum(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2) + x.detach().numpy().sum()


def test_arrays_and_capsules_of_tensors_with_copies_are_as_torchs_own(copied: Copied) -> None:
    weight = copied.weight

    def use(tensor: nn.Parameter) -> list[Any]:
        found: list[Any] = []
        for export in (Tensor.numpy, Tensor.__dlpack__, torch.from_dlpack, np.from_dlpack, np.asarray):
            try:
                found.append(export(tensor))
            except (BufferError, RuntimeError) as error:
                found.append((type(error), str(error)))
        free = tensor.detach()
        with Seen() as seen:
            array = free.numpy()
        with Dispatched() as dispatched:
            free.numpy(force=True)
        found += [seen.names, dispatched.names, array.shape, array.strides, array.flags.writeable, array.dtype]
        assert array.ctypes.data == torch.from_dlpack(free).data_ptr() == tensor.data_ptr()
        return found

    assert use(weight) == use(nn.Parameter(torch.randn(6, 8)))
    with pytest.raises(TypeError):
        weight.detach().numpy(True)
    compiled = torch.compile(numpys_sum, backend="eager")
    torch.testing.assert_close(compiled(weight.detach()), numpys_sum(weight.detach()))
    for name in ("numpy", "__dlpack__", "set_", "untyped_storage"):
        assert pickle.loads(pickle.dumps(getattr(Tensor, name))) is getattr(Tensor, name)


def test_lazy_modules_and_swapped_tensors(copied: Copied) -> None:
    lazy = nn.LazyLinear(4)
    assert lazy(torch.ones(2, 3)).shape == (2, 4)
    torch.utils.swap_tensors(copied.weight.data, torch.randn(6, 8))
    for _ in range(2):
        torch.utils.swap_tensors(copied.weight, nn.Parameter(torch.randn(6, 8)))
        copied.look()
        copied.weight.data = torch.randn(6, 8)


def test_optimizers_have_no_graph_breaks_of_ours(copied: Copied) -> None:
    optimizer: Any = importlib.import_module("torch.optim.optimizer")

    def breaks(**options: Any) -> list[str]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        param = nn.Parameter(torch.ones(3))
        param.grad = torch.ones(3)
        torch.compile(torch.optim.Adam([param], lr=0.1, **options).step, backend="eager")()
        return sorted(torch._dynamo.utils.counters["graph_break"])

    hooks = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
    for options in ({}, {"fused": True}):
        ours, kept = breaks(**options), [dict(each) for each in hooks]
        for each in hooks:
            each.clear()
        stock = breaks(**options)
        for each, entries in zip(hooks, kept, strict=True):
            each.update(entries)
        assert ours == stock


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_write_through_data_that_another_backend_compiled(backend: str, copied: Copied) -> None:
    def write(tensor: Tensor) -> None:
        tensor.data[2, 3] += 1

    compiled = torch.compile(write, backend=backend)
    for _ in range(3):
        compiled(copied.weight)
        copied.look()


def test_a_compiled_graph_is_not_compiled_again_when_patches_come_and_go() -> None:
    compiled = torch.compile(lambda x: x.data * 2, backend="eager")
    x = torch.randn(3)
    compiled(x)
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = Copied()
    compiled(x)
    del found
    compiled(x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == frames


def test_a_sharer_that_leaves_resized_memory_as_another_comes() -> None:
    weight, binding = nn.Parameter(torch.randn(20, 20)), bind([torch.bfloat16])
    binding.copies([weight])
    leaves = weight.data
    binding.copies([weight])
    weight.untyped_storage().resize_(1 << 22)
    leaves.data = torch.zeros(3)
    comes = weight.data
    for _ in range(2):
        binding.copies([weight])
        comes[unsampled(weight)] += 1
        assert torch.equal(binding.copies([weight])[0], weight.detach().bfloat16())
