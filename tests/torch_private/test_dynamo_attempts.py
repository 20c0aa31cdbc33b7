"""What Dynamo tried since a moment, and why it gave up."""

import torch

from ampcompile.torch_private import dynamo_attempts


def test_reasons_of_what_was_tried_since() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break(msg="by wish")
        return x.neg()

    x, before = torch.ones(2), dynamo_attempts.count()
    assert dynamo_attempts.failed_since(before) is None
    run = torch.compile(breaks, backend="eager")
    run(x)
    assert dynamo_attempts.failed_since(before) == "Call to `torch._dynamo.graph_break()`"
    after = dynamo_attempts.count()
    run(x)
    assert dynamo_attempts.failed_since(after) is None, "it has that already"
    torch.compile(torch.neg, backend="eager")(x)
    torch.compile(lambda x: x + 1, backend="eager")(x)
    assert dynamo_attempts.failed_since(after) == ""
