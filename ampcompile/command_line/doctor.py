"""Examine this machine: versions, devices, and by measurement whether low precision is likely to pay on it."""

import importlib.util
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ampcompile.about import VERSION
from ampcompile.dtypes import LOW, short_name
from ampcompile.insight.show import human_bytes, render_table
from ampcompile.kernels import native, packed_linear
from ampcompile.passes.analysis.products import is_emulated, runs_in_float32
from ampcompile.timing import time_call
from ampcompile.torch_private import compilations, patches, processor

PACKAGES = ("triton", "numpy", "rich")
_UNITS = {
    "amx_bf16": "AMX bf16",
    "amx_fp16": "AMX fp16",
    "avx512_bf16": "AVX512 bf16",
    "avx512_fp16": "AVX512 fp16",
    "bf16": "bf16 (Arm)",
    "asimdhp": "fp16 (Arm)",
}
# Rows of a product with a square matrix: one row is bound by memory, many rows by arithmetic.
_ROWS = {"one row": 1, "many rows": 1024}
_WIDTH = {"cpu": 1024, "cuda": 4096}
PROCESSOR_TIMES = Path("/proc/stat")
STEADY = 1.5  # times whose spread is larger say nothing
TimeCall = Callable[[str, Callable[[], Any]], float]
ENOUGH = 0.5  # seconds for one product in one dtype: a dtype without units takes hundreds of times as long


def examine(rounds: int = 15, width: int | None = None, time_call: TimeCall = time_call) -> dict[str, Any]:
    """All findings, as plain values; `width`: of the products' square matrices."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    ours = {"python": platform.python_version(), "ampcompile": VERSION, "torch": torch.__version__}
    findings: dict[str, Any] = {
        "versions": ours | {name: _version(name) for name in PACKAGES},
        "devices": [
            _cpu(),
            *(describe_gpu(i, torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())),
        ],
    }
    start, before = time.perf_counter(), _seconds_of_others()
    findings["products"] = [
        p for device in devices for p in time_products(device, rounds, width or _WIDTH[device], time_call)
    ]
    findings["others"] = (_seconds_of_others() - before) / (time.perf_counter() - start)
    findings["caches"] = {
        name: {"folder": str(folder), "bytes": _bytes(folder)}
        for name, folder in (("Inductor", compilations.inductor_cache()), ("ampcompile", native.cache_folder()))
    }
    findings["patches"] = [asdict(group) for group in patches.TABLE]
    findings["missing"] = _missing("cuda" in devices)
    findings["advice"] = advise(findings["products"], findings["others"])
    return findings


def _seconds_of_others() -> float:
    """The CPUs' seconds that went to other processes since the machine started, or to other virtual machines."""
    return busy_seconds(PROCESSOR_TIMES.read_text(), os.sysconf("SC_CLK_TCK")) - time.process_time()


def busy_seconds(stat: str, ticks: int) -> float:
    """By Linux's `/proc/stat`, which counts ticks: in user mode, nice, system, idle, waiting, others."""
    user, nice, system, _, _, *interrupts = map(int, stat.split()[1:9])
    return (user + nice + system + sum(interrupts)) / ticks


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    core = processor.read_core()
    words = set(core.split())
    name = next((line.partition(":")[2].strip() for line in core.splitlines() if line.startswith("model name")), "")
    return {
        "device": "cpu",
        "name": name or platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "low_precision_units": [unit for flag, unit in _UNITS.items() if flag in words],
        "products_in_float32": [short_name(dtype) for dtype in LOW if is_emulated("cpu", dtype)],
        "large_products_in_float32": [
            short_name(d) for d in LOW if processor.multiplies(d) and not processor.multiplies_faster(d)
        ],
    }


def describe_gpu(index: int, about: Any) -> dict[str, Any]:
    """`about`: what `torch.cuda.get_device_properties` says of it."""
    rocm = torch.version.hip is not None
    units = [
        *(["fp16 tensor cores"] if about.major >= 7 and not rocm else []),
        *(["bf16 tensor cores"] if about.major >= 8 and not rocm else []),
        *([] if processor.why_no_fp8(about.major, about.minor, rocm) else ["fp8 tensor cores"]),
    ]
    return {
        "device": f"cuda:{index}",
        "name": about.name,
        "capability": f"{about.major}.{about.minor}",
        "memory": about.total_memory,
        "low_precision_units": units,
    }


def time_products(device: str, rounds: int, width: int, time_call: TimeCall) -> list[dict[str, Any]]:
    """Medians of matrix products in each dtype, the dtypes in turn."""
    results = []
    for name, rows in _ROWS.items():
        dtypes = torch.float32, torch.bfloat16, torch.float16
        products = {dtype: _product(rows, width, device, dtype) for dtype in dtypes}
        seconds: dict[torch.dtype, list[float]] = {dtype: [] for dtype in products}
        for _ in range(rounds):
            for dtype, multiply in products.items():
                if sum(seconds[dtype]) < ENOUGH:
                    seconds[dtype].append(time_call(device, multiply))
        # The first call, which packs, tunes and starts threads, is left out.
        later = {short_name(dtype): times[1:] or times for dtype, times in seconds.items()}
        medians = {dtype: statistics.median(times) for dtype, times in later.items()}
        spreads = {dtype: _spread(times) for dtype, times in later.items()}
        shape = [rows, width, width]
        results.append({"device": device, "work": name, "shape": shape, "seconds": medians, "spread": spreads})
    return results


def _spread(times: list[float]) -> float:
    """The upper quartile of some times by the lower one: near 1 where nothing disturbs."""
    if len(times) < 2:
        return 1.0
    lower, _, upper = statistics.quantiles(times, n=4, method="inclusive")
    return upper / lower


def _product(rows: int, width: int, device: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """A product in a dtype, run as our compiled graphs run it on that device."""
    a = torch.randn(rows, width, device=device).to(dtype)
    b = torch.randn(width, width, device=device).to(dtype)
    numbers = rows * width + width * width + rows * width
    if device != "cpu" or not runs_in_float32(dtype, rows * width * width, numbers):
        return partial(torch.mm, a, b)
    held = b.float()
    if rows > 1 and packed_linear.available(torch.float32):
        return lambda: packed_linear.packed_linear(a.float(), held, held, None).to(dtype)
    return lambda: torch.mm(a.float(), held).to(dtype)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def _missing(cuda: bool) -> list[str]:
    gaps = []
    compilers = [os.environ.get("CXX"), "g++", "clang++", "c++"]
    if not any(name and shutil.which(name) for name in compilers):
        gaps.append(
            "no C++ compiler ($CXX, g++, clang++, c++): Inductor needs one to compile for the CPU. Install g++ "
            '(Debian: apt install g++), or run with options={"lower": "aot_eager"}.'
        )
    if cuda and importlib.util.find_spec("triton") is None:
        gaps.append("no triton: Inductor needs it to compile for a GPU. Install the triton that fits this torch.")
    if "amp" not in torch.compiler.list_backends():
        gaps.append('torch.compile(backend="amp") is not found: install the package with pip, entry points included.')
    gaps += [f"{what}: torch {torch.__version__} has no such thing to patch" for what in patches.missing()]
    return gaps


def _is_crowded(device: str, others: float) -> bool:
    """Return True if threads of ours had to wait for CPUs. One that waits holds up the rest: a product then takes 60
    times as long, and does so each time.
    """
    return device == "cpu" and others + torch.get_num_threads() > (os.cpu_count() or 1) + 0.5


def advise(products: list[dict[str, Any]], others: float) -> list[str]:
    """A line for each device: whether its low-precision type is likely to pay, and its speed against float32.

    No speed whose times can't be trusted. `others`: how many CPUs other processes used meanwhile.
    """
    lines = []
    for device in dict.fromkeys(product["device"] for product in products):
        low = short_name(torch.get_autocast_dtype(device))
        used = f"other processes use {others:.1f} of {os.cpu_count()} CPUs" if _is_crowded(device, others) else ""
        gains = {
            p["work"]: p["seconds"]["f32"] / p["seconds"][low]
            for p in products
            if p["device"] == device and not used and max(p["spread"]["f32"], p["spread"][low]) <= STEADY
        }
        if not gains:
            reason = used or "the same product took now more, now less time"
            lines.append(f"{device}: {low} can't be judged, as {reason}. Run this again when nothing else runs")
            continue
        best = max(gains.values())
        verdict = "is likely to pay" if best >= 1.2 else "may pay a little" if best >= 1.05 else "is not likely to pay"
        speeds = ", ".join(f"{gain:.2g} times with {work}" for work, gain in gains.items())
        lines.append(f"{device}: {low} {verdict}. As fast as float32 in matrix products: {speeds}")
    return lines


def _time(seconds: float, spread: float) -> str:
    return f"{1e6 * seconds:.0f} us" if spread <= STEADY else "unsteady"


def table(found: dict[str, Any], patched: bool = False) -> str:
    """The findings as text, the verdict first; `patched`: with what is patched in torch."""
    rows = [(name, number or "not installed") for name, number in found["versions"].items()]
    for device in found["devices"]:
        units = ", ".join(device["low_precision_units"]) or "no low-precision units"
        about = f"{device['name']}, {device.get('vectors') or device['capability']}, {units}"
        if emulated := device.get("products_in_float32"):
            about += f"; without units to use for {' and '.join(emulated)}: such products run in f32"
        if slow := device.get("large_products_in_float32"):
            about += f"; units for {' and '.join(slow)} no faster than for f32: large products run in f32"
        rows.append((device["device"], about))
    rows += [(f"{name} cache", f"{c['folder']}, {human_bytes(c['bytes'])}") for name, c in found["caches"].items()]
    products = [
        (
            p["device"],
            p["work"],
            "x".join(map(str, p["shape"])),
            *map(_time, p["seconds"].values(), p["spread"].values()),
        )
        for p in found["products"]
        if not _is_crowded(p["device"], found["others"])
    ]
    missing = [f"missing: {words}" for words in found["missing"]] or ["nothing is missing"]
    parts = ["\n".join([*found["advice"], *missing]), render_table(("", ""), rows)]
    if products:
        parts.append(render_table(("matrix products", "", "", "f32", "bf16", "f16"), products))
    if patched:
        groups = [(g["name"], str(len(g["patches"])), g["when"], g["undone"]) for g in found["patches"]]
        parts.append(render_table(("patches of torch", "places", "made", "undone"), groups))
    return "\n\n".join(parts)
