"""The demo chooses its length by the machine."""

import pytest

from examples import train_gpt


class Trained:
    """A training whose steps take no time to compute, and as long as they are said to."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.clock, self.seconds, self.steps, self.taken = clock, seconds, 0, 0

    def step(self) -> float:
        self.clock[0] += 100 if not self.taken else self.seconds  # the first one compiles
        self.taken += 1
        return 1 / self.taken


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(train_gpt, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("seconds", "given", "steps"), [(0.1, None, 300), (0.6, None, 133), (30.0, None, 40), (30.0, 7, 7)]
)
def test_the_long_run_fits_the_machine(clock, capsys, seconds, given, steps):
    training = Trained(clock, seconds)
    losses = train_gpt.train(training, given)
    assert len(losses) == training.taken == training.steps == steps
    assert given or f"{1000 * seconds:.0f} ms a step: {steps} of them" in capsys.readouterr().out
