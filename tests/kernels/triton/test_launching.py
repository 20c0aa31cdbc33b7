"""The second launch of a kernel hands Triton's launcher what the first did, without Triton's own way.

A driver made up stands for a GPU: kernels are compiled for one, and what would be launched is written down.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ampcompile.kernels import fp8
from ampcompile.kernels.adam import AdamTensors
from ampcompile.kernels.sgd import SgdTensors
from ampcompile.kernels.step import grad_table, kinds_of, table_of
from ampcompile.kernels.triton import adam_and_sgd, cast_many, launching, loss_scaling, quantize_many

BF16 = torch.bfloat16


class MadeUpDriver:
    """What Triton asks of a driver, of a GPU with compute capability 9.0, under a number that no real one has."""

    launches: ClassVar[list[tuple[Any, ...]]] = []  # of all tests, as Triton keeps launchers

    def __init__(self) -> None:
        self.launches.clear()
        self.utils = SimpleNamespace(
            load_binary=lambda name, *_: (name, f"function {name}", 32, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 2**17, "warpSize": 32},
        )

    def get_current_device(self) -> int:
        return 99

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: self.launches.append(arguments)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> MadeUpDriver:
    made_up = MadeUpDriver()
    for module, name, value in ((launching, "compiled_forms", {}), (driver, "_active", made_up)):
        monkeypatch.setattr(module, name, value)
    return made_up


def plain(launch: tuple[Any, ...]) -> list[Any]:
    """Grid, stream, function, its description and arguments, without hooks; tensors as their addresses."""
    return [*launch[:6], *(a.data_ptr() if isinstance(a, Tensor) else a for a in launch[9:])]


def without_addresses(launches: list[list[Any]]) -> list[list[Any]]:
    return [[each for each in launch if not (isinstance(each, int) and each > 2**40)] for launch in launches]


SIZES = [(70,), (9000,), (3, 5)]


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.ones(size, dtype=dtype) for size in SIZES]


def step(name: str, flag: Tensor | None = None, quantized: bool = False) -> Callable[[], object]:
    kind, settings = (AdamTensors, 7) if name == "adam" else (SgdTensors, 6)
    rows: dict[str, list[Any]] = {state: tensors() for state in ("params", "grads", *kind.STATES)}
    if name == "adam":
        rows |= {"steps": [torch.zeros(()) for _ in SIZES], "max_exp_avg_sqs": [None] * 3}
    table = table_of(kind([], group_of=[0, 0, 0], **rows))
    table.kinds, workspace = kinds_of(table), dict[Any, Any]()
    if quantized:
        weight = torch.ones(32, 48)
        quantize_many.take(table, {1: (fp8.buffer_like(weight), weight)})
    return lambda: adam_and_sgd.step_(name, table, np.ones((1, settings)), [1.0], flag, flag, workspace)


def check() -> Callable[[], object]:
    grads, workspace, kept = tensors(), dict[Any, Any](), list[Any]()
    table = grad_table([*grads, torch.ones(4, dtype=BF16)])
    return lambda: kept.append((grads, loss_scaling.check_grads(table, torch.ones(()), None, 1.0, workspace)))


def scale() -> Callable[[], object]:
    given = torch.ones(()), torch.zeros((), dtype=torch.int32), torch.zeros((), dtype=torch.int32), [torch.zeros(3)[1]]
    return lambda: loss_scaling.update_scale_(*given, 2.0, 0.5, 2000, 0.0, 2.0**64)


def cast() -> Callable[[], object]:
    weights, copies = tensors(), tensors(BF16)
    return lambda: cast_many.cast_many_(copies, weights)


FAMILIES: dict[str, Callable[[], Callable[[], object]]] = {
    "adam": lambda: step("adam", torch.zeros(())),
    "adam of quantized weights, without a flag": lambda: step("adam", quantized=True),
    "sgd": lambda: step("sgd"),
    "check": check,
    "update_scale": scale,
    "cast": cast,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_second_launch_is_the_first_without_tritons_way(
    gpu: MadeUpDriver, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = FAMILIES[family]()
    launch()
    first = list(map(plain, gpu.launches))
    assert first and all(launch[:3][1:] == (1, 1) for launch in gpu.launches)
    gpu.launches.clear()
    from triton.runtime.jit import JITFunction

    monkeypatch.setattr(JITFunction, "run", None)  # Triton's own way
    launch()
    second = list(map(plain, gpu.launches))
    if family.startswith(("check", "cast")):  # whose result or table is new memory each time
        first, second = without_addresses(first), without_addresses(second)
    assert second == first
    hooks_aside = {launch[6:9] for launch in gpu.launches}
    assert hooks_aside == {(None, None, None)}


def test_other_alignments_and_widths_of_numbers_are_other_kernels(gpu: MadeUpDriver) -> None:
    flags, tracker = torch.zeros(8), torch.zeros((), dtype=torch.int32)
    even, odd = flags[0], flags[1]

    def is_new(found_inf: Tensor, interval: int, dtype: torch.dtype = torch.float32) -> bool:
        """True of a launch in Triton's own way, which is given tensors."""
        scale = torch.ones((), dtype=dtype)
        loss_scaling.update_scale_(scale, tracker, tracker, [found_inf], 2.0, 0.5, interval, 0.0, 1.0)
        return isinstance(gpu.launches[-1][9], Tensor)

    assert is_new(even, 2000) and not is_new(even, 2001), "numbers don't matter"
    assert is_new(odd, 2000) and is_new(even, 2**40) and is_new(even, 9, torch.float64)
    assert not any((is_new(odd, 9), is_new(even, 2**41), is_new(even, 9), is_new(even, 9, torch.float64)))


def test_a_profilers_hooks_see_launches(gpu: MadeUpDriver) -> None:
    from triton import knobs

    hook, launch = knobs.runtime.launch_exit_hook, scale()
    launch()
    hook.add(ignored := len)
    try:
        launch()
    finally:
        hook.remove(ignored)
    assert isinstance(gpu.launches[-1][9], Tensor), "by Triton's own way"


def test_no_kernel_that_is_started_so_specializes_on_a_number() -> None:
    for kernel, count in [
        (adam_and_sgd.amp_adam_prepare, 4),
        (adam_and_sgd.amp_adam, 4),
        (adam_and_sgd.amp_sgd, 4),
        (loss_scaling.amp_check_grads, 8),
        (loss_scaling.amp_unscale, 4),
        (loss_scaling.amp_update_scale, 4),
        (cast_many.amp_cast, 1),
        (quantize_many.amp_magnitudes, 2),
        (quantize_many.amp_quantize, 2),
    ]:
        numbers = [param for param in kernel.params[count:] if not param.is_constexpr]
        assert all(param.do_not_specialize or param.name == "max_norm" for param in numbers), kernel


@pytest.mark.gpu
def test_a_started_kernel_writes_what_tritons_own_way_writes() -> None:
    results = []
    for _ in range(3):
        copies, weights = [torch.empty(size, dtype=BF16, device="cuda") for size in SIZES], tensors()
        cast_many.cast_many_(copies, [(w * 1.001).cuda() for w in weights])
        results.append([each.clone() for each in copies])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    assert results[0][0].float().mean() > 0.9
