"""What every test gets: fresh random inputs, a fresh Dynamo, a check that torch's modes are as they were."""

import os
import random
import re
import sys
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ampcompile.torch_private import processor
from proof.results import shard

SEED = "AMPCOMPILE_TEST_SEED"
MISSING = re.compile(r"No module named '(hypothesis|rich|transformers|sklearn|matplotlib|expecttest)[.']")
"""What a GPU machine may lack that can install nothing."""


left_out: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", type=shard, default=(1, 1), metavar="I/N", help="every N-th file, from the I-th on")
    parser.addoption("--note", type=Path, metavar="FOLDER", help="note there what came of each file on this torch")


def pytest_configure() -> None:
    # Compiled C++ is kept between runs: the suite spends most of its time in g++. Inductor's keys don't tell vectors
    # of one width from those of another, as ATEN_CPU_CAPABILITY asks for them.
    cache = Path(__file__).parents[1] / ".inductor" / torch.__version__ / torch.backends.cpu.get_cpu_capability()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    os.environ.setdefault("AMPCOMPILE_VERIFY", "1")  # between every two passes
    # Set once, so that xdist's workers inherit it.
    os.environ.setdefault(SEED, str(random.SystemRandom().randrange(2**32)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.note:
        from proof import versions

        stats = terminalreporter.stats
        versions.note(
            config.option.note,
            [
                (report.nodeid, name)
                for name, kinds in zip(versions.COUNTS, (["passed"], ["skipped"], ["failed", "error"]), strict=True)
                for kind in kinds
                for report in stats.get(kind, [])
            ],
        )
    if left_out:
        packages = ", ".join(sorted(set(left_out.values())))
        terminalreporter.write_line(f"left out {len(left_out)} files without GPU tests, for want of {packages}")
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"{SEED}={os.environ[SEED]} repeats the random inputs of this run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first, step = config.option.shard
    chosen = {*sorted({item.path for item in items})[first - 1 :: step]}
    config.hook.pytest_deselected(items=[item for item in items if item.path not in chosen])
    items[:] = [item for item in items if item.path in chosen]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason=f"needs a CUDA device: torch {torch.__version__} sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """A test's numbers are drawn when it runs, from its own seed: what a file draws on import no seed repeats.

    Where only GPU tests are asked for, a file that can't be imported for want of a package is skipped: GPU tests need
    none of those, and `tests/test_bare_machine.py` sees to it that they never do.
    """
    before = torch.get_rng_state()
    report = yield
    marks = collector.config.option.markexpr
    if report.failed and "gpu" in marks.replace("not gpu", "") and (found := MISSING.search(str(report.longrepr))):
        left_out[collector.nodeid] = found[1]
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: {found[1]} is not installed")
    if report.passed and not torch.equal(torch.get_rng_state(), before):
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} draws random numbers when it is imported: draw them in a fixture"
    return report


def modes() -> dict[str, object]:
    """State of this thread that a compiled call must leave as it found it."""
    devices = ("cpu", "cuda", "xpu", "mps")
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return {
        "autocast nesting": nesting,
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        **{f"autocast on {device}": torch.is_autocast_enabled(device) for device in devices},
        **{f"autocast dtype on {device}": torch.get_autocast_dtype(device) for device in devices},
    }


@pytest.fixture(autouse=True)
def isolated(request: pytest.FixtureRequest) -> Iterator[None]:
    # As on a CPU with units for both 16-bit types: products are torch's, and equal eager autocast's bit by bit.
    units = (
        nullcontext() if request.node.get_closest_marker("units") else patch.object(processor, "multiplies", _always)
    )
    with units:
        yield from _isolated(request)


def _always(dtype: torch.dtype) -> bool:
    return True


def _isolated(request: pytest.FixtureRequest) -> Iterator[None]:
    seed = random.Random(os.environ[SEED] + request.node.nodeid).randrange(2**32)
    random.seed(seed)
    torch.manual_seed(seed)
    if weights := sys.modules.get("ampcompile.weights.binding"):
        for binding in list(weights._bindings):  # graphs that an earlier test left behind keep no copies
            binding._sets.clear()
    before = modes()
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
    after = modes()
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not changed, f"the test changed (before, after): {changed}"
