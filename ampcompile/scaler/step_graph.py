"""How a captured step runs: as a CUDA graph, before its capture on a stream of its own; without a GPU as it is."""

import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampcompile.torch_private import patches


class StepGraph:
    """CUDA graphs of one function, in one pool of memory, and the calls that come before their captures."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._beside = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._most, self._late = 0, False  # the most bytes that a capture added, and if others had before

    def warm_up(self, call: Callable[[], Any], strict: bool) -> Any:
        """Call the function on a stream beside the current one, as a capture needs; `strict`: raise where it waits."""
        now, mode = torch.cuda.current_stream(self._device), torch.cuda.get_sync_debug_mode()
        self._beside.wait_stream(now)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "does not yet detect all synchronizing operations": the capture does
            torch.cuda.set_sync_debug_mode("error" if strict else mode)
        try:
            with torch.cuda.stream(self._beside):
                return call()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            now.wait_stream(self._beside)

    def capture(self, call: Callable[[], Any], strict: bool) -> tuple[Any, Any]:
        """Call the function without running what it launches; return the graph, and the result.

        Other threads, which load data, may go on meanwhile.
        """
        if not (before := self.pool_bytes()[0]):
            self._most = 0
        with torch.cuda.device(self._device):
            graph = torch.cuda.CUDAGraph()  # one whose capture failed can't be used again
            # The default is one stream for all devices, on which no launch of another device is captured: it runs.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._beside, capture_error_mode="thread_local"):
                result = call()
        if (more := self.pool_bytes()[0] - before) > self._most:
            self._most, self._late = more, before > 0
        return graph, result

    def replay(self, graph: Any) -> None:
        with torch.cuda.device(self._device):
            graph.replay()

    def wait(self) -> None:
        """Let the host wait until no replay runs: then graphs, and what they read, may go."""
        torch.cuda.synchronize(self._device)

    def pool_bytes(self) -> tuple[int, int]:
        """The bytes of the pool, and up to how many less it would take, had the largest graph been captured first."""
        total = sum(each["total_size"] for each in torch.cuda.memory_snapshot(self._pool, include_traces=False))
        return total, self._late * (total - self._most)


class NoGraph:
    """What stands for a graph elsewhere than on a GPU: the function runs in each call."""

    def warm_up(self, call: Callable[[], Any], strict: bool) -> Any:
        """Call the function; `strict`: raise where it would wait for a GPU, by reading a tensor's number."""
        if not strict:
            return call()
        patches.install(patches.READS, dict.fromkeys(map(patches.place_of, patches.READS.patches), _refuse_in_strict))
        _strict.calls = True
        try:
            return call()
        finally:
            _strict.calls = False
            patches.uninstall(patches.READS)

    def capture(self, call: Callable[[], Any], strict: bool) -> tuple[Any, Any]:
        """Call the function; there is no graph."""
        return None, self.warm_up(call, strict)

    def wait(self) -> None:
        """Nothing runs behind the host."""

    def pool_bytes(self) -> tuple[int, int]:
        return 0, 0


_strict = threading.local()


def _refuse_in_strict(original: Any) -> Any:
    def read(tensor: Tensor, *args: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if getattr(_strict, "calls", False) and not caller.startswith(patches.MAY_READ):
            raise RuntimeError(
                f"Tensor.{original.__name__}() reads a number: synchronizing, where tensors are on a GPU"
            )
        return original(tensor, *args)

    return read
