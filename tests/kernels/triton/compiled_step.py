"""The scaler's kernels: 16-byte accesses in the hot loop, no spilled register in it, no barrier in the updates."""

from typing import Any

import triton
import triton.language as tl

from ampcompile.kernels.triton import adam_and_sgd, loss_scaling
from tests.kernels.triton.compiling import compiled

TABLES = {"words": "*i64", "chunks": "*i32", "tensor_count": "i32"}
FLAGS = {"multiplier": "*fp32", "found_inf": "*fp32"}
OPTIMIZERS: list[tuple[Any, dict[str, str], dict[str, Any], int]] = [
    (adam_and_sgd.amp_adam, {"scalars": "*fp32", "found_inf": "*fp32"}, {"AMSGRAD": False}, 2),
    (adam_and_sgd.amp_sgd, FLAGS, {"MOMENTUM": True, "HAS_MULTIPLIER": True}, 1),
]
"""Their kernels, types of what these have alone, constants, and numbers of moments"""
KINDS = [
    (tl.float32, tl.float32, False),
    (tl.float32, tl.float16, True),
    (tl.float32, tl.bfloat16, False),
    (tl.float16, tl.float32, True),
    (tl.bfloat16, tl.float16, False),
    (tl.float16, tl.bfloat16, True),
]
"""Types of gradients and of copies, and whether there is state of AMSGrad, or of momentum; the code that gradients of
16 bits get is the same for both types but for one conversion.
"""


def check(capability: int) -> None:
    types = (tl.float32, tl.float16, tl.bfloat16)
    for grad, copy, state in KINDS:
        wide = int(grad == tl.float32)  # gradients of 16 bits are read 8 bytes at a time beside float32 state
        weights = {"PARAM": tl.float32, "BESIDE": copy, "STATE": tl.float32, "QUANTIZED": tl.float32}
        both = {"GRAD": grad, **weights, "HAS_FOUND_INF": True, "CHUNK": 8192, "BLOCK": 512}
        code = compiled(
            adam_and_sgd.amp_adam,
            {**TABLES, "scalars": "*fp32", "found_inf": "*fp32"},
            {**both, "AMSGRAD": state},
            capability,
        )
        assert code.count("ld.global*.v4.") == 3 + state + wide
        assert code.count("ld.global*.v2.") == 1 - wide
        assert code.count("st.global*.v4.") == 3 + state
        assert code.count("st.global*.v2.") == (copy != tl.float32)  # four 16-bit numbers
        assert code.count("bar.sync") == code.stack == 0 and code.registers <= 64
        # Division and square root are those of IEEE, as on the CPU.
        assert code.count("div.full") == code.count("sqrt.approx") == code.count("div.approx") == 0
        assert (code.count("cvt.rn.bf16") > 0) == (copy == tl.bfloat16)
        code = compiled(
            adam_and_sgd.amp_sgd,
            {**TABLES, **FLAGS},
            {**both, "MOMENTUM": state, "HAS_MULTIPLIER": True},
            capability,
        )
        assert code.count("ld.global*.v4.") == 1 + state + wide
        assert code.count("st.global*.v4.") == 1 + state
        assert code.count("bar.sync") == code.stack == 0 and code.registers <= 64
    narrow = [(tl.bfloat16, tl.int16), (tl.bfloat16, tl.float32), (tl.float16, tl.float32), (tl.bfloat16, tl.int64)]
    for (param, beside), low in zip(narrow, 2 * types[1:], strict=True):
        for grad in (tl.float32, low):
            check_masters(capability, grad, param, beside)
    of_24_bits = tl.int8, tl.bfloat16, tl.int8
    for state, param, beside in ((tl.int8, tl.float32, tl.bfloat16), of_24_bits, (tl.bfloat16, *narrow[0])):
        check_coded(capability, state, param, beside)
    if capability >= 90:
        for param, beside in [(tl.float32, tl.bfloat16), *narrow[:2]]:
            check_quantized(capability, param, beside)
    for grad in types:
        blocks = {"GRAD": grad, "CHUNK": 8192, "BLOCK": 1024}
        code = compiled(loss_scaling.amp_unscale, {**TABLES, **FLAGS}, blocks, capability)
        assert code.count("ld.global*.v4.") > 0 and code.count("st.global*.v4.") > 0 and code.stack == 0
        code = compiled(
            loss_scaling.amp_check_grads,
            {
                **TABLES,
                **dict.fromkeys(("chunk_count", "first_program", "all_programs"), "i32"),
                **dict.fromkeys(("scale", "multiplier", "result"), "*fp32"),
                **{"max_norm": "fp32", "sums": "*fp64", "flags": "*i32", "counter": "*i32"},
            },
            {**dict.fromkeys(("HAS_SCALE", "HAS_MULTIPLIER", "HAS_MAX_NORM"), True), **blocks, "PARTS": 1024},
            capability,
        )
        # Triton 3.6's assembler keeps a float64 sum in memory between chunks on Blackwell, outside the hot loop.
        spilled = 8 if capability >= 100 and triton.__version__.startswith("3.6.") else 0
        assert code.count("ld.global*.v4.") > 0 and code.stack <= spilled
        assert code.count("atom*.acq_rel*.add") == 1 and code.count("st.global*.v4.") == 0
    prepare = compiled(
        adam_and_sgd.amp_adam_prepare,
        {"words": "*i64", "scalars": "*fp32", "tensor_count": "i32", **FLAGS},
        {"HAS_MULTIPLIER": True, "HAS_FOUND_INF": True, "BLOCK": 128},
        capability,
    )
    update = compiled(
        loss_scaling.amp_update_scale,
        {
            **{"scale": "*fp32", "growth_tracker": "*i32", "skips": "*i32", "found_inf": "*fp32", "interval": "i32"},
            **dict.fromkeys(("growth", "backoff", "low", "high"), "i64"),
        },
        {},
        capability,
        warps=1,
    )
    assert prepare.stack == update.stack == 0


def constants_of(
    grad: tl.dtype,
    param: tl.dtype,
    beside: tl.dtype,
    quantized: tl.dtype = tl.float32,
    state: tl.dtype = tl.float32,
) -> dict[str, Any]:
    types = {"GRAD": grad, "PARAM": param, "BESIDE": beside, "STATE": state, "QUANTIZED": quantized}
    return {**types, "HAS_FOUND_INF": True, "CHUNK": 8192, "BLOCK": 512}


def check_quantized(capability: int, param: tl.dtype, beside: tl.dtype) -> None:
    """In blocks numbers of 8 bits are converted two at a time and written four; magnitudes meet once in a chunk."""
    for kernel, types, states, _ in OPTIMIZERS:
        plain, code = (
            compiled(kernel, TABLES | types, states | constants_of(tl.bfloat16, param, beside, to), capability)
            for to in (tl.float32, tl.float8e4nv)
        )
        more = {each: code.count(each) - plain.count(each) for each in ("st.global.b32", "st.global.b8", "bar.sync")}
        assert more["st.global.b32"] == 2, "a block's, and the note of its scale"
        assert more["st.global.b8"] == 4 * 2 and code.count("cvt.rn.satfinite.e4m3x2") == 2 * 3, "tails, skipped steps"
        assert code.count("red.*max") + code.count("atom.*max") == 1 and more["bar.sync"] <= 3
        assert code.stack == 0 and code.registers <= 128


def check_masters(capability: int, grad: tl.dtype, param: tl.dtype, beside: tl.dtype) -> None:
    """16-bit parameters and remainders are moved 8 bytes at a time; a checksum crosses warps only to be stored."""
    constants = constants_of(grad, param, beside)
    wide, remainder = int(grad == tl.float32), int(beside == tl.int16)
    for kernel, types, states, moments in OPTIMIZERS:
        code = compiled(kernel, {**TABLES, **types}, {**constants, **states}, capability)
        master = int(beside == tl.float32)
        assert code.count("ld.global*.v4.") == moments + wide + master
        assert code.count("ld.global*.v2.") == 1 - wide + 1 + remainder
        assert code.count("st.global*.v4.") == moments + master
        assert code.count("st.global*.v2.") == 1 + remainder
        assert code.shared == 16 * remainder and code.count("bar.sync") == 4 * remainder  # in blocks and in tails
        assert code.stack == 0 and code.registers <= (104 if remainder else 64)


def check_coded(capability: int, state: tl.dtype, param: tl.dtype, beside: tl.dtype) -> None:
    """In blocks codes are moved four at a time; the only single ones are those of rows and tails."""
    for kernel, types, states, moments in OPTIMIZERS:
        code = compiled(
            kernel, TABLES | types, states | constants_of(tl.bfloat16, param, beside, state=state), capability
        )
        single = 4 * (moments + (beside == tl.int8)) if state == tl.int8 else 0
        assert code.count("ld.global.b8") == code.count("st.global.b8") == single
        assert code.count("div.full") == code.count("sqrt.approx") == code.count("div.approx") == code.stack == 0
