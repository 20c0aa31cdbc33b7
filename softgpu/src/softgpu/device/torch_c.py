"""What `torch._C` has in a CUDA build, and `torch.cuda` asks for."""

import sys
import types
from itertools import count
from typing import Any

from .library import soft

CAPABILITY = (9, 0)
DEVICES = 2
MEMORY = 141 << 30
POOLS = count(1)
CUDA = 1  # c10's number of the type of device
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, total_memory=MEMORY, multi_processor_count=132, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20,
    gcnArchName="", uuid="0", pci_bus_id=0, pci_device_id=0, pci_domain_id=0, is_integrated=0, is_multi_gpu_board=0,
    clock_rate=1980000, memory_clock_rate=3201000, memory_bus_width=6144,
)  # fmt: skip


def properties(device: object = None) -> types.SimpleNamespace:
    return PROPERTIES


def nothing(*_: object, **__: object) -> None:
    return None


class Captured:
    """What the library has captured, for as long as this lives."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        soft().forget(self.number)


class Graph:
    """torch._C._CUDAGraph."""

    def __new__(cls, keep_graph: bool = False) -> "Graph":
        return super().__new__(cls)

    def __init__(self, keep_graph: bool = False) -> None:
        self.captured: Captured | None = None
        self.at: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if self.captured is not None:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph")
        self.at = pool or graph_pool_handle()
        soft().begin(pool_number(self.at))

    def capture_end(self) -> None:
        self.captured = Captured(soft().end())

    def replay(self) -> None:
        from torch.profiler import record_function

        assert self.captured is not None, "nothing was captured"
        with record_function("cudaGraphLaunch"):
            soft().replay(self.captured.number)

    def reset(self) -> None:
        self.captured = None

    # After torch 2.13 a capture ends in two steps, between which it is instantiated.
    capture_end_pre = capture_end

    def pool(self) -> Any:
        return self.at

    def pools(self) -> list[Any]:
        return [self.at]

    @property
    def _has_graph_exec(self) -> bool:
        return self.captured is not None

    capture_end_post = instantiate = enable_debug_mode = debug_dump = register_generator_state = nothing


def stream_base(base: Any) -> Any:
    """torch._C._CudaStreamBase."""

    class Stream(base):
        def __new__(
            cls, priority: int = 0, stream_id: int = 0, device_index: int = -1, device_type: Any = None, **_: Any
        ):
            if device_type is None:
                device_index = soft().device() if device_index < 0 else device_index
                stream_id = soft().new_stream(device_index)
            return base.__new__(cls, stream_id=stream_id, device_index=device_index, device_type=CUDA)

        def __init__(self, *_: object, **__: object) -> None:
            pass

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

        @property
        def priority(self) -> int:
            return 0

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return (0, -5)

    return Stream


def event_base(base: Any) -> Any:
    """torch._C._CudaEventBase."""

    class Event(base):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any):
            how = {"enable_timing": enable_timing, "blocking": blocking, "interprocess": interprocess}
            return base.__new__(cls, sys.modules["torch"].device("cuda", soft().device()), **how)

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def record(self, stream: Any = None) -> None:
            super().record(stream or sys.modules["torch"].cuda.current_stream())

        @property
        def cuda_event(self) -> int:
            return self.event_id

    return Event


def set_stream(stream_id: int = 0, device_index: int = 0, device_type: int = CUDA) -> None:
    soft().set_stream(stream_id, device_index)


def stats(device: int = 0) -> dict[str, Any]:
    """Of the allocator, as torch nests them."""
    kinds, numbers = ("all", "small_pool", "large_pool"), ("current", "peak", "allocated", "freed")
    allocation, segment, allocated, reserved, requested = (
        {kind: dict(zip(numbers, row, strict=True)) for kind, row in zip(kinds, rows, strict=True)}
        for rows in soft().counts(device)
    )
    zeros = dict.fromkeys(("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free"), 0)
    none = dict.fromkeys(numbers, 0)
    return zeros | {
        "oversize_allocations": none,
        "oversize_segments": none,
        "inactive_split": dict.fromkeys(kinds, none),  # not counted, as the bytes
        "inactive_split_bytes": dict.fromkeys(kinds, none),
        "allocation": allocation,
        "active": allocation,
        "segment": segment,
        "allocated_bytes": allocated,
        "active_bytes": allocated,
        "reserved_bytes": reserved,
        "requested_bytes": requested,
    }


def snapshot(pool: Any = None) -> dict[str, Any]:
    """All segments, or those of one pool."""
    segments = []
    for address, size, device, stream, number, rows in soft().segments():
        if pool and tuple(pool[:2]) not in ((0, 0), (0, number)):
            continue
        names = ("address", "size", "requested_size", "state")
        blocks = [dict(zip(names, row, strict=True), frames=[]) for row in rows]
        active = sum(each["size"] for each in blocks if each["state"] != "inactive")
        segments.append(
            {
                "device": device,
                "address": address,
                "total_size": size,
                "allocated_size": sum(each["size"] for each in blocks if each["state"] == "active_allocated"),
                "active_size": active,
                "requested_size": sum(each["requested_size"] for each in blocks),
                "stream": stream,
                "segment_type": "large" if size > 1 << 20 else "small",
                "segment_pool_id": (0, number),
                "is_expandable": False,
                "frames": [],
                "blocks": blocks,
            }
        )
    return {"segments": segments, "device_traces": []}


def tensor_in(metadata: dict[str, Any], storage: Any) -> Any:
    found = sys.modules["torch"].empty(0, dtype=metadata["dtype"], device=metadata["device"])
    return found.set_(storage, metadata["storage_offset"], metadata["size"], metadata["stride"])


def empty_strided_cuda(size: Any, stride: Any, dtype: Any) -> Any:
    return sys.modules["torch"].empty_strided(size, stride, dtype=dtype, device="cuda")


def new_storage(cls: Any, *args: Any, device: Any = None, **how: Any) -> Any:
    """torch.UntypedStorage of a size or of bytes, on this device too."""
    torch = sys.modules["torch"]
    if device is not None and torch.device(device).type == "cuda":
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()
    return torch._C.StorageBase.__new__(cls, *args, **how, **({} if device is None else {"device": device}))


def same_places(tensors: Any, places: Any, indices: Any) -> bool:
    return all(tensors[i].data_ptr() == places[i] for i in indices)


def graph_pool_handle() -> tuple[int, int]:
    return (0, next(POOLS))


def pool_number(pool: Any) -> int:
    return pool[1]


NOTHING = (
    "init sleep emptyCache record_memory_history cudaCachingAllocator_raw_delete "
    "ipc_collect lock_mutex unlock_mutex setCheckpointPoolState clearCublasWorkspaces"
)
CALLS: dict[str, Any] = dict.fromkeys(NOTHING.split(), nothing) | {
    "getDeviceCount": lambda: DEVICES,
    "getDevice": lambda: soft().device(),
    # Dynamo tells functions apart, so each is one of its own.
    "setDevice": lambda device: soft().exchange_device(device),
    "exchangeDevice": lambda device: soft().exchange_device(device),
    "maybeExchangeDevice": lambda device: soft().exchange_device(device),
    "getDeviceProperties": properties,
    "hasPrimaryContext": lambda device: True,
    "isInBadFork": lambda: False,
    "getArchFlags": lambda: "sm_90",
    "getCompiledVersion": lambda: 12080,
    "canDeviceAccessPeer": lambda one, other: True,
    # Streams.
    "getCurrentStream": lambda device=0: (soft().stream(device), device, CUDA),
    "getCurrentRawStream": lambda device=0: soft().stream(device),
    "getDefaultStream": lambda device=0: (0, device, CUDA),
    "setStream": set_stream,
    "synchronize": lambda: soft().synchronize(),
    "isCurrentStreamCapturing": lambda: soft().capturing(),
    "set_sync_debug_mode": lambda mode: soft().set_sync_mode(mode),
    "get_sync_debug_mode": lambda: soft().sync_mode(),
    # Memory.
    "memoryStats": stats,
    "resetPeakMemoryStats": lambda device=0: soft().reset(device, True),
    "resetAccumulatedMemoryStats": lambda device=0: soft().reset(device, False),
    "memorySnapshot": snapshot,
    "isHistoryEnabled": lambda: False,
    "getAllocatorBackend": lambda: "native",
    "cudaCachingAllocator_is_enabled": lambda: True,
    # What trees of graphs ask for. Their pools' memory is used for nothing else, so there is no state to go back to.
    "beginAllocateCurrentStreamToPool": lambda device, pool: soft().pool(pool_number(pool)),
    "beginAllocateCurrentThreadToPool": lambda device, pool: soft().pool(pool_number(pool)),
    "endAllocateToPool": lambda *_: soft().pool(-1),
    "releasePool": lambda device, pool: soft().release_pool(pool_number(pool)),
    "getCheckpointState": lambda device, pool: object(),
    "checkPoolLiveAllocations": lambda *_: True,
    # Products.
    "getCurrentBlasHandle": lambda: 0,
    "get_conv_benchmark_empty_cache": lambda: False,
}


def functions() -> dict[str, Any]:
    """All functions, by their names in torch._C."""
    return {f"_cuda_{name}": call for name, call in CALLS.items()} | {
        "_CUDAGraph": Graph,
        "_CudaDeviceProperties": type(PROPERTIES),
        "_cuda_CUDAAllocator_AllocatorState": type("AllocatorState", (), {}),
        "_graph_pool_handle": graph_pool_handle,
        "_host_emptyCache": nothing,
        "_get_cudnn_version": nothing,
        "_cudnn_set_conv_benchmark_empty_cache": nothing,
        "_construct_CUDA_Tensor_From_Storage_And_Metadata": tensor_in,
        "_tensors_data_ptrs_at_indices_equal": same_places,
        "_free_And_Remove_DeleterFn": nothing,
        "_has_Standard_Deleter": lambda storage: True,
        "_set_storage_access_error_msg": lambda tensor, text: soft().take_away(tensor.untyped_storage()._cdata, text),
        "_set_storage_data_ptr_access_error_msg": soft().take_away,
    }


def describe(torch_c: Any) -> None:
    """Give torch._C all of it; before torch.cuda is imported, which looks."""
    torch_c._CudaStreamBase, torch_c._CudaEventBase = stream_base(torch_c.Stream), event_base(torch_c.Event)
    torch_c._has_cuda = torch_c.has_cuda = True
    runtime: Any = types.ModuleType("torch._C._cudart")
    runtime.cudaError = types.SimpleNamespace(success=0)
    runtime.cudaMemGetInfo = lambda device=0: (MEMORY - soft().counts(device)[3][0][0], MEMORY)
    torch_c._cudart = runtime
    vars(torch_c).update(functions())
    import torch.version

    torch.version.cuda = "12.8"


def finish(torch: Any) -> None:
    """After torch is imported: some of its modules put classes that raise in the place of what they don't find."""
    vars(torch._C).update(functions())
    torch._C._dynamo.guards._empty_strided_cuda = empty_strided_cuda
    torch.UntypedStorage.__new__ = staticmethod(new_storage)
    torch.cuda.default_generators = tuple(default_generator(torch, i) for i in range(DEVICES))
    torch.cuda._get_device_properties = torch.cuda.get_device_properties = properties


def default_generator(torch: Any, device: int) -> Any:
    """The device's default generator, which torch.Generator can't be asked for."""
    soft().hand_out_default(True)
    try:
        return torch.Generator(f"cuda:{device}")
    finally:
        soft().hand_out_default(False)
