"""What every test gets: its own random inputs, a fresh Dynamo, a check that torch's modes are as they were.

The inputs are the same in each run, drawn from the test's name and one fixed seed. `make fuzz` draws others.
"""

import gc
import json
import logging
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.numbers import modes
from proof.results import shard
from softgpu import choice, ptxas_pattern
from tests.devices import on_a_cpu
from tests.emulated.left_out import LEFT_OUT

SEED = "AMPCOMPILE_TEST_SEED"
FIXED = "0"
DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds that each file's tests took, for `make test` to start the longest first."""
MISSING = re.compile(r"No module named '(hypothesis|rich|transformers|sklearn|matplotlib|expecttest)[.']")
"""What a GPU machine may lack that can install nothing."""


files = count(1)
left_out: dict[str, str] = {}
"""Files that couldn't be imported, and for want of what."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", type=shard, default=(1, 1), metavar="I/N", help="every N-th file, from the I-th on")
    parser.addoption(
        "--note-durations", action="store_true", help=f"write {DURATIONS.name}, from the whole suite's run"
    )
    parser.addoption("--until", type=float, metavar="SECONDS", help="begin no test after this time, of Python's clock")
    parser.addoption("--one-case", type=Path, metavar="FILE", help="one case of each test but those named there")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Compiled C++ is kept between runs: the suite spends most of its time in g++. Inductor's keys don't tell vectors
    # of one width from those of another, as ATEN_CPU_CAPABILITY asks for them.
    cache = Path(__file__).parents[1] / ".inductor" / torch.__version__ / torch.backends.cpu.get_cpu_capability()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    os.environ.setdefault("AMPCOMPILE_VERIFY", "1")  # between every two passes
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the workers have all cores; a pool imports torch anew
    if compiler_knows_every_vector():
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    os.environ.setdefault(SEED, FIXED)
    gc.set_threshold(100_000, 20, 100)  # a compiler makes much that lives; each test's garbage goes after its file
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        if not devices.is_available():  # a seed that waits for a device keeps the text of its call stack, for 0.3 ms
            devices.manual_seed_all = _no_seed
    # pytest listens to every logger that passes nothing on; who listens to this one has torch describe each graph.
    logging.getLogger("torch.__trace").propagate = True
    if find_spec("triton"):
        ptxas_pattern.watch()
    if find_spec("hypothesis"):
        from hypothesis import HealthCheck, settings

        fixed = os.environ[SEED] == FIXED
        checks = list(HealthCheck)  # they depend on how fast this machine is
        settings.register_profile(
            "tests", derandomize=fixed, database=None, deadline=None, suppress_health_check=checks
        )
        settings.load_profile("tests")
        config.option.hypothesis_seed = None if fixed else os.environ[SEED]


def compiler_knows_every_vector() -> bool:
    """Whether Inductor needn't try: each of our processes else spends a second on it, with empty caches thirteen."""
    command = [os.environ.get("CXX", "g++"), "-dumpversion"]
    try:
        version = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return "g++" in command[0] and int(version.split(".")[0]) >= 12


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.option.until:
        session.config.pluginmanager.register(Deadline(session))


class Deadline:
    """Ends a run when its time is over."""

    def __init__(self, session: pytest.Session) -> None:
        self.session = session

    def pytest_runtest_logreport(self) -> None:
        if time.time() > self.session.config.option.until:
            runner = self.session.config.pluginmanager.getplugin("dsession") or self.session  # xdist's, if it runs them
            runner.shouldstop = "the time is over"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.note_durations:
        taken: Counter[str] = Counter()
        for report in (report for reports in terminalreporter.stats.values() for report in reports):
            if isinstance(report, pytest.TestReport):
                taken[report.nodeid.split("::")[0]] += report.duration
        lines = [f"{json.dumps(name)}: {round(seconds, 1)}" for name, seconds in sorted(taken.items())]
        DURATIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    if left_out:
        packages = ", ".join(sorted(set(left_out.values())))
        terminalreporter.write_line(f"left out {len(left_out)} files without GPU tests, for want of {packages}")
    if terminalreporter.stats.get("failed") and os.environ[SEED] != FIXED:
        terminalreporter.write_line(f"{SEED}={os.environ[SEED]} repeats the random inputs of this run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first, step = config.option.shard
    chosen = {*sorted({item.path for item in items})[first - 1 :: step]}
    config.hook.pytest_deselected(items=[item for item in items if item.path not in chosen])
    items[:] = [item for item in items if item.path in chosen]
    if config.option.one_case:
        items[:] = one_case_of_each(items, {*config.option.one_case.read_text().splitlines()})
    else:
        longest_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    if choice.is_made_up():
        for item in items:
            if reason := next((LEFT_OUT[name] for name in LEFT_OUT if item.nodeid.startswith(name)), ""):
                item.add_marker(pytest.mark.skip(reason=f"not on the made-up GPU: {reason}"))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason=f"needs a CUDA device: torch {torch.__version__} sees none. {choice.why_none()}")
    for item in items:
        if item.get_closest_marker("gpu") or item.get_closest_marker("emulated"):
            item.add_marker(skip)


def one_case_of_each(items: list[pytest.Item], without: set[str]) -> list[pytest.Item]:
    """One of the parametrized cases of each test that isn't named, and the order of tests, by the run's seed."""
    rng, cases_of = random.Random(os.environ[SEED]), {}
    for item in items:
        if without_case(item.nodeid) not in without:
            cases_of.setdefault(without_case(item.nodeid), []).append(item)
    drawn = [rng.choice(cases) for cases in cases_of.values()]
    rng.shuffle(drawn)
    return drawn


def without_case(nodeid: str) -> str:
    """The test that a parametrized case is of."""
    return nodeid.partition("[")[0]


def longest_first(items: list[pytest.Item], workers: int) -> None:
    """Deal files, longest first, into a pile for each worker: xdist gives each a stretch of the list to begin with."""
    taken = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.split("::")[0], []).append(item)
    files = sorted(by_file, key=lambda name: -taken.get(name, 0.0))
    items[:] = [item for pile in range(workers) for name in files[pile::workers] for item in by_file[name]]


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


@pytest.fixture(scope="session", autouse=True)
def kernels_in_one_library() -> None:
    from tests import one_library  # not where pytest begins: a process that only hands out tests needs no Inductor

    one_library.install()


@pytest.fixture(scope="module", autouse=True)
def heap_of_other_files() -> None:
    """Freeze what other files left: no collection walks it."""
    if next(files) % 20 == 0:  # what has become garbage goes now
        gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def isolated(request: pytest.FixtureRequest) -> Iterator[None]:
    # As on a CPU with units for both 16-bit types: products are torch's, and equal eager autocast's bit by bit.
    cpu = request.node.get_closest_marker("cpu")
    units = request.node.get_closest_marker("units") and not cpu
    with nullcontext() if units else on_a_cpu(**cpu.kwargs if cpu else {}):
        yield from _isolated(request)


def _no_seed(seed: int) -> None:
    pass


def _no_latency(*_: object) -> float:
    return 0.0


def _isolated(request: pytest.FixtureRequest) -> Iterator[None]:
    seed = random.Random(os.environ[SEED] + request.node.nodeid).randrange(2**32)
    random.seed(seed)
    torch.manual_seed(seed)
    if weights := sys.modules.get("ampcompile.weights.store"):
        for binding in list(weights.store.bindings):  # graphs that an earlier test left behind keep no copies
            binding.last = None
            binding.sets.clear()
    if guards := sys.modules.get("torch._dynamo.guards"):  # measured with empty caches, 20 ms for each graph
        guards.profile_guard_manager = _no_latency
    before = modes()
    drawn = torch.get_rng_state(), random.getstate()
    yield
    if choice.is_made_up():
        torch.cuda.synchronize()  # what a test leaves running hinders no other
    by_hypothesis = getattr(getattr(request.node, "obj", None), "is_hypothesis_test", False)
    if by_hypothesis or not torch.equal(torch.get_rng_state(), drawn[0]) or random.getstate() != drawn[1]:
        request.node.user_properties.append(("draws", True))
    if (dynamo := sys.modules.get("torch._dynamo")) and dynamo.convert_frame.FRAME_COUNTER:
        dynamo.reset()
    after = modes()
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not changed, f"the test changed (before, after): {changed}"
