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

    def answer(vectors="AVX512", onednn=True, takes=(LOW,), avx512_bf16=True, amx=False, architecture="x86_64"):
        for cap in CAPS:
            monkeypatch.delenv(cap, raising=False)
        monkeypatch.setattr(processor.platform, "machine", lambda: architecture)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        monkeypatch.setattr(processor, "_onednn_takes", lambda dtype: dtype in takes)

    yield answer
    processor.multiplies.cache_clear()


def units() -> list[torch.dtype]:
    processor.multiplies.cache_clear()
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


def test_this_cpu_is_asked_for_real():
    answers = [processor._onednn_takes(dtype) for dtype in (LOW, HALF)]
    assert all(isinstance(answer, bool) for answer in answers)
