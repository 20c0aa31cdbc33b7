"""Where the time of a step goes, and what limits it: `profile_step`; and calls timed in turn, for it and `bench`.

Candidates for the same work take turns, so that a machine's moods reach all of them alike.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch


def time_call(device_type: str, call: Callable[[], Any], calls: int = 1) -> float:
    """Seconds of one call: the mean of so many `calls`, until the device has finished them."""
    wait = torch.accelerator.synchronize if device_type != "cpu" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - start) / calls


def take_turns(
    time_one: Callable[[str], float | None], names: Iterable[str], rounds: int, seconds: float = 0.0
) -> dict[str, list[float]]:
    """What `time_one` gives for each candidate in each round; one for which it gives None is out.

    Every other round goes backwards. There are at least so many `rounds`, and more until `seconds` are over.
    """
    times: dict[str, list[float]] = {name: [] for name in names}
    start, turn = time.perf_counter(), 0
    while times and (turn < rounds or time.perf_counter() - start < seconds):
        for name in list(times)[:: -1 if turn % 2 else 1]:
            if (one := time_one(name)) is None:
                del times[name]
            else:
                times[name].append(one)
        turn += 1
    return times


def calls_in_a_round(one_call: Mapping[str, float], least: float) -> int:
    """How many calls take even the fastest candidate `least` seconds; `one_call`: the seconds of one, by candidate."""
    return max(1, math.ceil(least / min(one_call.values())))
