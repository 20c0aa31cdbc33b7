"""Scripts of others run as they stand but for our changes; two lines are ours, and the page shows what was measured."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.records import Records
from benchmarks.scripts import __main__ as scripts
from benchmarks.scripts.cases import CASES, WAYS, Case
from benchmarks.scripts.titan import __main__ as titan
from tests.test_layout import ROOT

SCRIPT = """
import sys, torch, near
weight = torch.nn.Parameter(torch.tensor(float(sys.argv[-1])))
optimizer = torch.optim.SGD([weight], lr=0.5)
for step in range(4):
    optimizer.zero_grad()
    for _ in range(2):
        (near.FACTOR * weight).backward()
    optimizer.step()
open("left_here", "w").write(open("prepared").read())
"""


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def case(tmp_path: Path) -> Case:
    clone = tmp_path / "theirs"
    (clone / "a").mkdir(parents=True)
    (clone / "a" / "script.py").write_text(SCRIPT)
    (clone / "a" / "near.py").write_text("FACTOR = 1\n")
    git(clone, "init", "-q")
    git(clone, "add", "-A")
    git(clone, "commit", "-qm", "pinned")
    pinned = git(clone, "rev-parse", "HEAD").strip()
    (clone / "a" / "near.py").write_text("FACTOR = 3\n")
    (tmp_path / "amp.diff").write_text(git(clone, "diff", "-U0"))
    (clone / "a" / "near.py").write_text("raise SystemExit('not the pinned commit')\n")
    git(clone, "commit", "-qam", "later")

    def prepare(folder: Path) -> None:
        (folder / "prepared").write_text("here")

    return Case("tiny", "somebody/theirs", pinned, "a/script.py", prepare, "1", "2")


@pytest.mark.ci
def test_a_script_runs_as_it_is_and_changed(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "diffs", lambda self, way: [tmp_path / "amp.diff"] if way == "amp" else [])
    plain = scripts.run(case, "autocast", tmp_path)
    assert plain["losses"] == [1, 0, -1, -2] and plain["busy"] == sorted(plain["busy"])
    assert scripts.run(case, "amp", tmp_path)["losses"] == [3, -6, -15, -24]
    assert scripts.run(case, "inductor", tmp_path)["losses"] == [2, 1, 0, -1]


def test_a_script_that_fails_says_why(case: Case, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        scripts.run(replace(case, arguments="x"), "autocast", tmp_path)
    assert "could not convert string to float" in capfd.readouterr().err


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_two_lines_are_ours(case: Case) -> None:
    changed = (ROOT / "benchmarks" / "scripts" / f"{case.name}.amp.diff").read_text().splitlines()
    ours = [line for line in changed if line.startswith("+") and not line.startswith("+++")]
    assert len(ours) <= 2 and any("amp" in line.lower() for line in ours)


def test_the_page_shows_what_was_measured() -> None:
    page = (ROOT / "docs" / "integrations.md").read_text()
    assert scripts.TABLE.findall(page) == [scripts.page_table(Records.load(scripts.FIGURES).stages)]
    assert all(case.commit in page and case.script in page for case in CASES)


def test_a_table_shows_scripts_that_ran_every_way() -> None:
    found = scripts.summary({"busy": [0.0, 0.5, 1.0, 2.0, 3.0], "losses": [4.0, 3.0, 2.0, 1.0, 0.0]})
    assert found == {"steps": 5, "ms": [1000.0, 1000.0, 1000.0], "first": 2.0, "last": 2.0}
    whole, part = CASES[0], CASES[1]
    cases = {whole.name: dict.fromkeys(WAYS, found), part.name: {"amp": found}}
    text = scripts.page_table(cases)
    assert text.count("1000 (1000 to 1000)") == len(WAYS) and whole.script in text and part.script not in text


def test_a_distance_is_in_parts_of_the_way_that_training_moved_weights() -> None:
    before, after = {"a": torch.tensor([0.0, 1.0])}, {"a": torch.tensor([3.0, 5.0])}
    found, other = ({"weights": [before, {"a": after["a"] + error}]} for error in (1.0, 0.0))
    assert titan.distance(found, other) == pytest.approx((2 / 25) ** 0.5) and titan.distance(other, other) == 0


def test_two_lines_are_ours_in_torchtitan_and_the_page_shows_what_was_measured() -> None:
    changed = Path(titan.__file__).with_name("amp.diff").read_text().splitlines()
    ours = [line for line in changed if line.startswith("+") and not line.startswith("+++")]
    page = titan.PAGE.read_text()
    assert len(ours) == 2 and "\n".join(ours) in page
    assert titan.TABLE.findall(page) == [titan.page_table(Records.load(titan.FIGURES).stages["debugmodel"])]
