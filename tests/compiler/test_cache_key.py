"""Whatever decides what is compiled is in the key that Inductor's caches know it by, and nothing else is."""

from itertools import product
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from torch._dynamo.utils import counters

from ampcompile.compiler import inductor
from ampcompile.compiler.inductor import cache_key, covered_files, source_key
from ampcompile.passes.analysis.products import WideProducts
from ampcompile.torch_private.lowering import hash_of_files
from tests.test_layout import ROOT, SOURCES, imports

DECIDES_NOTHING = [
    *("ampcompile/insight/report.py", "ampcompile/optim/plan.py", "ampcompile/timing/trace.py"),
    *("docs/explain.md", "tests/conftest.py", "pyproject.toml"),
]


def test_the_key_covers_all_that_passes_kernels_and_decompositions_import_and_nothing_else() -> None:
    rooms = ("ampcompile.passes", "ampcompile.kernels", "ampcompile.torch_private", "ampcompile.compiler.inductor")
    pending = [module for module in SOURCES if module.startswith(rooms)]
    reached: set[str] = set()
    while pending:
        module = pending.pop()
        if module not in reached:
            reached.add(module)
            pending += imports(module) & SOURCES.keys()
    covered = {path.resolve() for path in covered_files()}
    assert not {module for module in reached if SOURCES[module].resolve() not in covered}
    assert {path.resolve() for path in (ROOT / "kernels" / "cpp").iterdir() if path.is_file()} <= covered
    assert covered.isdisjoint((ROOT / name).resolve() for name in DECIDES_NOTHING)
    assert source_key() == hash_of_files(covered_files())


def test_a_file_that_is_renamed_or_whose_end_moves_to_the_next_one_gives_another_key(tmp_path: Path) -> None:
    first, second = tmp_path / "a.py", tmp_path / "b.py"

    def key(one: str, other: str) -> str:
        first.write_text(one)
        second.write_text(other)
        return hash_of_files([first, second])

    keys = [key("x = 1\n", "y = 2\n"), key("x = 1\ny = 2\n", ""), key("y = 2\n", "x = 1\n")]
    keys.append(hash_of_files([second.rename(tmp_path / "c.py"), first]))
    assert len(set(keys)) == 4


def test_inductors_caches_miss_what_was_compiled_under_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = uuid4().hex, uuid4().hex
    found = []
    for key in (first, first, second):
        monkeypatch.setattr(inductor, "cache_key", lambda *_, key=key: key)
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad():
            torch.compile(lambda x: (x @ x).sin(), backend="amp")(torch.randn(4, 4))
        found.append((counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"]))
    assert found == [(0, 1), (1, 0), (0, 1)]


def test_the_key_tells_cpus_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock Inductor doesn't: a graph that AVX-512 code was cached for gives wrong numbers with AVX2."""
    keys = set()
    for vectors in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda vectors=vectors: vectors)
        types = [frozenset(each) for each in ((), (torch.float16,), (torch.float16, torch.bfloat16))]
        keys |= {cache_key(WideProducts(*each)) for each in product(types, types, (False, True))}
    assert len(keys) == 36
