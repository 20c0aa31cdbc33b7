"""What a GPU's copies of weights cost the host: python -m benchmarks.copies_on_host [--rounds N]

In processor time, launches left out. No GPU is needed: CPU tensors say that they are a GPU's, and kernels, streams and
events do nothing.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import thread_time
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from ampcompile.kernels import cast_many, recheck
from ampcompile.kernels.triton import cast_many as cast_on_gpu
from ampcompile.kernels.triton import recheck as recheck_on_gpu
from ampcompile.torch_private import storages
from ampcompile.weights import copies, gpu, memory
from ampcompile.weights.binding import bind
from ampcompile.weights.sample import SampledAddresses
from benchmarks.peers import AMP
from benchmarks.records import Row, spread

ROUNDS = 50
MODELS = {"GPT 124M": (12, 768), "GPT 1.3B": (24, 2048)}
"""Layers and width; what autocast casts: the matrices and biases of linear layers, the head."""
NOTHING = "a call, nothing written"
ALL = "a call after an update of all weights"


class Nothing:
    """An event, or a kernel, that does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return nothing

    record = wait = lambda self, stream: None


def nothing(*_: Any, **__: Any) -> None:
    """A launch."""


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """CPU memory as a GPU's, which the host can't look into; nothing is launched."""
    nowhere = np.empty(0, np.int64)

    def recheck_(tensors: Any, weights: Any, changed: Tensor, mark: int, rewrite: bool, kept: Any, known: Any) -> None:
        chunk, sample = recheck.CHUNK, recheck.SAMPLE
        recheck_on_gpu.recheck_(tensors, weights, changed, mark, rewrite, kept, known, chunk, sample)

    stand_ins: list[tuple[Any, str, Any]] = [
        (torch.Tensor, "is_cuda", True),
        (torch.Tensor, "record_stream", nothing),
        (torch.cuda, "Event", Nothing),
        (torch.cuda, "current_stream", nothing),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (storages, "current_stream", lambda _: 1),
        (copies, "places", lambda _: SampledAddresses(nowhere, nowhere)),
        (cast_on_gpu, "amp_cast", Nothing()),
        (recheck_on_gpu, "amp_recheck", Nothing()),
        (cast_many, "_cast_on", lambda _, *arguments: cast_on_gpu.cast_many_(*arguments)),
        (gpu, "recheck_", recheck_),
        (gpu, "_reports", {}),
    ]
    with ExitStack() as stack:
        for owner, name, stand_in in stand_ins:
            stack.enter_context(patch.object(owner, name, stand_in, create=True))
        yield


def weights(layers: int, width: int) -> list[nn.Parameter]:
    """Memory that is never touched."""
    shapes: list[tuple[int, ...]] = [(50304, width)]
    for rows, columns in ((3, 1), (1, 1), (4, 1), (1, 4)) * layers:
        shapes += [(rows * width, columns * width), (rows * width,)]
    return [nn.Parameter(torch.empty(shape)) for shape in shapes]


def measure(models: Sequence[str] = tuple(MODELS), rounds: int = ROUNDS) -> list[Row]:
    """Processor time of the host, seconds, in each round of each case."""
    return [row for model in models for row in _measure(model, rounds)]


def _measure(model: str, rounds: int) -> Iterator[Row]:
    with as_on_a_gpu():
        params = weights(*MODELS[model])
        binding = bind([torch.bfloat16] * len(params))
        figures = {"weights": len(params), "parameters": sum(param.numel() for param in params)}
        for case, before in ((NOTHING, nothing), (ALL, written)):
            times = []
            for _ in range(rounds + 2):
                before()
                begin = thread_time()
                binding.copies(params)
                times.append(thread_time() - begin)
            yield Row(f"{case}, {model}", AMP, {"seconds": times[2:], **figures})


def written() -> None:
    """Every weight, as an optimizer's hook reports it."""
    for each in memory.memories():
        each.written()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.copies_on_host", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    for row in measure(rounds=parser.parse_args().rounds):
        low, middle, high = (1e6 * value for value in spread(row.figures["seconds"]))
        print(f"{middle:7.0f} us ({low:.0f} to {high:.0f}), {row.figures['weights']} weights: {row.case}")


if __name__ == "__main__":
    main()
