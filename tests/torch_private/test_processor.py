"""Which 16-bit types count as multiplied in hardware: by torch's and oneDNN's answers, and by what the user caps."""

import pytest
import torch

from ampcompile.torch_private import processor

pytestmark = pytest.mark.units
LOW, HALF = torch.bfloat16, torch.float16
CAPS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


@pytest.fixture
def machine(monkeypatch):
    """Sets what torch says of the CPU: by default one with AVX512-BF16 and nothing else."""

    def answer(
        vectors="AVX512", onednn=True, takes=(LOW,), avx512_bf16=True, amx=False, architecture="x86_64", cpuinfo=""
    ):
        for cap in CAPS:
            monkeypatch.delenv(cap, raising=False)
        monkeypatch.setattr(processor.platform, "machine", lambda: architecture)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: bool(amx))
        monkeypatch.setattr(torch.cpu, "_is_amx_fp16_supported", lambda: amx == "fp16")
        monkeypatch.setattr(processor, "read_core", lambda: cpuinfo)
        monkeypatch.setattr(processor, "_onednn_takes", lambda dtype: dtype in takes)

    yield answer
    forget()


def forget() -> None:
    for answer in (processor.multiplies, processor.multiplies_faster, processor.suits_mkl):
        answer.cache_clear()


def units() -> list[torch.dtype]:
    forget()
    return [dtype for dtype in (LOW, HALF) if processor.multiplies(dtype)]


@pytest.mark.parametrize(
    ("about", "found"),
    [
        ({}, [LOW]),
        ({"avx512_bf16": False}, []),  # oneDNN takes bfloat16 with AVX512F alone, and emulates it
        ({"avx512_bf16": False, "amx": True}, [LOW]),
        ({"amx": True, "takes": (LOW, HALF)}, [LOW, HALF]),
        ({"vectors": "AVX2", "takes": ()}, []),
        ({"vectors": "DEFAULT"}, []),  # ATEN_CPU_CAPABILITY=default
        ({"vectors": "NO AVX"}, []),
        ({"vectors": "what comes after AVX512"}, [LOW]),
        ({"onednn": False}, []),
        ({"architecture": "aarch64", "vectors": "SVE256"}, [LOW, HALF]),
        ({"architecture": "arm64", "vectors": "NO AVX", "takes": ()}, [HALF]),
    ],
)
def test_what_the_cpu_has_counts(machine, about, found):
    machine(**about)
    assert units() == found


@pytest.mark.parametrize("name", CAPS)
@pytest.mark.parametrize(
    ("cap", "found"),
    [("AVX512_CORE", []), ("avx2", []), ("AVX512_CORE_BF16", [LOW]), ("ALL", [LOW]), ("", [LOW]), ("nonsense", [LOW])],
)
def test_what_the_user_caps_counts(machine, monkeypatch, name, cap, found):
    machine()
    monkeypatch.setenv(name, cap)
    assert units() == found


INTEL = "vendor_id : GenuineIntel flags : fpu avx512_bf16 avx512_fp16"


@pytest.mark.parametrize(
    ("about", "cap", "faster"),
    [
        ({"cpuinfo": "vendor_id : AuthenticAMD flags : fpu avx512_bf16"}, "", [LOW]),
        ({"cpuinfo": "vendor_id : AuthenticAMD flags : fpu avx512_bf16 avx512_fp16", "takes": (LOW, HALF)}, "", [LOW]),
        ({"cpuinfo": "vendor_id : GenuineIntel flags : fpu avx512_bf16"}, "", [LOW]),  # Cooper Lake: not measured
        ({"cpuinfo": INTEL, "takes": (LOW, HALF)}, "", []),  # as virtual machines see it that hide AMX
        ({"cpuinfo": INTEL, "takes": (LOW, HALF), "amx": True}, "", [LOW]),
        ({"cpuinfo": INTEL, "takes": (LOW, HALF), "amx": True}, "ALL", [LOW]),
        ({"cpuinfo": INTEL, "takes": (LOW, HALF), "amx": "fp16"}, "AVX10_1_512_AMX_FP16", [LOW, HALF]),
        ({"cpuinfo": INTEL, "takes": (LOW, HALF), "amx": "fp16"}, "AVX512_CORE_FP16", []),
        ({"architecture": "aarch64", "vectors": "SVE256"}, "", [LOW, HALF]),
        ({"avx512_bf16": False}, "", []),
        ({}, "", [LOW]),  # no /proc
    ],
)
def test_units_count_as_faster_where_they_are(machine, monkeypatch, about, cap, faster):
    machine(**about)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", cap)
    forget()
    assert [dtype for dtype in (LOW, HALF) if processor.multiplies_faster(dtype)] == faster


@pytest.mark.parametrize(
    ("maker", "mkl", "suits"),
    [("GenuineIntel", True, True), ("GenuineIntel", False, False), ("AuthenticAMD", True, False)],
)
def test_mkl_suits_the_cpus_of_its_maker(machine, monkeypatch, maker, mkl, suits):
    machine(cpuinfo=f"vendor_id : {maker} flags : fpu")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    forget()
    assert processor.suits_mkl() == suits


def test_this_cpu_is_asked_for_real():
    answers = [processor._onednn_takes(dtype) for dtype in (LOW, HALF)]
    assert all(isinstance(answer, bool) for answer in answers)
    assert isinstance(processor.read_core(), str)


@pytest.mark.parametrize(("found", "says"), [((8, 0), "sm_80"), ((8, 9), ""), ((9, 0), "")])
def test_the_gpu_that_multiplies_is_asked_for_units_of_8_bits(found, says, monkeypatch):
    of = {torch.device("cuda", 1): found, torch.device("cuda", 0): (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", of.__getitem__)
    monkeypatch.setattr(torch.version, "hip", None)
    assert bool(said := processor.hinders_fp8(torch.device("cuda", 1))) == bool(says) and says in said
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "ROCm" in processor.hinders_fp8(torch.device("cuda", 0))
