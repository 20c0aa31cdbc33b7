"""Inductor's caches lie where the environment says."""

from pathlib import Path

import pytest

from ampcompile.torch_private.backends import inductor_cache


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert inductor_cache() == tmp_path
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert "torchinductor" in inductor_cache().name
