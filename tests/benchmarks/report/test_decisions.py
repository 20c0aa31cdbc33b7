"""Each question that a GPU run is to decide finds its cases in the plan, and its answer in the results."""

import re
from pathlib import Path

import pytest

from benchmarks.kernel_cases import COMPILED, gradient_kernels, linear_kernels
from benchmarks.loss_cases import loss_kernels
from benchmarks.peers import AMP, RELAXED
from benchmarks.published_cases import CASES, FLEX
from benchmarks.records import Records
from benchmarks.report.decisions import FASTER, PUBLISHED, QUESTIONS, answers, calibration, main
from benchmarks.scaler_step import CANDIDATES, CASE
from benchmarks.works import on_cuda
from tests.benchmarks.made_up import rows

DONE = {"minutes": 1.0, "commit": "abc1234", "load": 0.1}


def test_every_question_has_a_case_in_the_plan() -> None:
    planned = [
        (stage, case, set(work.peers))
        for stage, works in on_cuda().items()
        for work in works
        for case, _ in work.cases()
    ]
    makers = (linear_kernels, gradient_kernels, loss_kernels)
    planned += [("kernels", kernel.name, set(kernel.candidates)) for make in makers for kernel in make("cpu")]
    planned += [("scaler", CASE, set(CANDIDATES))]
    for question in QUESTIONS:
        assert any(
            re.fullmatch(question.stage, stage)
            and re.fullmatch(question.case, case)
            and {question.ours, question.other} <= peers
            for stage, case, peers in planned
        ), question


def test_every_published_figure_has_its_case() -> None:
    kernels = {kernel.name: {*kernel.candidates, *kernel.unable} for make in CASES for kernel in make("cpu")}
    assert all(peer in kernels[case] for case, peer, *_ in PUBLISHED)
    assert all({peer, slower} <= kernels[case] for case, peer, slower, *_ in FASTER)


def records(path: Path, loss: float, relaxed: float) -> Records:
    found = Records(path, {})
    layer = "linear layer, cross entropy"
    lean = rows(layer, {COMPILED: [1.0] * 3}, peak_bytes=100) + rows(layer, {AMP: [1.0] * 3}, peak_bytes=80)
    faster = rows("cross entropy", {COMPILED: [loss] * 3, AMP: [1.0] * 3}, peak_bytes=100)
    found.add("kernels", "loss", [*lean, *faster], **DONE)
    found.add("training", "t", rows("t: step", {AMP: [1.0] * 3, RELAXED: [relaxed] * 3}), **DONE)
    wide, low = FLEX.format("float32"), FLEX.format("bfloat16")
    found.add("published", "attention", rows("backward of flex attention", {wide: [0.06], low: [0.01]}), **DONE)
    return found


@pytest.mark.parametrize("loss, relaxed, verdicts", [(1.2, 0.99, ("yes", "yes")), (1.05, 0.9, ("**no**", "**no**"))])
def test_answers(tmp_path: Path, loss: float, relaxed: float, verdicts: tuple[str, str]) -> None:
    found = {
        (about, case): (*figures, verdict)
        for about, case, *figures, verdict in answers(records(tmp_path / "r", loss, relaxed))
    }
    layer, alone = ("linear_cross_entropy", "linear layer, cross entropy"), ("cross_entropy", "cross entropy")
    assert found[layer][-1] == "yes", "no faster, but leaner"
    assert found[alone] == (COMPILED, f"{loss:.2f}", "1.00", "1.1, or 1.1 as lean", verdicts[0])
    assert found["numerics=eager", "t: step"][-1] == verdicts[1]
    assert found["the whole model", ""][-1] == "not measured"


def test_calibration_says_what_agrees(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    agree = {peer: verdict for _, peer, *_, verdict in calibration(records(tmp_path / "r.json", 1.0, 1.0))}
    wide, low = FLEX.format("float32"), FLEX.format("bfloat16")
    assert agree == {wide: "yes", low: "**no**", f"{low} against {wide}": "**no**"}
    assert main([str(tmp_path / "r.json")]) == 0
    assert "| 61.8 ms | 60 ms | yes |" in capsys.readouterr().out
