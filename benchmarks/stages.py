"""The stages of a run: named jobs, each of which gives rows and can be repeated alone."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import torch

from ampcompile.kernels import native
from benchmarks import (
    kernel_cases,
    loops,
    loss_cases,
    published_cases,
    scaler_step,
    small_steps,
)
from benchmarks.apart import apart
from benchmarks.candidate import Candidate
from benchmarks.compile_time import import_time, pass_growth
from benchmarks.peers import AMP, BASELINE, PEERS
from benchmarks.race import race
from benchmarks.records import Row
from benchmarks.small_models import MODELS
from benchmarks.small_steps import CALL, STEP
from benchmarks.works import Work, on_cpu, on_cuda, tiny

Jobs = dict[str, Callable[[], list[Row]]]
WHOLE_JOB = 540.0
"""Seconds that a function may take which is a job by itself."""


@dataclass(frozen=True)
class Setup:
    """How a run measures."""

    device: str
    """Where it runs."""
    plan: str
    """The device whose jobs these are: a rehearsal takes the jobs of a GPU, tiny, on the CPU."""
    budget: float
    """Seconds that the timing of one case takes, or so."""
    tiny: bool
    seed: Path
    """Caches that hold what is compiled once per machine: probes of the processor's vector units, our C++ kernels."""
    together: bool = False
    """Peers compile at the same time."""

    @contextmanager
    def caches(self) -> Iterator[Path]:
        """Caches for one process, empty but for the seed."""
        with TemporaryDirectory() as folder:
            yield Path(shutil.copytree(self.seed, folder, dirs_exist_ok=True))

    def call(
        self, function: Callable[..., list[Row]], *args: object, environment: Mapping[str, str] = MappingProxyType({})
    ) -> list[Row]:
        """The result of a function, called in a process of its own."""
        with self.caches() as caches, apart(partial, function, *args, caches=caches, environment=environment) as other:
            other.patience = WHOLE_JOB
            return other.ask("__call__")

    def works(self) -> dict[str, tuple[Work, ...]]:
        """Stages that race peers on models."""
        stages = on_cpu() if self.plan == "cpu" else on_cuda()
        return {name: tuple(map(tiny, works)) if self.tiny else works for name, works in stages.items()}


def stages(setup: Setup) -> dict[str, Jobs]:
    """Every stage's jobs by name, in the order in which a full run takes them: on a GPU, by value."""
    racing: dict[str, Jobs] = {
        stage: {
            work.name: partial(race, work, setup.device, setup.budget, setup.caches, setup.together) for work in works
        }
        for stage, works in setup.works().items()
    }
    compiling = setup.works()["training"][0]
    # Few and large tensors: the plain references are compiled with every tensor as an input of its own.
    model = "tiny GPT 23M" if setup.tiny else "GPT 2x1024" if setup.plan == "cpu" else "GPT 10x1024"
    kernels: Jobs = {
        "limits": partial(setup.call, kernel_cases.measure, kernel_cases.limits, setup.device),
    }
    of_step = partial(setup.call, kernel_cases.measure, kernel_cases.step_kernels, model, setup.device)
    if setup.plan == "cpu":
        kernels["step"] = of_step
        kernels["attention"] = partial(setup.call, kernel_cases.measure, kernel_cases.attention_kernels)
    for_gpus = {
        "linear": kernel_cases.linear_kernels,
        "gradient": kernel_cases.gradient_kernels,
        "loss": loss_cases.loss_kernels,
    }
    if setup.plan == "cuda":  # a fused op on the CPU is its reference, there to be compared with
        kernels |= {
            name: partial(setup.call, kernel_cases.measure, make, setup.device) for name, make in for_gpus.items()
        }
    published: Jobs = {
        make.__name__: partial(setup.call, kernel_cases.measure, make, setup.device) for make in published_cases.CASES
    }
    stepped = "tiny GPT 23M" if setup.tiny else "GPT 23M" if setup.plan == "cpu" else "GPT 124M"
    large = "tiny GPT 124M" if setup.tiny else "GPT 124M"
    compiled_steps: Jobs = {  # Inductor compiles them for minutes
        "kernels": of_step,
        "scaler": partial(setup.call, scaler_step.measure, stepped, setup.device),
    }
    peaks: Jobs = {
        what: partial(setup.call, scaler_step.peak, large, setup.device, masters)
        for what, masters in (("float32", False), ("remainder", True))
    }
    passes: Jobs = {"passes": partial(setup.call, pass_growth, (1, 3) if setup.tiny else (16, 32, 64, 128, 256))}
    small: Jobs = {}
    for model, what in product(MODELS if setup.plan == "cpu" else (), (STEP, CALL)):
        small[f"{model}: {what}"] = partial(small_steps.measure, model, what, setup.caches)
    clipped = [work for work in setup.works()["training"] if work.keeps_memory]
    looped: Jobs = {w.name: partial(setup.call, loops.measure, w, environment=w.environment) for w in clipped}
    first = {"broken": racing.pop("broken")} if setup.plan == "cuda" else {}
    return {
        **first,
        "kernels": kernels,
        "scaler": {stepped: partial(setup.call, scaler_step.measure, stepped, setup.device, setup.plan == "cpu")},
        **({"published": published} if setup.plan == "cuda" else {}),
        **racing,
        **({"small": small, "loops": looped} if setup.plan == "cpu" else {}),
        "growth": passes | racing["growth"],
        "memory": peaks,
        "compile": {compiling.name: partial(cold_and_warm, compiling, setup)},
        "import": {"import": import_time},
        **({"compiled-steps": compiled_steps} if setup.plan == "cuda" else {}),
    }


def cold_and_warm(work: Work, setup: Setup, repeats: int = 2) -> list[Row]:
    """Seconds of compilation, forward and backward: with empty caches, then in a new process with full ones."""
    seconds: dict[tuple[str, str], list[float]] = {}
    passes: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name in (BASELINE, AMP):
            with setup.caches() as caches:
                for start in ("cold", "warm"):
                    with apart(Candidate, work, PEERS[name], setup.device, caches=caches) as candidate:
                        figures = candidate.ask("prepare")
                    seconds.setdefault((start, name), []).append(figures["compile_seconds"])
                    passes.setdefault(name, []).append(figures["our_passes_seconds"])
    return [
        Row(f"{work.name}, {start} start", name, {"seconds": times, "our_passes_seconds": max(passes[name])})
        for (start, name), times in seconds.items()
    ]


def sow(setup: Setup) -> None:
    """Fill the seed: compile something small, in a process of its own."""
    with apart(partial, _compile_something, setup.device, caches=setup.seed) as other:
        other.ask("__call__")


def _compile_something(device: str) -> None:
    torch.compile(lambda x: (x + 1).relu())(torch.ones(64, 64, device=device))
    if device == "cpu":
        native.available()
