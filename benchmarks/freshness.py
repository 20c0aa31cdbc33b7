"""What it costs to know that no weight was written: in each call, and at each `.data` of the process."""

import gc
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from ampcompile.weights import memory as weights_memory
from ampcompile.weights.binding import bind
from benchmarks.architectures import build
from benchmarks.peers import AMP, PEERS
from benchmarks.records import Row

ROUNDS = 21
SIGNALS_MOST = 0.3e-6
"""Seconds a weight that the exact signals may take."""
SAMPLE_MOST = 0.01
"""Share of a call that the sample may take."""
DATA_MOST = {"elsewhere": 0.5e-6, "copied": 1.0e-6}
"""Seconds that `tensor.data` may take beyond torch's own, by where the tensor lies."""


def measure(model: str) -> list[Row]:
    """Rows of the signals, of the sample on a model's inference with 16 tokens, and of `.data`."""
    return [*_signals(150), *_sample(model), *_data()]


def _seconds(call: Callable[[], Any], times: int) -> list[float]:
    """Seconds of one call in each round."""
    found = []
    for _ in range(ROUNDS):
        start = perf_counter()
        for _ in range(times):
            call()
        found.append((perf_counter() - start) / times)
    return found


def _signals(count: int) -> list[Row]:
    params = [nn.Parameter(torch.randn(64, 64)) for _ in range(count)]
    binding = bind([torch.bfloat16] * count)
    binding.copies(params)
    (known,) = weights_memory.sets
    whole = _seconds(lambda: binding.copies(params), 200)
    sample = _seconds(lambda: known.sample.read() == known.words, 200)
    seconds = [(w - s) / count for w, s in zip(whole, sample, strict=True)]
    return [Row(f"exact signals, one of {count} weights", AMP, {"seconds": seconds, "most": SIGNALS_MOST})]


def _sample(name: str) -> list[Row]:
    gc.collect()
    model, inputs = build(name, 1, 16, False)
    with torch.no_grad():
        run = PEERS[AMP].compiled(model, torch.bfloat16)
        for _ in range(10):
            run(*inputs)
        call, sample = [], []
        for _ in range(ROUNDS):
            call += _once(lambda: run(*inputs))
            # Right after a call, whose weights have left few of the sampled words in the caches.
            sample.append(sum(_once(_sampling(each))[0] for each in weights_memory.sets))
    figures = {"seconds": sample, "most": SAMPLE_MOST * median(call), "call_seconds": call}
    places = sum(each.sample.places for each in weights_memory.sets)
    return [Row(f"sample at {places} places, {name}, 1x16", AMP, figures)]


def _sampling(copies: Any) -> Callable[[], Any]:
    return lambda: copies.sample.read() == copies.words


def _taking_data(tensor: torch.Tensor) -> Callable[[], Any]:
    return lambda: tensor.data


def _once(call: Callable[[], Any]) -> list[float]:
    start = perf_counter()
    call()
    return [perf_counter() - start]


def _data() -> list[Row]:
    gc.collect()
    weight, other = nn.Parameter(torch.randn(64, 64)), torch.randn(8)
    alone = _seconds(_taking_data(other), 5000)
    binding = bind([torch.bfloat16])
    binding.copies([weight])
    rows = [Row("tensor.data, no copy alive", AMP, {"seconds": alone})]
    for where, tensor in (("elsewhere", other), ("copied", weight)):
        seconds = _seconds(_taking_data(tensor), 5000)
        most = median(alone) + DATA_MOST[where]
        rows.append(Row(f"tensor.data, {where}", AMP, {"seconds": seconds, "most": most}))
    del weight, tensor
    return [*rows, Row("tensor.data, copies freed", AMP, {"seconds": _seconds(_taking_data(other), 5000)})]
