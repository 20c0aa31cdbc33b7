"""What torch says of its backends, and of Inductor's options, modes and caches."""

from pathlib import Path

import pytest
import torch

from ampcompile.torch_private.backends import backend_is_found, inductor_cache, inductor_modes, inductor_options


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert inductor_cache() == tmp_path
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert "torchinductor" in inductor_cache().name


def test_modes_and_options_are_inductors() -> None:
    modes, options = inductor_modes(), inductor_options()
    assert modes["max-autotune"]["max_autotune"] is True and modes["default"] == {}
    assert options["epilogue_fusion"] == torch._inductor.config.epilogue_fusion
    assert all(name in options for mode in modes.values() for name in mode)


def test_the_backend_is_found_if_its_entry_point_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_is_found()
    monkeypatch.setattr(torch._dynamo, "list_backends", lambda: ["inductor"])
    assert not backend_is_found()
