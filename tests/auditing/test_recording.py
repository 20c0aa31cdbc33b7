"""What is recorded of a tensor tells it from others, and a file holds data alone."""

import math
from pathlib import Path

import pytest
import torch

from ampcompile.auditing.recording import Recording, Returned, Step, distance, fingerprint
from ampcompile.auditing.records import Place
from ampcompile.errors import AuditError


def test_a_fingerprint_estimates_distances() -> None:
    x = torch.randn(64, 48, dtype=torch.float64)
    near = x + 1e-5 * torch.randn_like(x)
    one = x.clone()
    one[3, 4] += 1
    assert distance(fingerprint(x), fingerprint(near)) == pytest.approx(1e-5, rel=0.9)
    assert distance(fingerprint(x), fingerprint(one)) == pytest.approx(1 / float(x.norm()), rel=1e-3)
    assert distance(fingerprint(x), fingerprint(x[:, torch.randperm(48)])) > 0.5
    assert distance(fingerprint(torch.zeros(3)), fingerprint(torch.zeros(3))) == 0


def test_a_fingerprint_is_that_of_the_numbers() -> None:
    x = torch.randn(8, 8, 4)
    assert fingerprint(x) == fingerprint(x.permute(1, 0, 2).contiguous().permute(1, 0, 2))
    assert fingerprint(torch.tensor([1.0, math.inf, math.nan])) == fingerprint(torch.tensor([1.0, 0, 0]))
    assert len(fingerprint(torch.tensor([1 + 2j]))) == len(fingerprint(torch.arange(3))) == 9
    assert fingerprint(torch.arange(1.0, 6.0))[:4] == pytest.approx((55**0.5, 3, 13, -1)), "the same on every machine"


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    step = Step(Place("aten.mm", "a.b", "m.py:1", True), "bf16", (2, 3), (1.0, 0.1), 1e-3, None, 4.0, (0, 1))
    recording = Recording({"torch": "2"}, [step], {"output 0": Returned(1e-3, math.nan, 6)})
    recording.save(tmp_path / "run.json")
    assert repr(Recording.load(tmp_path / "run.json")) == repr(recording)
    steps, results = (part.splitlines() for part in str(recording).split("\n\n"))
    assert steps[1].split() == ["aten.mm", "(backward)", "a.b", "m.py:1", "bf16", "2x3", "1.0e-03"]
    assert results[1].split() == ["output", "0", "1.0e-03", "not", "finite"]


@pytest.mark.parametrize("text", ['{"format": "another"}', "[]", "\x80\x04", '{"format": "ampcompile recording 1"}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(AuditError, match="no recording that this version reads"):
        Recording.load(tmp_path / "x.json")
