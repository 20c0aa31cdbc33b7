"""The C++ library: built once, built by nobody where there is no compiler; 16-bit floats rounded as torch does."""

import ctypes
import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from ampcompile.kernels import native
from ampcompile.kernels.adam import AdamGroup, AdamTensors, adam_
from ampcompile.kernels.check_grads import check_grads
from ampcompile.weights import table


@pytest.fixture
def compiler(tmp_path):
    """One that is fast: it gives out a copy of the library that other tests use."""
    assert native.available()
    file = tmp_path / "compiler"
    copies = f'for to; do :; done; cp {native.library()._name} "$to"'  # to its last argument
    file.write_text(f'#!/bin/sh\n[ "$1" = --version ] || {{ {copies}; }}\n')
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def unloaded():
    """`native.library` as in a new process, before and after."""

    def forget() -> None:
        native.library.cache_clear()
        native.find_compiler.cache_clear()

    forget()
    yield
    forget()


def test_it_is_built_once_into_the_cache_folder(unloaded, monkeypatch, tmp_path):
    monkeypatch.setenv("AMPCOMPILE_CACHE_DIR", str(tmp_path / "new"))
    assert native.available()
    (built,) = (tmp_path / "new").iterdir()
    when = built.stat().st_mtime_ns
    native.library.cache_clear()
    assert native.available()
    assert [built] == list((tmp_path / "new").iterdir()) and built.stat().st_mtime_ns == when


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.delenv("AMPCOMPILE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(native.cache_folder()) == "/somewhere/ampcompile"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert str(native.cache_folder()) == "/home/me/.cache/ampcompile"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 9)
    assert native.cache_folder() == Path(tempfile.gettempdir(), f"ampcompile_{2**31 - 9}"), "nobody's home"


def test_without_a_compiler_it_is_unavailable_and_says_so(unloaded, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING, "ampcompile"):
        assert not any(map(native.available, ("step", "weights", "planned")))
    assert caplog.text.count("no C++ compiler found") == 1


def test_a_compiler_that_fails_is_quoted(unloaded, monkeypatch, caplog, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho this one is broken >&2; [ $1 = --version ]\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("AMPCOMPILE_CACHE_DIR", str(tmp_path))
    with caplog.at_level(logging.WARNING, "ampcompile"):
        assert not native.available()
    assert "this one is broken" in caplog.text


@pytest.mark.ci
def test_processes_that_start_together_build_it_once(monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\n[ $1 = --version ] && exit\necho built >> "$LOG"; sleep 0.5; for out; do :; done; : > "$out"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("AMPCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    code = f"from ampcompile.kernels import native; native.build({str(compiler)!r})"
    for process in [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]:
        assert process.wait(100) == 0
    assert (tmp_path / "log").read_text() == "built\n"


@pytest.mark.parametrize(("mode", "alone"), [(0o700, True), (0o755, True), (0o775, False), (0o757, False)])
def test_a_folder_is_ours_alone_if_neither_its_group_nor_others_can_write(mode, alone, tmp_path):
    tmp_path.chmod(mode)
    assert native.ours_alone(tmp_path) == alone
    assert not native.ours_alone(tmp_path / "missing")


def test_what_others_can_write_is_never_loaded(compiler, unloaded, monkeypatch, caplog, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("AMPCOMPILE_CACHE_DIR", str(shared))
    monkeypatch.setenv("CXX", compiler)
    private = tmp_path / "temporary"
    private.mkdir()
    monkeypatch.setattr(native.tempfile, "tempdir", str(private))
    shared.chmod(0o777)
    with caplog.at_level(logging.WARNING, "ampcompile"):
        assert native.available()
    assert not list(shared.iterdir()) and "chmod go-w" in caplog.text
    (built,) = private.glob("ampcompile*/*.so")

    shared.chmod(0o755)
    planted = shared / built.name
    planted.write_bytes(b"from somebody else")
    planted.chmod(0o666)
    native.library.cache_clear()
    assert native.available()
    assert planted.read_bytes() != b"from somebody else" and planted.stat().st_mode & 0o777 == 0o700


def patterns() -> torch.Tensor:
    """Every float32 exponent and sign with mantissas at, below and above each tie of both 16-bit types."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    return (high[:, None] | low).flatten().view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_rounded_to_the_copies_as_torch_rounds_them(dtype):
    values = patterns()
    copy = torch.empty_like(values, dtype=dtype)
    zeros = [torch.zeros_like(values) for _ in range(3)]
    tensors = AdamTensors(
        [AdamGroup(0.0, 0.9, 0.99, 1e-8, 0.0, True, False)],
        params=[values.clone()],
        grads=[zeros[0]],
        exp_avgs=[zeros[1]],
        exp_avg_sqs=[zeros[2]],
        max_exp_avg_sqs=[None],
        steps=[torch.zeros(())],
        copies=[copy],
        group_of=[0],
    )
    adam_(tensors, found_inf=torch.ones(()))  # a skipped step casts, and does nothing else
    expected = values.to(dtype)
    number = ~values.isnan()
    assert torch.equal(copy.view(torch.int16)[number], expected.view(torch.int16)[number])
    assert copy[~number].isnan().all()
    assert torch.equal(tensors.params[0].view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_number_is_read_as_torch_reads_it(dtype):
    for bits in torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).split(1)[::97]:
        value = bits.view(dtype)
        found_inf, _, norm, _ = check_grads([value])
        assert found_inf.item() == (not value.isfinite().item())
        torch.testing.assert_close(norm, value.double().abs().float()[0], rtol=1e-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("kept", [0, 0.001, 0.5, 1])
def test_a_library_that_was_cut_off_is_built_again(compiler, monkeypatch, tmp_path, kept):
    monkeypatch.setenv("AMPCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    built = native.build(compiler)
    whole = built.read_bytes()
    built.write_bytes(whole[: int(len(whole) * kept)] if kept < 1 else whole[:-kept])
    assert native.build(compiler) == built and built.read_bytes() == whole


def test_where_the_folder_cannot_be_written_to_it_is_built_elsewhere(compiler, monkeypatch):
    monkeypatch.setenv("AMPCOMPILE_CACHE_DIR", "/proc/self/fd")  # which nobody can make files in
    assert ctypes.CDLL(str(native.build(compiler))).check_grads


MAY_NOT_THROW = {"now", "count_passes", "fix", "drop", "end_capture", "mark_maybe_written"}
MAY_NOT_THROW |= {"plan_grads", "plan_free", "marks_free", "attention_available"}


def test_no_entry_of_a_library_lets_an_exception_out():
    """A library's caller is ctypes, which no exception of C++ may pass: it would end the process."""
    bare, count = set(), 0
    for name in ("step", "weights", "planned"):
        entries = (native.SOURCES / f"{name}.cpp").read_text().partition('extern "C" {')[2]
        for entry in re.finditer(r"^\w[\w *]*?(\w+)\((?:.|\n)*?(?:}$|^})", entries, re.MULTILINE):
            count += 1
            if not re.search(r"guarded\(|status_of\(| try \{", entry[0]):
                bare.add(entry[1])
    assert count > 40 and bare - MAY_NOT_THROW == {"place_of"}  # for others in its file


def test_torchs_errors_in_a_library_of_objects_are_pythons():
    with torch.inference_mode():
        counted_by_none = torch.ones(2)
    with pytest.raises(RuntimeError, match="Inference tensors do not track version counter"):
        table.load().sharers_of(counted_by_none)


@pytest.mark.ci
def test_a_kernel_without_memory_raises():
    """In a process that may have no more, with a gradient of as many elements as no machine has."""
    script = """
import resource, numpy as np, torch
from ampcompile.kernels import native, tables
assert native.available()
with open("/proc/self/statm") as file:
    pages = int(file.read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**26,) * 2)
grads = tables.pointers(*(np.array([value]) for value in (2**50, 0, 0)))
native.call("check_grads", 1, grads, None, None, None, np.zeros(3, np.float32))
"""
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert run.returncode == 1 and "MemoryError: found too little memory for the kernel check_grads" in run.stderr
