"""Compilers that fail and cache folders that can't be used, each in a process of its own that meets them afresh."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
TRAIN = """
import logging
logging.basicConfig(level=logging.WARNING)
import torch
from proof.faults.subject import Subject
torch.manual_seed(0)
subject = Subject()
subject.train(2)
subject.check()
subject.check_step()
"""
"""Trains by our kernels, and by torch's where they can't be built; the numbers are right either way."""
FALLS_BACK = ["torch's own CPU kernels are used instead"]
FOR_ITSELF = ["the C++ kernels are built for this process alone"]


def _run(code: str, environment: dict[str, str], says: Sequence[str] = ()) -> None:
    """Run a program; it must succeed, and say these words on stderr, and none of them if there are none to say."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-500:]
    missing = [words for words in says if words not in done.stderr]
    assert not missing, f"not said: {missing}; said: {done.stderr[-500:]}"
    assert says or "kernels" not in done.stderr, done.stderr[-500:]


def kernels_dont_compile() -> int:
    """The C++ compiler fails."""
    with TemporaryDirectory() as folder:
        compiler = Path(folder, "broken")
        compiler.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\necho this compiler is broken >&2\nexit 1\n'
        )
        compiler.chmod(0o755)
        _run(TRAIN, {"CXX": str(compiler), "AMPCOMPILE_CACHE_DIR": folder}, ["this compiler is broken", *FALLS_BACK])
    return 1


def no_cache_folder() -> int:
    """The cache folder can't be made, or not be written to."""
    with TemporaryDirectory() as folder:
        occupied = Path(folder, "occupied")
        occupied.write_text("")
        for place in (occupied / "inside", occupied):
            _run(TRAIN, {"AMPCOMPILE_CACHE_DIR": str(place)}, FOR_ITSELF)
    unwritable = Path("/sys/kernel")  # so it is for every user
    if unwritable.is_dir():
        _run(TRAIN, {"AMPCOMPILE_CACHE_DIR": str(unwritable)}, FOR_ITSELF)
    return 3


def corrupt_cache() -> int:
    """Files of the cache folder are cut off, or overwritten."""
    trials = 0
    with TemporaryDirectory() as folder:
        _run(TRAIN, {"AMPCOMPILE_CACHE_DIR": folder})
        (built,) = Path(folder).glob("*.so")
        whole = built.read_bytes()
        for content in (b"", b"no library", whole[: len(whole) // 2], whole[:5000]):
            built.write_bytes(content)
            _run(TRAIN, {"AMPCOMPILE_CACHE_DIR": folder})
            assert len(built.read_bytes()) >= len(whole), "it wasn't built again"
            trials += 1
    return trials


def inductor_cant_compile() -> int:
    """Inductor's compiler fails; with one that works, the same process goes on."""
    code = """
import os, torch
from pathlib import Path
from torch import nn
torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8)
run = torch.compile(model, backend="amp")
try:
    run(x)
except Exception as error:
    assert "this compiler is broken" in str(error), error
else:
    raise SystemExit("nothing was raised")
Path(os.environ["CXX"]).write_text('#!/bin/sh\\nexec g++ "$@"\\n')
torch._dynamo.reset()
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    expected = model(x).float()
assert torch.allclose(run(x), expected, atol=0.02), "numbers"
"""
    with TemporaryDirectory() as folder:
        compiler = Path(folder, "broken")
        compiler.write_text(
            '#!/bin/sh\ncase "$*" in *--version*|*--help*) exec g++ "$@";; esac\n'
            "echo this compiler is broken >&2\nexit 1\n"
        )
        compiler.chmod(0o755)
        _run(code, {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": folder, "AMPCOMPILE_CACHE_DIR": folder})
    return 1


FAULTS = {
    (fault.__doc__ or "").rstrip("."): fault
    for fault in (kernels_dont_compile, no_cache_folder, corrupt_cache, inductor_cant_compile)
}
