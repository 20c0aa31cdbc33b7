"""Results that no graph widens are widened by a function given for a while."""

import torch

from ampcompile.compiler.call_state import casting, current_call


def test_results_that_no_graph_widens_are_widened_by_a_given_function_for_a_while() -> None:
    seen: list[int] = []
    layer, x = torch.nn.Linear(2, 2), torch.randn(2, 2)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = layer(x)
        return y, y[0]

    compiled = torch.compile(f, backend="amp", options={"lower": "eager", "dtype": torch.bfloat16})
    with casting(lambda results: (seen.append(len(results)), [result.double() for result in results])[1]):
        assert [result.dtype for result in compiled(x)] == [torch.float64] * 2
    assert [result.dtype for result in compiled(x)] == [torch.float32] * 2
    assert seen == [2] and current_call.cast is None
