"""The jobs for a GPU: few peers each, one of them comparable, names that differ; and all kernels' jobs run here."""

import math
from collections.abc import Iterator

import pytest

from benchmarks.kernel_cases import COMPILED, Kernel, gradient_kernels, linear_kernels, measure
from benchmarks.loss_cases import loss_kernels
from benchmarks.peers import AMP, BASELINE, PEERS, RELAXED
from benchmarks.published_cases import CASES
from benchmarks.report.ink import looks
from benchmarks.works import ALL, FUSING, on_cuda, tiny

WORKS = [work for works in on_cuda().values() for work in works]


def test_a_job_holds_few_peers_and_who_they_are_compared_with() -> None:
    for work in WORKS:
        assert len(work.peers) <= 6 and set(work.peers) <= PEERS.keys() and BASELINE in work.peers, work


def test_what_the_roundings_cost_is_always_measured() -> None:
    alone = {work.name for stage, works in on_cuda().items() if stage != "growth" for work in works if not work.group}
    without = {work.name for work in WORKS if RELAXED not in work.peers}
    assert alone & without == {"GPT 1.3B, 1x2048, checkpointing"}, "whose memory is enough for two"


def test_nobody_is_left_out_and_everybody_can_be_drawn() -> None:
    assert {*ALL, *FUSING, RELAXED} <= {peer for work in WORKS for peer in work.peers}
    assert all(looks(peer) for peer in PEERS)


def test_cases_of_a_stage_have_different_names() -> None:
    for stage, works in on_cuda().items():
        names = [case for work in works for case, _ in work.cases()]
        assert len(names) == len(set(names)), stage
        assert len({tiny(work).name for work in works}) == len(works), stage


MAKERS = [linear_kernels, gradient_kernels, loss_kernels, *CASES]


@pytest.mark.ci
@pytest.mark.parametrize("make", MAKERS, ids=[make.__name__ for make in MAKERS])
def test_every_candidate_runs_here_or_says_why_not(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.kernel_cases.SECONDS", 0.0)
    rows = measure(make, "cpu")
    assert rows
    for row in rows:
        if row.why:
            assert row.peer in ("Liger-Kernel", "FlashOptim: FlashAdamW") or make is gradient_kernels, row
        else:
            assert row.figures["flops"] > 0 < row.figures["bytes"] and min(row.figures["seconds"]) > 0


def test_a_broken_kernel_leaves_the_others_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.kernel_cases.SECONDS", 0.0)

    def broken() -> None:
        raise RuntimeError("an illegal memory access\nwas encountered")

    def kernels() -> Iterator[Kernel]:
        yield Kernel("k", 1, 1, {AMP: broken, COMPILED: lambda: math.sqrt(2)})
        broken()

    theirs, ours, rest = measure(kernels)
    assert rest.case == "the rest of kernels" and rest.why == ours.why
    assert ours.why == "RuntimeError: an illegal memory access" and len(theirs.figures["seconds"]) == 9


def test_ours_is_compiled_as_the_code_beside_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager op of ours would pay the dispatcher and the allocator where Inductor's code doesn't."""
    compiled = []
    monkeypatch.setattr("torch.compile", lambda function, **_: compiled.append(function) or function)
    for make in (linear_kernels, gradient_kernels, loss_kernels):
        for kernel in make("cpu"):
            assert kernel.candidates.keys() == {COMPILED, AMP} and len(compiled) == 2, kernel.name
            compiled.clear()
