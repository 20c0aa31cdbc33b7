"""Which 16-bit types count as multiplied in hardware: by torch's and oneDNN's answers, and by what the user caps."""

import pytest
import torch

from ampcompile.torch_private import processor
from ampcompile.torch_private.processor import Cpu

pytestmark = pytest.mark.units
LOW, HALF = torch.bfloat16, torch.float16
CAPS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
INTEL = {"core": "vendor_id : GenuineIntel flags : fpu avx512_bf16 avx512_fp16", "takes": (LOW, HALF)}
ARM = {"x86": False, "vectors": "SVE256"}


def cpu(units="avx512_bf16", takes=(LOW,), vectors="AVX512", x86=True, **more):
    """By default one with AVX512-BF16 and nothing else."""
    return Cpu(x86, vectors, frozenset(takes), frozenset(units.split()), **more)


UNITS = [  # a CPU, the 16-bit types that it has units for, and those whose units are faster than float32's
    ({}, [LOW], [LOW]),  # no /proc
    ({"units": ""}, [], []),  # oneDNN takes bfloat16 with AVX512F alone, and emulates it
    ({"units": "amx"}, [LOW], [LOW]),
    ({"units": "amx avx512_bf16", "takes": (LOW, HALF)}, [LOW, HALF], [LOW]),
    ({"vectors": "AVX2", "takes": ()}, [], []),
    ({"vectors": "DEFAULT"}, [], []),  # ATEN_CPU_CAPABILITY=default
    ({"vectors": "NO AVX"}, [], []),
    ({"vectors": "what comes after AVX512"}, [LOW], [LOW]),
    ({"onednn": False}, [], []),
    (ARM | {"takes": (LOW, HALF)}, [LOW, HALF], [LOW, HALF]),
    (ARM | {"takes": ()}, [HALF], [HALF]),
    *(({"cap": cap}, [], []) for cap in ("AVX512_CORE", "AVX2")),
    *(({"cap": cap}, [LOW], [LOW]) for cap in ("AVX512_CORE_BF16", "ALL", "NONSENSE")),
    (
        {"core": "vendor_id : AuthenticAMD flags : fpu avx512_bf16 avx512_fp16", "takes": (LOW, HALF)},
        [LOW, HALF],
        [LOW],
    ),
    ({"core": "vendor_id : GenuineIntel flags : fpu avx512_bf16"}, [LOW], [LOW]),  # Cooper Lake: not measured
    (INTEL, [LOW, HALF], []),  # as virtual machines see it that hide AMX
    (INTEL | {"cap": "AVX512_CORE"}, [HALF], []),  # the cap forbids bfloat16 alone
    *((INTEL | {"units": "avx512_bf16 amx", "cap": cap}, [LOW, HALF], [LOW]) for cap in ("", "ALL")),
    (INTEL | {"units": "amx amx_fp16", "cap": "AVX10_1_512_AMX_FP16"}, [LOW, HALF], [LOW, HALF]),
    (INTEL | {"units": "amx amx_fp16", "cap": "AVX512_CORE_FP16"}, [LOW, HALF], []),
]


@pytest.mark.parametrize(("about", "units", "faster"), UNITS)
def test_units_count_where_they_are_and_as_faster_where_they_are(about, units, faster):
    answers = (cpu(**about).multiplies, cpu(**about).multiplies_faster)
    assert [[dtype for dtype in (LOW, HALF) if answer(dtype)] for answer in answers] == [units, faster]


@pytest.mark.parametrize(
    ("maker", "mkl", "suits"),
    [("GenuineIntel", True, True), ("GenuineIntel", False, False), ("AuthenticAMD", True, False)],
)
def test_mkl_suits_the_cpus_of_its_maker(maker, mkl, suits):
    assert cpu(core=f"vendor_id : {maker} flags : fpu", mkl=mkl).suits_mkl() == suits


@pytest.mark.parametrize("name", CAPS)
def test_this_cpu_is_asked_for_real(name, monkeypatch):
    for cap in CAPS:
        monkeypatch.delenv(cap, raising=False)
    monkeypatch.setenv(name, "avx2")
    cpu = processor.this_cpu()
    assert cpu.cap == "AVX2" and cpu.takes <= {LOW, HALF} and isinstance(processor.read_core(), str)
    monkeypatch.delenv(name)
    processor.multiplies.cache_clear()
    assert processor.multiplies(LOW) == processor.this_cpu().multiplies(LOW)
    processor.multiplies.cache_clear()


@pytest.mark.parametrize(("capability", "says"), [((8, 0), "sm_80"), ((8, 9), ""), ((9, 0), "")])
def test_a_gpu_is_asked_for_units_of_8_bits(capability, says):
    assert bool(said := processor.why_no_fp8(*capability, rocm=False)) == bool(says) and says in said
    assert "ROCm" in processor.why_no_fp8(*capability, rocm=True)
