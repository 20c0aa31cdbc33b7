"""A step's profile: the table, what limits it, and what trying another way said."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ampcompile
from ampcompile.timing import step_profile
from ampcompile.timing.step_profile import LESS, StepProfile, Tried, table
from ampcompile.timing.trace import KINDS, Trace, find_peak


def profile(wall: float, busy: float, **tried: Tried) -> StepProfile:
    """Of a GPU that is busy for so long, in milliseconds."""
    seconds = dict(zip(KINDS, (0.6 * busy, 0.1 * busy, 0.2 * busy, 0.1 * busy), strict=True))
    trace = Trace({kind: each / 1e3 for kind, each in seconds.items()}, busy / 1e3, 715)
    ways = {name: tried[key] for name, key in zip(step_profile.WAYS, ("graphs", "cpp"), strict=True) if key in tried}
    return StepProfile(wall / 1e3, trace, ways)


HOST = "the host limits this step (GPU busy 37%): "
GRAPHS, CPP = 'mode="reduce-overhead"', "cpp_wrapper=True"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (profile(25, 9.25, graphs=Tried(9.3e-3)), f"{HOST}{GRAPHS} runs it in 9.3 ms instead of 25 ms"),
        (
            profile(25, 9.25, graphs=Tried(20e-3, skipped="mutated inputs")),
            f"{HOST}{GRAPHS} runs it in 20 ms instead of 25 ms (it skips graphs: mutated inputs)",
        ),
        (
            profile(25, 9.25, graphs=Tried(failed="RuntimeError: overwritten"), cpp=Tried(18e-3)),
            f"{HOST}{GRAPHS} fails: RuntimeError: overwritten; {CPP} runs it in 18 ms instead of 25 ms",
        ),
        (
            profile(25, 9.25, graphs=Tried(24.5e-3), cpp=Tried(26e-3)),
            f"{HOST}{GRAPHS} is no faster, 24.5 ms instead of 25 ms; {CPP} is no faster, 26 ms instead of 25 ms",
        ),
        (profile(25, 9.25), f"{HOST}nothing was tried; next: ampcompile.capture_step"),
        (
            profile(10, 9.7),
            "the GPU limits this step (busy 97%), products take 60% of its time; next: python -m ampcompile doctor "
            "says which types are fast on this machine",
        ),
    ],
)
def test_the_advice_is_what_was_tried(found: StepProfile, words: str) -> None:
    assert found.advice == words and str(found).endswith(words) and found.as_dict()["advice"] == words


def test_a_step_is_run_as_it_is_and_nothing_is_tried_on_a_cpu() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    compiled = torch.compile(model, backend="amp", options={"lower": "aot_eager"})
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler, steps = ampcompile.GradScaler("cpu", enabled=False), []

    def step(x: torch.Tensor) -> None:
        compiled(x).square().mean().backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        optimizer.zero_grad()
        steps.append(torch.compiler.is_compiling())

    found = ampcompile.profile_step(step, steps=2)(torch.randn(32, 64))
    assert optimizer.state[model[0].weight]["step"].item() == len(steps) == 4 + 3 * 2 + 3 + 1
    weights = sum(param.nbytes for param in model.parameters())
    assert found.memory is not None and found.memory.made >= found.memory.kept >= 32 * 128 * 2
    assert found.memory.held["weights"] >= weights and found.memory.held["states"] >= 2 * weights
    assert found.memory_advice in str(found) and found.memory_advice.startswith("memory: ")
    if not torch.cuda.is_available():
        assert not found.tried and not found.busy
    assert all(found.trace.seconds[kind] > 0 for kind in ("products", "casts", "step", "rest"))
    assert found.wall > 0 and table({"amp": found}).splitlines()[0].split()[0] == "wall"
    for arguments in ({"steps": 0}, {"step": 3}):
        with pytest.raises(ampcompile.OptionError, match="profile_step got"):
            ampcompile.profile_step(**{"step": print, **arguments})
    with pytest.raises(ampcompile.OptionError, match="steps=3"):
        ampcompile.profile_step(print, torch.ones(1))


def limited(monkeypatch: pytest.MonkeyPatch, walls: list[float | Exception]) -> tuple[StepProfile, list[dict]]:
    """A profile on a GPU made up, whose host limits the step: walls are given out in turn; and the settings tried."""
    settings: list[dict] = []

    def wall(call: Callable[[], object], steps: int) -> float:
        call()
        settings.append({"graphs": torch._inductor.config.triton.cudagraphs, "cpp": torch._inductor.config.cpp_wrapper})
        if isinstance(found := walls.pop(0), Exception):
            raise found
        return found

    monkeypatch.setattr(step_profile, "_wall", wall)
    monkeypatch.setattr(step_profile, "record", lambda call: Trace(dict.fromkeys(KINDS, 1e-3), busy=4e-3, launches=9))
    return step_profile.measure(lambda: None), settings


def test_ways_are_tried_until_one_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    found, settings = limited(monkeypatch, [10e-3, 5e-3])
    assert found.tried == {'mode="reduce-overhead"': Tried(5e-3)} and settings[1] == {"graphs": True, "cpp": False}
    found, settings = limited(monkeypatch, [10e-3, RuntimeError("no\nway"), 8e-3])
    assert list(found.tried.values()) == [Tried(failed="RuntimeError: no"), Tried(8e-3)]
    assert settings[2] == {"graphs": False, "cpp": True} and not torch._inductor.config.triton.cudagraphs
    assert step_profile.measure(lambda: None, try_others=False).tried == {} if settings.append({}) else True


@pytest.mark.gpu
def test_graphs_are_tried_on_a_gpu() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(30)]).cuda()
    compiled, x = torch.compile(model, backend="amp"), torch.randn(8, 64, device="cuda")
    found = ampcompile.profile_step(lambda: compiled(x).sum().backward())()
    assert found.host_limits and found.trace.launches > 60
    graphs = found.tried['mode="reduce-overhead"']
    assert not graphs.failed and graphs.seconds < found.wall and "instead of" in found.advice


@pytest.mark.parametrize(
    ("at", "phase", "kept"), [(15, "forward", 300), (25, "backward", 100), (35, "step", 100), (45, "step", 100)]
)
def test_the_peak_is_in_the_phase_whose_span_holds_it(at: int, phase: str, kept: int) -> None:
    spans = [("autograd::engine::evaluate_function: MmBackward0", 20, 10), ("Optimizer.step#AdamW.step", 32, 8)]
    events = [(start, name, size, False) for name, start, size in spans]
    events += [(10, "", 100, False), (at, "", 300, False), (at + 1, "", -100, False), (12, "", 10_000, True)]
    found = find_peak(events, {"states": 200}, on_gpu=False)
    assert (found.phase, found.made, found.kept, found.total) == (phase, 400, kept, 600)
    said = StepProfile(1.0, profile(10, 9).trace, memory=found).memory_advice
    assert f"in {'the ' * (phase == 'step')}{phase}: states" in said and said.endswith(
        LESS["kept" if kept > 200 else "states"]
    )
