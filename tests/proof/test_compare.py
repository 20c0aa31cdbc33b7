"""What differs is told, what doesn't isn't."""

import pytest
import torch

from proof.ops.compare import WORSE, Run, differences, same_numbers, too_far

EXACT = torch.tensor([1.0, -4.0, 0.5], dtype=torch.float64)
NEAR = EXACT.float() + torch.tensor([0.0, 0.01, 0.0])


def run(result: torch.Tensor, *inputs: torch.Tensor, gradients: list[torch.Tensor | None] | None = None) -> Run:
    return Run(list(inputs), [result], gradients or [])


def kinds(ours: Run, theirs: Run, exact: Run | None = None, random: bool = False) -> list[str]:
    return [difference.kind for difference in differences(ours, theirs, exact, random)]


def test_equal_runs_have_no_difference() -> None:
    a, b = run(NEAR, EXACT, gradients=[None, NEAR]), run(NEAR.clone(), EXACT.clone(), gradients=[None, NEAR.clone()])
    assert not kinds(a, b) and same_numbers(a, b)


@pytest.mark.parametrize("times, found", [(0.5, []), (WORSE, []), (1.2, ["values"]), (-1.2, ["values"])])
def test_errors_are_held_against_eagers(times: float, found: list[str]) -> None:
    ours = EXACT.float() + torch.tensor([0.01 * times, 0.0, 0.0])
    assert kinds(run(ours), run(NEAR), run(EXACT)) == found
    assert kinds(run(ours), run(NEAR), run(EXACT), random=True) == []
    assert not same_numbers(run(ours), run(NEAR))


def test_one_ulp_of_the_largest_number_is_no_error() -> None:
    low = EXACT.bfloat16()
    for ulps, wrong in ((1, False), (2.5, True)):
        ours = (EXACT + torch.tensor([0, 0, 4 * torch.finfo(torch.bfloat16).eps * ulps])).bfloat16()
        assert bool(too_far(ours, low, EXACT)) == wrong


@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_finite_and_infinite_are_told_apart(number: float) -> None:
    lost = EXACT.float().index_fill(0, torch.tensor([1]), number)
    assert "not finite" in too_far(lost, NEAR, EXACT)
    assert "same infinities" in too_far(NEAR, lost, lost.double())
    assert not too_far(lost, lost.clone(), lost.double()) and not too_far(NEAR, lost, EXACT)


def test_integers_are_equal_or_wrong() -> None:
    right = torch.tensor([1, 2, 3])
    assert kinds(run(torch.tensor([1, 2, 4])), run(right), run(right)) == ["values"]
    assert kinds(run(right), run(torch.tensor([1, 2, 4])), run(right)) == []


def test_dtypes_and_shapes_of_results_and_gradients() -> None:
    assert kinds(run(NEAR.bfloat16()), run(NEAR)) == kinds(run(NEAR[:2]), run(NEAR)) == ["dtypes"]
    assert kinds(run(NEAR, gradients=[None]), run(NEAR, gradients=[NEAR])) == ["dtypes"]


def test_inputs_that_are_written_otherwise_differ() -> None:
    assert kinds(run(NEAR, NEAR + 1), run(NEAR, NEAR.clone())) == ["values"]


def test_shared_memory_and_strides() -> None:
    x = torch.randn(3, 3)
    assert kinds(run(x, x), run(x.clone(), x)) == ["aliasing"]
    assert kinds(Run([], [x, x[0]], []), Run([], [x, x[0].clone()], [])) == ["aliasing"]
    assert kinds(run(x.t().clone(memory_format=torch.contiguous_format)), run(x.t())) == ["strides"]
    assert not kinds(run(x[:1]), run(x[:1].clone().as_strided((1, 3), (7, 1)))), "no stride of a single entry counts"


def test_tensors_of_other_layouts_and_types_are_compared_too() -> None:
    for convert in (torch.Tensor.to_sparse, lambda x: x.to(torch.float8_e4m3fn), lambda x: x + 1j):
        a, b = (run(convert(torch.eye(3) * n)) for n in (1, 2))
        assert kinds(a, a) == [] and kinds(a, b) == ["values"]
