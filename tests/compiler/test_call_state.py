"""What a thread knows of the call of ours that it is in."""

import torch

import ampcompile.backend
from ampcompile.compiler.call_state import CallState, casting, current_call
from tests.threads import running


def test_a_thread_knows_its_own_call_only() -> None:
    state, seen = CallState(), []
    state.callable, state.widens = print, True
    with running(lambda: seen.append((state.callable, state.widens))):
        pass
    assert seen == [(None, False)] and state.callable is print


def test_a_call_is_known_while_it_lasts() -> None:
    seen = []

    @torch._dynamo.disable
    def look() -> None:
        seen.append((current_call.callable, current_call.low_dtype, current_call.widens))

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        look()
        return y

    compiled = torch.compile(f, backend="amp", options={"lower": "eager", "dtype": torch.bfloat16})
    compiled(torch.ones(2))
    assert seen == [(f, torch.bfloat16, True)]
    assert (current_call.callable, current_call.low_dtype, current_call.widens) == (None, None, False)
    assert ampcompile.backend.amp


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
