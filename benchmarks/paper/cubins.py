"""Compile every Triton kernel to machine code: registers, spills, shared memory."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = (80, 90, 100)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
HEADER = """
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import AutotuneHint, DeviceProperties, ReductionHint, TileHint
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
"""


class Usage(NamedTuple):
    """Resources of one kernel, in the first configuration that Inductor would try."""

    registers: int
    """Registers per thread."""
    spilled: int
    """Bytes per thread."""
    shared: int
    """Bytes of shared memory per program."""


def describe_kernels(kernels: Mapping[str, str]) -> dict[str, Any]:
    """The most resources of any kernel on each architecture, and the kernels that fail or spill; `kernels`: by name."""
    report: dict[str, Any] = {"failed": [], "spilled": []}
    for capability in CAPABILITIES:
        each = []
        # Triton has no conversion to e4m3 for GPUs without units for it, and nothing is quantized there.
        for name, source in [each for each in kernels.items() if capability >= 89 or "8e4nv" not in each[1]]:
            try:
                each.append(usage := compile_kernel(source, capability))
            except Exception as error:  # Triton and ptxas raise many kinds of errors
                report["failed"].append(f"sm_{capability} {name}: {type(error).__name__}: {error}"[:300])
                continue
            if usage.spilled:
                report["spilled"].append(f"sm_{capability} {name}: {usage.spilled} bytes")
        most = {what: max((getattr(usage, what) for usage in each), default=0) for what in ("registers", "shared")}
        report[f"sm_{capability}"] = {"kernels": len(each), **most}
    return report


def compile_kernel(source: str, capability: int) -> Usage:
    """Compile one kernel's source, as Inductor writes it, for an architecture. Raises Triton's errors."""
    members = vars(PyCodeCache.load(HEADER + source)).values()
    tuner: Any = next(each for each in members if isinstance(each, CachingAutotuner))  # beside its callees
    config = tuner.configs[0]
    meta = tuner._create_compile_meta(config)
    ast = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
    options = tuner._create_compile_options(config, meta)
    binary = triton.compile(ast, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    taken = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert taken is not None, usage
    return Usage(int(taken[1]), int(taken[2]), binary.metadata.shared)
