"""What a test needs to run the same lines on the CPU and on a GPU: streams, captures, calls that must not wait."""

import os
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.profiler import ProfilerActivity

from ampcompile.torch_private import processor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def streams(device: str) -> Any:
    """`torch.cuda`, or `torch.cpu`, whose streams are stand-ins that order nothing, as there is nothing to order."""
    return getattr(torch, device)


def delay(device: str) -> None:
    """Keep the current stream busy for about a millisecond."""
    if device == "cuda":
        torch.cuda._sleep(2_000_000)


@contextmanager
def profiled(*activities: ProfilerActivity) -> Iterator[list[str]]:
    """Collect the names of what runs meanwhile; without what the profiler prints."""
    names: list[str] = []
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            yield names
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    names += [event.name for event in profile.events()]


@contextmanager
def waiting_for_nothing(device: str) -> Iterator[None]:
    """Fails if the host waits for the device; on the CPU, if a tensor's value is read as a number."""
    if device == "cpu":
        with profiled(ProfilerActivity.CPU) as names:
            yield
        assert "aten::_local_scalar_dense" not in names
        return
    before = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def captured(call: Callable[[], object], device: str, warm_up: int = 3) -> Callable[[], object]:
    """`call` in a CUDA graph of the user's, after a few calls on a stream beside; on the CPU, the call itself."""
    api = streams(device)
    beside = api.Stream()
    beside.wait_stream(api.current_stream())
    with api.stream(beside):
        for _ in range(warm_up):
            call()
    api.current_stream().wait_stream(beside)
    if device == "cpu":
        return call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def on_a_cpu(
    multiplies: Container[torch.dtype] = (torch.bfloat16, torch.float16),
    faster: Container[torch.dtype] = (torch.bfloat16, torch.float16),
    mkl: bool = False,
) -> AbstractContextManager[Any]:
    """As on a CPU with units for these types, and with those of these types faster than float32's."""
    return patch.multiple(
        processor,
        multiplies=lambda dtype: dtype in multiplies,
        multiplies_faster=lambda dtype: dtype in faster,
        suits_mkl=lambda: mkl,
    )


def require_lstm() -> None:
    """Skip where oneDNN is told that the CPU is an older one, but torch isn't, and its LSTM in bfloat16 fails."""
    try:
        with torch.no_grad(), torch.autocast("cpu"):
            torch.nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError as error:
        if "could not create a primitive descriptor" not in str(error):
            raise
        pytest.skip(f"torch: {error}")


def said(stderr: str) -> list[str]:
    """Lines on stderr but for the one that a CPU gets on which low precision doesn't pay."""
    return [line for line in stderr.splitlines() if "this CPU has no units" not in line]
