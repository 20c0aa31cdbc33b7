"""A candidate counts only if it did the work: low precision, right numbers, no denormals."""

import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import counting
from benchmarks import numbers as module
from benchmarks.candidate import Candidate, UnfairError, check_fairness
from benchmarks.numbers import relative_error
from benchmarks.peers import PEERS
from benchmarks.works import CLIPPED, Work


def test_relative_error_of_several_tensors() -> None:
    expected = [torch.randn(3, 4), torch.randn(5)]
    found = [1.01 * tensor for tensor in expected]
    assert relative_error(found, expected) == pytest.approx(0.01, rel=1e-3)
    assert relative_error([tensor.clone() for tensor in expected], expected) == 0


def test_large_tensors_are_compared_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, the logits of a batch and what is computed of them were 26 GB."""
    monkeypatch.setattr(module, "CHUNK", 8)
    expected = [torch.randn(7, 9).t(), torch.randn(())]
    found = [tensor + 0.01 * torch.randn_like(tensor) for tensor in expected]
    exact = [tensor.double() for tensor in expected]
    squares = [(f - e).square().sum() / sum(x.square().sum() for x in exact) for f, e in zip(found, exact, strict=True)]
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype is torch.float64:
                sizes.append(result.numel())
            return result

    with Sizes():
        assert relative_error(found, expected) == pytest.approx(float(sum(squares)) ** 0.5)
    assert max(sizes) == 8
    found[0][3, 3] = 1e-40
    with pytest.raises(UnfairError, match="1 of 64 numbers are denormal"):
        check_fairness(True, 3e-3, found)


def test_fairness() -> None:
    numbers = [torch.randn(100)]
    check_fairness(True, 3e-3, numbers)
    check_fairness(False, 1e-7, numbers)
    with pytest.raises(UnfairError, match="ran in float32: relative error 1e-07"):
        check_fairness(True, 1e-7, numbers)
    for error in (0.9, float("nan")):
        with pytest.raises(UnfairError, match="wrong numbers"):
            check_fairness(True, error, numbers)
    numbers[0][:2] = 1e-40
    with pytest.raises(UnfairError, match="2 of 100 numbers are denormal"):
        check_fairness(True, 3e-3, numbers)


@pytest.mark.parametrize(
    "peer, output, casts", [("eager fp32", "float32", False), ("eager autocast", "bfloat16", True)]
)
def test_inference(peer: str, output: str, casts: bool) -> None:
    work = Work("tiny GPT 23M", 2, 8, ("eager fp32",))
    candidate = Candidate(work, PEERS[peer], "cpu")
    figures = candidate.prepare()
    assert figures["output"] == output
    assert bool(figures["casts"]) == casts == (figures["error"] > 1e-4)
    assert figures["parameters"] == sum(p.numel() for p in candidate.model.parameters())
    assert candidate.begin(work.name) > 0 and candidate.round(3) > 0
    ended = candidate.end()
    assert ended["host_syncs"] == ended["recompiled"] == 0 and ended["peak_bytes"] > 0


def test_training() -> None:
    work = Work("tiny GPT 23M", 2, 8, ("eager autocast",), (CLIPPED,))
    candidate = Candidate(work, PEERS["eager autocast"], "cpu")
    assert 1e-4 < candidate.prepare()["error"] < 0.1
    (case,) = dict(work.cases())
    candidate.begin(case)
    candidate.round(2)
    losses = candidate.end()["losses"]
    assert len(losses) == 5 and losses[-1] < losses[0]


def test_the_hosts_part_of_a_call_ends_before_the_wait() -> None:
    candidate = Candidate(Work("tiny GPT 124M", 1, 8, ("eager fp32",)), PEERS["eager fp32"], "cpu")
    done = []
    candidate._wait = lambda: done.append("wait")
    candidate.call = lambda: (done.append("call"), time.sleep(0.01))
    assert 0.01 <= candidate.host_seconds(3) < 1
    assert done == ["wait", "call"] * 3


def test_a_peer_that_stays_in_float32_is_found_out() -> None:
    candidate = Candidate(Work("tiny GPT 23M", 2, 8, ()), PEERS["eager autocast"], "cpu")
    candidate._around = lambda: torch.autocast("cpu", enabled=False)
    with pytest.raises(UnfairError, match="ran in float32"):
        candidate.prepare()


@pytest.mark.slow
@pytest.mark.parametrize("training", [(), (CLIPPED,)])
@pytest.mark.parametrize("peer", ["amp", "Inductor + autocast", "Inductor, converted"])
def test_compiled_peers(peer: str, training: tuple) -> None:
    candidate = Candidate(Work("tiny GPT 23M", 2, 8, (), training), PEERS[peer], "cpu")
    figures = candidate.prepare()
    assert figures["graphs"] >= 1 and figures["compile_seconds"] > 0 and figures["error"] > 1e-4
    assert (figures["our_passes_seconds"] > 0) == (peer == "amp")


@pytest.mark.slow
@torch._inductor.config.patch(freezing=False)  # puts back what the peer sets
def test_freezing_freezes_and_is_found_out_where_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work("tiny GPT 23M", 2, 8, ("eager fp32",))
    frozen = PEERS["Inductor + autocast, freezing"]
    with counting.nothing_from_caches():
        plain = Candidate(work, PEERS["Inductor + autocast"], "cpu").prepare()
        torch._dynamo.reset()
        figures = Candidate(work, frozen, "cpu").prepare()
    assert figures["casts"] < plain["casts"] / 2 and figures["cast_bytes"] < plain["cast_bytes"] / 2
    assert frozen.settings()["torch._inductor.config.freezing"]
    torch._dynamo.reset()
    monkeypatch.setattr(Candidate, "_casts_unfrozen", lambda self: figures["casts"])
    with pytest.raises(UnfairError, match="nothing was frozen"):
        Candidate(work, frozen, "cpu").prepare()
