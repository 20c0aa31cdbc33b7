"""Functions that Dynamo doesn't trace: one whose result is a constant, one that runs as it is."""

import torch
from torch import Tensor

from ampcompile.torch_private import dynamo_marks


def test_the_result_of_a_marked_function_is_a_constant_of_the_graph() -> None:
    calls = []

    def answer() -> int:
        calls.append(0)
        return 7

    dynamo_marks.mark_constant(answer)
    compiled = torch.compile(lambda x: x + answer(), backend="eager", fullgraph=True)
    assert [compiled(torch.zeros(())).item() for _ in range(2)] == [7, 7]
    assert len(calls) == 1, "it ran while it was traced"


def test_an_untraced_function_runs_at_every_call() -> None:
    compiling = []

    @dynamo_marks.run_untraced
    def double(x: Tensor) -> Tensor:
        compiling.append(torch.compiler.is_compiling())
        return 2 * x

    compiled = torch.compile(lambda x: double(x + 1), backend="eager")
    assert [compiled(torch.zeros(())).item() for _ in range(2)] == [2, 2]
    assert compiling == [False, False]
