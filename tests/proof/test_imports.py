"""Imports go one way: tests use the proof and the benchmarks, the proof uses the benchmarks."""

import ast

from tests.test_layout import ROOT


def test_imports_go_one_way() -> None:
    for folder, above in (("proof", {"tests"}), ("benchmarks", {"tests", "proof"})):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not {name.split(".")[0] for name in names} & above, path
