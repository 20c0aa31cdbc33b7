"""Importing the package loads little: no compiler, and nothing that only printing needs."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ampcompile
from ampcompile import errors
from tests.test_layout import FOLDERS, ROOT

HEAVY = (
    *("functorch", "numpy", "rich", "sympy", "torch._dynamo", "torch._functorch", "torch._inductor", "triton"),
    *("accelerate", "lightning", "peft", "transformers", "trl"),
)
SCRIPT = """
import sys, torch
before = set(sys.modules)
import ampcompile
print(sum(bool(sys.modules[name].__spec__) for name in set(sys.modules) - before))
import ampcompile.integrations
ampcompile.GradScaler
ampcompile.precision(torch.float32)(torch.nn.Linear(2, 2))(torch.ones(2, 2))
ampcompile.Policy.parse('op softmax=fp32'), ampcompile.explain, ampcompile.audit
print(*sorted(set(sys.modules) - before))
"""


def test_nothing_heavy_is_loaded_and_of_the_package_a_handful_of_modules() -> None:
    run = subprocess.run([sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=True)
    count, *names = run.stdout.split()
    assert int(count) < 20
    assert not {name for name in names for heavy in HEAVY if name == heavy or name.startswith(f"{heavy}.")}


@pytest.mark.ci
def test_the_backend_loads_no_records_of_casts_and_nothing_that_only_watched_graphs_need() -> None:
    script = "import sys, ampcompile.compiler.backend; print(*(name for name in sys.modules if 'ampcompile' in name))"
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=300, check=True)
    loaded = run.stdout.split()
    assert "ampcompile.records.logs" in loaded and "ampcompile.passes.pipeline" in loaded
    seldom = ("records.graphs", "records.recorder", "passes.after.record_magnitudes", "compiler.watched_graph")
    assert not {f"ampcompile.{name}" for name in seldom}.intersection(loaded)


@pytest.mark.ci
def test_no_import_computes_or_waits_for_a_thread() -> None:
    """What is made in an import has the modes of whoever imports first; a thread might wait for the import to end."""
    script = """
import importlib, pkgutil, sys, threading
import torch
from torch.utils._python_dispatch import TorchDispatchMode
class Refuses(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} in an import")
import torch._inductor.compile_fx, torch._inductor.lowering, torch.nn.attention.flex_attention, torch.distributed.fsdp
threading.Thread.start = None
import ampcompile
names = [m.name for m in pkgutil.walk_packages(ampcompile.__path__, "ampcompile.") if ".triton" not in m.name]
with torch.inference_mode(), Refuses():
    for name in names:
        if not name.endswith("__main__") and ".integrations." not in name:
            importlib.import_module(name)
print(len(names))
"""
    run = subprocess.run([sys.executable, "-P", "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert run.returncode == 0 and int(run.stdout) > 100, run.stdout + run.stderr


def test_every_public_name_is_there() -> None:
    star: dict[str, object] = {}
    exec("from ampcompile import *", star)
    ours = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert ours <= set(ampcompile.__all__) <= set(star)
    for name in ampcompile.__all__:
        assert name in dir(ampcompile)
        value = getattr(ampcompile, name)
        assert value is not None and type(value).__name__ != "module", name
    assert pickle.loads(pickle.dumps(ampcompile.Policy())) == ampcompile.Policy()
    assert pickle.loads(pickle.dumps(ampcompile.GradScaler)) is ampcompile.GradScaler
    with pytest.raises(AttributeError, match="has no attribute 'gradscaler'"):
        _ = ampcompile.gradscaler


NAMES = ("passes.pipeline", "kernels.tables", "ampcompile", "tests", "benchmarks", "fx")
TRY = """
import importlib, sys
for name in sys.argv[1:]:
    try: print(importlib.import_module("ampcompile." + name).__file__)
    except ModuleNotFoundError as error: print(error.name)
"""


def run_in(folder: Path, *arguments: str, installed: bool = False) -> list[str]:
    """What Python prints when started in a folder, by default without what an editable install adds to imports."""
    paths = [entry for entry in sys.path if "packages" in entry]
    command = [sys.executable, *([] if installed else ["-S"]), *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=True)
    return run.stdout.splitlines()


@pytest.mark.ci
def test_a_bare_checkout_is_imported_and_nothing_else_of_its_root() -> None:
    told = run_in(ROOT, "-c", TRY, *NAMES)
    assert told == [f"{ROOT}/passes/pipeline.py", f"{ROOT}/kernels/tables.py", *map("ampcompile.{}".format, NAMES[2:])]
    assert run_in(ROOT, "-m", "ampcompile", "--version") == [f"ampcompile {ampcompile.__version__}"]


@pytest.mark.ci
def test_a_second_checkout_reads_its_own_passes_and_a_wheel_no_kernels_of_others(tmp_path: Path) -> None:
    second, site = tmp_path / "second", tmp_path / "site"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, second / name, ignore=shutil.ignore_patterns("__pycache__"))
    expected = [f"{second}/passes/pipeline.py", f"{second}/kernels/tables.py"]
    assert run_in(second, "-c", TRY, *NAMES[:2], installed=True) == expected
    shutil.copytree(second, site)
    (site / "passes").rename(site / "ampcompile" / "passes")
    told = run_in(site, "-c", TRY, "passes.analysis.op_traits", "kernels")
    assert told == [f"{site}/ampcompile/passes/analysis/op_traits.py", "ampcompile.kernels"]
    shutil.rmtree(second / "passes")
    assert run_in(second, "-c", TRY, "kernels") == ["ampcompile.passes"]
