"""Starts the device in a process, before torch is imported: each module that must know of it learns it as it is loaded.

A Python whose PYTHONPATH leads to `softgpu/start` does this by itself, so subprocesses of tests have it too.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from .library import soft, torch_version

Act = Callable[[Any], None]
KEPT: list[object] = []


class AsTheyAreLoaded:
    """A finder that finds nothing of its own, but acts before or after modules are loaded."""

    def __init__(self, before: dict[str, Callable[[], None]], after: dict[str, Act]) -> None:
        self.before, self.after = before, after

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if act := self.before.pop(name, None):
            act()
        if (act_after := self.after.pop(name, None)) is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            loader: Any = spec.loader
            loader.exec_module = lambda module: (load(module), act_after(module))
        return spec


def describe() -> None:
    from . import torch_c

    torch_c.describe(sys.modules["torch._C"])


def finish(torch: Any) -> None:
    from . import ops, torch_c

    soft().take_over(bool(torch_version()[1]))
    torch_c.finish(torch)
    KEPT.append(ops.register())
    by_cpu = torch.profiler.profile

    def profile(*args: Any, activities: Any = None, **how: Any) -> Any:
        cuda = torch.profiler.ProfilerActivity.CUDA
        if activities is not None and {*activities} == {cuda}:
            return Profile()
        # Torch's own knows no such device, and says so at each op.
        return by_cpu(*args, activities=activities and [each for each in activities if each != cuda], **how)

    torch.profiler.profile = profile


def use_driver(module: Any) -> None:
    from .launching import driver

    module.driver.set_active(driver())


def configure(config: Any) -> None:
    """Inductor compiles here, for the device, and measures nothing."""
    config.compile_threads = 1
    config.use_static_triton_launcher = False
    config.shape_padding = False


def trace_anew(config: Any) -> None:
    """AOTAutograd's cache doesn't know which ops this device has kernels for."""
    config.enable_autograd_cache = False


def keep_driver(helpers: Any) -> None:
    helpers.set_driver_to_gpu = lambda: None


def take_first(heuristics: Any) -> None:
    """Of the ways to launch one of Inductor's kernels: time says nothing here."""
    tuner = heuristics.CachingAutotuner
    made = tuner.__init__

    def init(self: Any, fn: Any, triton_meta: Any, configs: Any, *args: Any, **how: Any) -> None:
        made(self, fn, triton_meta, configs[:1], *args, **how)

    tuner.__init__ = init


class Profile:
    """torch.profiler.profile of the device alone: a name for each launch, and for each op that writes."""

    def __enter__(self) -> "Profile":
        soft().note(True)
        return self

    def __exit__(self, *_: object) -> None:
        from types import SimpleNamespace

        from torch.autograd import DeviceType

        self.found = [SimpleNamespace(name=name, device_type=DeviceType.CUDA) for name in soft().note(False)]

    def events(self) -> list[Any]:
        return self.found


def begin() -> None:
    """Make this process have the device."""
    if "torch" in sys.modules:
        raise RuntimeError("the made-up GPU must start before torch is imported")
    if torch_version()[1]:  # a build for CUDA would tell on stderr that its kernels are replaced
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sys.meta_path.insert(
        0,
        AsTheyAreLoaded(
            before={"torch": soft, "torch.cuda": describe},
            after={
                "torch": finish,
                "torch._functorch.config": trace_anew,
                "torch._inductor.config": configure,
                "torch._inductor.runtime.triton_helpers": keep_driver,
                "torch._inductor.runtime.triton_heuristics": take_first,
                "triton.runtime.driver": use_driver,
            },
        ),
    )
