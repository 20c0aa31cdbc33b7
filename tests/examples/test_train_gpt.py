"""The demo chooses its length by the machine, and says in words what came out."""

import pytest

from examples import train_gpt
from examples.gpt_training import WAYS
from examples.side_by_side import Entrant


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


@pytest.mark.parametrize(("seconds", "steps"), [(0.1, 300), (0.6, 133), (30.0, 40)])
def test_the_long_run_fits_the_machine(clock, capsys, seconds, steps):
    training = Trained(clock, seconds)
    losses = train_gpt.train(training, None)
    assert len(losses) == training.taken == training.steps == steps
    assert f"{1000 * seconds:.0f} ms a step: {steps} of them" in capsys.readouterr().out


def test_a_number_of_steps_is_obeyed(clock):
    training = Trained(clock, 30.0)
    assert len(train_gpt.train(training, 7)) == training.steps == 7


def racing(monkeypatch, seconds: dict[str, float]) -> list[Entrant]:
    def race(entrants, device, steps, caches):
        for round_number in range(steps):
            for entrant in entrants:
                entrant.seconds.append(seconds[entrant.way] + 60 * (not round_number))
                entrant.losses.append(1.0)
            yield 1.0

    monkeypatch.setattr(train_gpt, "race", race)
    return [Entrant(way) for way in WAYS]


@pytest.mark.parametrize(
    ("seconds", "given", "rounds"), [(0.1, None, 30), (2.0, None, 11), (90.0, None, 2), (9.0, 6, 6)]
)
def test_so_does_the_comparison(monkeypatch, seconds, given, rounds):
    entrants = racing(monkeypatch, dict.fromkeys(WAYS, seconds))
    train_gpt.compare(entrants, "cpu", given)
    assert {len(entrant.losses) for entrant in entrants} == {rounds}


def test_the_last_sentence_says_who_is_fastest(monkeypatch):
    times = {"eager fp32": 0.4, "eager autocast": 0.3, "Inductor + autocast": 0.2, "amp": 0.1}
    entrants = racing(monkeypatch, times)
    train_gpt.compare(entrants, "cpu", 4)
    assert train_gpt.verdict(entrants) == (
        "A step of amp is the fastest here: its speed is 2.00 times Inductor + autocast's, 3.00 times eager autocast's "
        "and 4.00 times eager fp32's."
    )
    entrants = racing(monkeypatch, times | {"eager fp32": 0.05})
    train_gpt.compare(entrants, "cpu", 4)
    said = train_gpt.verdict(entrants)
    assert said.startswith("A step of amp takes 2.00 times as long as eager fp32's, which is the fastest here")
    assert "doctor" in said
