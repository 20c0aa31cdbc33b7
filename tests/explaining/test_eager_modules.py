"""Modules that run as Python code, though Dynamo was asked to compile them, and the graph breaks beside them."""

import inspect
import linecache
import sys
from time import sleep

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.explaining.eager_modules import ForwardTimes


class Broken(nn.Module):
    """Modules that are compiled, one that isn't, and a branch on a value."""

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lookup, self.last = nn.Linear(8, 8), self.Lookup(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lookup(self.first(x))
        if x.sum() > 1e9:
            x = x + 1
        return self.last(x)


def test_what_is_not_compiled_has_its_reason_and_its_line() -> None:
    report = ampcompile.explain(Broken(), lower="eager")(torch.randn(2, 8))
    (module,) = report.eager  # with all it holds
    assert (module.module, module.kind) == ("lookup", "Lookup") and 0 < module.share < 1
    assert inspect.getsource(Broken.Lookup.forward).splitlines()[0] in linecache.getline(*_place(module.source))
    first, second, last = (graph.reason for graph in report.graphs)
    assert "torch.compiler.disable" in first and first.endswith("x = self.lookup(self.first(x))")
    assert second.startswith("Python branches on the value of a tensor") and second.endswith("if x.sum() > 1e9:")
    assert not last and not report.breaks


def test_nothing_compiled_says_why() -> None:
    report = ampcompile.explain(nn.GRU(8, 8), lower="eager")(torch.randn(2, 3, 8))
    assert not report.graphs and [module.kind for module in report.eager] == ["GRU"]
    assert "RNN" in str(report) and report.breaks


def test_times_are_measured_without_compiling_and_the_profiler_is_put_back() -> None:
    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sleep(0.05)
            return x

    model, x = nn.Sequential(Slow(), nn.Linear(2, 2)), torch.randn(2, 2)
    times, compiled = ForwardTimes(model), torch.compile(model[1], backend="eager")
    profiles: list[str] = []
    sys.setprofile(before := lambda *_: profiles.append(""))
    try:
        with times.measured(), pytest.raises(KeyError, match="mine"):
            compiled(model[0](x))
            raise KeyError("mine")
        assert sys.getprofile() is before
    finally:
        sys.setprofile(None)
    (slow,) = times.records({"1"})
    assert (slow.module, slow.kind) == ("0", "Slow") and slow.share > 0.5, "compiling isn't counted"


def _place(source: str) -> tuple[str, int]:
    path, _, line = source.rpartition(":")
    return path, int(line)
