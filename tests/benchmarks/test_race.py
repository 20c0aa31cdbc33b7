"""Peers run in turn and are checked; who fails is out, with the reason; what is noted is not measured again."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompile.kernels import native
from benchmarks import plans, race
from benchmarks.apart import FailedError
from benchmarks.candidate import KINDS, Candidate, Steps, TrainingStep
from benchmarks.peers import AMP, BASELINE, PEERS, Peer
from benchmarks.plans import CALL, PLANS, Work, pack, shrink
from benchmarks.race import Race, judge
from benchmarks.records import Records

TINY = Work("tiny GPT 23M", 2, 8, ("eager float32", "eager autocast"))


class Fake:
    """A peer that answers at once."""

    def __init__(self, log: list[str], name: str, error: float = 1e-3, dies: str = "") -> None:
        self.log, self.name, self.error, self.dies = log, name, error, dies

    def ask(self, method: str, *args: Any) -> Any:
        if method == self.dies:
            raise FailedError("its process died")
        self.log.append(f"{method} {self.name}")
        return {"begin": 0.5, "round": 0.25, "end": {"peak_bytes": 7}}[method]

    def receive(self) -> dict[str, float]:
        return {"error": self.error}


def test_rounds_go_back_and_forth_and_who_fails_is_out() -> None:
    work, log = Work("GPT 23M", 1, 1, ("eager autocast", BASELINE, AMP, "Inductor float32")), []
    contest = Race(work)
    contest.running = {name: Fake(log, name) for name in work.peers[:2]}
    contest.running |= {AMP: Fake(log, AMP, dies="round"), "Inductor float32": Fake(log, "wrong", error=0.9)}
    contest.await_prepared()
    figures = contest.time(CALL, rounds=2)
    assert figures == {name: {"seconds": [0.25] * 2, "error": 1e-3, "peak_bytes": 7} for name in work.peers[:2]}
    assert [line for line in log if line.startswith("round")] == [
        f"round {name}" for name in (*work.peers[:2], *work.peers[1::-1])
    ]
    assert contest.out[AMP] == "its process died" and "wrong numbers" in contest.out["Inductor float32"]


def test_who_does_other_work_is_told() -> None:
    assert not judge({"error": 3e-3}, {}, low=True) and not judge({"error": 1e-7}, {}, low=False)
    assert "ran in float32" in judge({"error": 1e-7}, {}, low=True) and "wrong" in judge(
        {"error": float("nan")}, {}, True
    )
    assert not judge({"losses": [2.0, 1.01]}, {"losses": [2.0, 1.0]}, True)
    for loss in (1.2, float("nan")):
        assert "trains otherwise" in judge({"losses": [2.0, loss]}, {"losses": [2.0, 1.0]}, True)


def test_a_race_is_noted_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records(tmp_path / "r.json", {})
    unable = Work("tiny GPT 23M", 2, 8, ("eager autocast", "none"), ("clipped step",))
    monkeypatch.setitem(PEERS, "none", Peer("none", "amp", "compiled", options={"no such option": 1}))
    works = [[TINY], [unable]]
    native.available()
    (tmp_path / "kernels").symlink_to(native.cache_folder())  # where our C++ kernels are built by now
    assert race.run(works, records, "cpu", tmp_path, rounds=2) == 0
    call, step = (
        records.stages[race.name_stage(work, kind)] for work, kind in ((TINY, CALL), (unable, "clipped step"))
    )
    assert (
        call["eager float32"]["error"] == 0 < call["eager autocast"]["error"]
        and len(call["eager float32"]["seconds"]) == 2
    )
    assert step["eager autocast"]["losses"][-1] < step["eager autocast"]["losses"][0]
    assert len(step["eager autocast"]["host_seconds"]) == 3 and step["eager autocast"]["peak_bytes"] > 0
    assert "no such option" in step["none"]["why"]
    monkeypatch.setattr(race, "enter", None)  # nothing is started again
    monkeypatch.setattr(race, "BUILD", "")
    assert race.run(works, Records.load(records.path), "cpu", tmp_path) == 0
    assert race.run([[TINY], [unable]], Records(tmp_path / "n.json", {}), "cpu", tmp_path, until=time.monotonic()) == 2


class Regression(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_steps_of_ours_and_of_torchs_agree(accumulate: int, scaled: bool, clip: bool) -> None:
    weight, x, y = torch.randn(5, 3), torch.randn(7, 5), torch.randn(7, 3)

    def weights(ours: bool, steps: Steps) -> Tensor:
        model = Regression(weight)
        step = TrainingStep(model, lambda: (x @ model.weight - y).square().mean(), steps, ours, "cpu")
        for _ in range(6):
            step()
        assert model.weight.grad is None
        return model.weight.detach()

    expected = weights(False, Steps(clip=clip))
    assert not torch.equal(expected, weight)
    for ours in (True, False):
        torch.testing.assert_close(weights(ours, Steps(clip, scaled, accumulate)), expected, rtol=1e-4, atol=1e-6)


def test_the_hosts_part_ends_before_the_wait() -> None:
    candidate, done = Candidate(TINY, "eager float32", "cpu"), list[str]()
    candidate._wait = lambda: done.append("wait")
    candidate.call = lambda: (done.append("call"), time.sleep(0.01))
    assert 0.01 <= candidate._time_host(3)[0] < 1 and done == ["wait", "call"] * 3


def test_plans_name_peers_and_steps_that_exist() -> None:
    for works in PLANS.values():
        assert len({work.name + work.kinds[0] for work in works}) == len(works)
        for work in works:
            assert {*work.peers} <= PEERS.keys() and {*work.kinds} <= {CALL, *KINDS}
            small = shrink(work)
            assert (small.peers, small.kinds) == (work.peers, work.kinds) and small.batch <= 2


def test_groups_fit_a_gpu_and_keep_the_order() -> None:
    for memory in (71.0, 126.0):
        groups = list(pack(plans.ON_GPU, memory))
        assert [work for group in groups for work in group] == list(plans.ON_GPU)
        for group in groups:
            assert len(group) == 1 or sum(len(work.peers) * work.gigabytes for work in group) <= memory
            assert sum(len(work.peers) for work in group) <= 19
    assert len(list(pack(plans.ON_GPU, 126.0))) < len(list(pack(plans.ON_GPU, 71.0)))


def test_peers_that_need_what_is_not_there_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.importlib.util.find_spec", lambda name: None)
    assert PEERS["torchao float8"].say_unable() == "torchao is not installed"
    assert not any(PEERS[name].say_unable() for name in plans.CORE)


@pytest.mark.slow
@pytest.mark.parametrize("peer", [AMP, "amp, C++ wrapper", BASELINE, "Inductor, converted", "amp, CUDA graphs"])
@torch._inductor.config.patch(cpp_wrapper=False)  # puts back what a peer sets
def test_compiled_peers(peer: str) -> None:
    figures = Candidate(Work("tiny GPT 23M", 2, 8, ()), peer, "cpu").prepare()
    assert 1e-4 < figures["error"] < 0.1 and figures["compile_seconds"] > 0
