"""What has a verdict isn't run again, shards share the work, and a process that dies is a verdict."""

import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records import Records
from proof import part, run
from proof.__main__ import main
from proof.part import Part
from proof.results import Failure, Verdict, read_verdicts

GROUPS = [f"group {n}" for n in range(20)]


def groups(everything: bool) -> list[str]:
    return GROUPS if everything else GROUPS[:10]


class Here:
    """Verdicts of this process; `ran` are the groups."""

    def __init__(self, _: Path) -> None:
        self.ran: list[str] = []
        made.append(self)

    def judge(self, name: str, group: str, seconds: float) -> Verdict:
        self.ran.append(group)
        return Verdict(group, {"fails": 1}, [Failure("values", "[b]wrong")])

    def close(self) -> None:
        pass


made: list[Here] = []


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    made.clear()
    monkeypatch.setattr(part, "HOMES", {"made": ""})
    monkeypatch.setattr(part, "load_part", lambda name: Part("made up", "", groups, Verdict, str))
    monkeypatch.setattr(run, "Workers", Here)
    monkeypatch.setattr("proof.__main__.show", lambda names, folder: "shown")
    monkeypatch.setattr("proof.__main__.PAGE", tmp_path / "proof.md")
    return lambda *arguments: (main([*arguments, "--results", str(tmp_path)]), made[-1].ran)


def test_what_is_done_is_not_done_again(proof: Any, tmp_path: Path) -> None:
    status, ran = proof()
    assert status == 0 and sorted(ran) == sorted(GROUPS[:10]) and ran != GROUPS[:10]
    assert proof() == (0, [])
    assert sorted(proof("--all")[1]) == sorted(GROUPS[10:])
    assert sorted(proof("--only", "group 1")[1]) == ["group 1"]
    assert sorted(proof("--again")[1]) == sorted(GROUPS[:10])
    assert {verdict.group for verdict in read_verdicts([Records.load(tmp_path / "made.json")])} == set(GROUPS[:10])


def test_shards_share_the_work(proof: Any) -> None:
    ran = [proof("--all", "--shard", f"{n}/3")[1] for n in (1, 2, 3)]
    assert sorted(group for each in ran for group in each) == sorted(GROUPS) and {len(each) for each in ran} == {6, 7}
    assert proof("--all") == (0, []), "what shards have done is done"


def test_when_time_is_up_the_rest_is_left(proof: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert proof("--minutes", "1e-9") == (1, []) and signal.getsignal(signal.SIGTERM) is before


def test_a_process_that_fails_is_a_verdict_and_the_next_one_works(tmp_path: Path) -> None:
    with contextlib.closing(run.Workers(tmp_path)) as workers:
        (failure,) = workers.judge("no part", "a group", 300).failures
        assert failure.kind == "process" and "no part" in failure.text and workers.process is None
