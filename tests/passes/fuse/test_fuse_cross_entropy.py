"""A cross entropy that reads 16-bit logits itself: where it fires, where it doesn't, and that numbers are no worse."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

import ampcompile
from ampcompile.kernels.cross_entropy import CROSS_ENTROPY
from ampcompile.passes.fuse.fuse_cross_entropy import FuseCrossEntropy
from ampcompile.passes.fuse.losses import LOSS
from ampcompile.passes.fuse.matching import FusionCost
from tests import tiny_models
from tests.compiling import amp, error, gradients, training_errors
from tests.passes.rewriting import count, rewritten

ASKED = {"fuse": "cross_entropy"}


def with_labels(name: str) -> tuple[nn.Module, Callable[[Any], Any]]:
    """A tiny model and a call of it that returns all outputs, its own loss among them."""
    model, inputs = tiny_models.build(name)
    model.loss_type = {"gpt2": "ForCausalLM"}.get(name, model.loss_type)
    of_pictures = torch.randint(2, (2,))
    labels = inputs.get("decoder_input_ids", inputs.get("input_ids", of_pictures))
    return model, lambda m: m(**inputs, labels=labels)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 40)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), target, label_smoothing=0.1)


@pytest.mark.parametrize("name", tiny_models.FUSED_ON)
def test_fires_once_in_models_that_return_their_logits_too(name: str) -> None:
    model, call = with_labels(name)
    (graph,) = rewritten(lambda: tuple(call(model)[:2]), **ASKED)
    assert count(graph, CROSS_ENTROPY) == 1 and count(graph, LOSS) == 0
    assert graph.history[-1].name == "fuse_cross_entropy" and graph.history[-1].rewrites == 1
    (graph,) = rewritten(lambda: tuple(call(model)[:2]))
    assert count(graph, CROSS_ENTROPY) == 0, "nothing is fused on the CPU unless asked for"


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.ci), "bert"])
def test_loss_and_gradients_are_no_further_from_float64_than_eager_autocasts(name: str) -> None:
    model, call = with_labels(name)
    exact_model = copy.deepcopy(model).double()
    exact = gradients(exact_model, lambda m: call(m).loss)

    def under_autocast(m: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(m).loss

    reference = gradients(copy.deepcopy(model), under_autocast)
    run, _ = amp(lambda: call(model).loss, **ASKED)
    ours = gradients(model, lambda _: run())
    assert error(ours, exact) <= 1.05 * error(reference, exact)
    torch.testing.assert_close(run(), under_autocast(model), rtol=1e-6, atol=0)


def test_explain_shows_what_was_fused() -> None:
    report = ampcompile.explain(Head(), **ASKED)(torch.randn(6, 16), torch.randint(40, (6,)))
    (fusion,) = report.fusions
    assert (fusion.family, fusion.op, fusion.saved) == ("cross_entropy", "aten.cross_entropy_loss", 0)
    assert [cast.fate for cast in report.casts if cast.op == "aten.cross_entropy_loss"] == [("inserted", "fused")]
    assert "fused: 1 cross_entropy; by count 0 B less moved in one call, 0 B less held" in str(report)
    assert not ampcompile.explain(Head())(torch.randn(6, 16), torch.randint(40, (6,))).fusions


def reused(x: Tensor, target: Tensor) -> Tensor:
    wide = x.float()
    return F.cross_entropy(wide, target) + wide.logsumexp(1).mean()


@pytest.mark.parametrize(
    "f",
    [
        reused,
        lambda x, target: F.cross_entropy(x.float().view(3, 40, 2), target.view(3, 2)),
        lambda x, target: F.cross_entropy(x.float(), F.one_hot(target, 40).float()),
        lambda x, target: F.cross_entropy(x.float() * 2, target),
    ],
    ids=["reused", "more dimensions", "probabilities", "not a cast alone"],
)
def test_declines(f: Any) -> None:
    (graph,) = rewritten(f, torch.randn(6, 40).to(torch.bfloat16), torch.randint(40, (6,)), **ASKED)
    assert count(graph, CROSS_ENTROPY) == 0


def test_declines_where_nothing_is_gained_or_triton_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.randn(6, 16), torch.randint(40, (6,))
    (graph,) = rewritten(Head(), *given)
    assert FuseCrossEntropy(FusionCost("auto")).apply(graph.graph) == 0
    assert FuseCrossEntropy(FusionCost("cross_entropy")).apply(graph.graph) == 1
    assert FuseCrossEntropy(FusionCost("cross_entropy")).apply(graph.graph) == 0, "idempotent"


def test_fires_in_a_checkpointed_stretch() -> None:
    head = Head()

    def checkpointed(x: Tensor, target: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(head, x, target, use_reentrant=False)

    (graph,) = rewritten(checkpointed, torch.randn(6, 16), torch.randint(40, (6,)), **ASKED)
    assert count(graph, CROSS_ENTROPY) == 1
    theirs, ours, _ = training_errors(
        head,
        lambda m, x, t: torch.utils.checkpoint.checkpoint(m, x, t, use_reentrant=False),
        (torch.randn(30, 16), torch.randint(40, (30,))),
        **ASKED,
    )
    assert ours <= 1.05 * theirs


def test_every_number_of_rows_is_one_graph() -> None:
    head = Head()
    compiled = torch.compile(head, backend="amp", dynamic=True, options={"lower": "aot_eager", **ASKED})
    for rows in (5, 9, 33):
        x, target = torch.randn(rows, 16), torch.randint(40, (rows,))
        with torch._dynamo.config.patch(error_on_recompile=rows != 5):
            loss = compiled(x, target)
            loss.backward()
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(loss, head(x, target), rtol=1e-6, atol=0)


def test_a_gradient_of_a_gradient_is_that_of_the_graph_before_fusing() -> None:
    def penalty(f: Any, x: Tensor, target: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(f(x, target), x, create_graph=True)
        return grad.square().sum()

    head, target = Head(), torch.randint(40, (6,))
    x = torch.randn(6, 16, requires_grad=True)
    compiled = torch.compile(head, backend="amp", options={"lower": "aot_eager", **ASKED})
    (ours,) = torch.autograd.grad(penalty(compiled, x, target), x)
    with torch.autocast("cpu", torch.bfloat16):
        (theirs,) = torch.autograd.grad(penalty(head, x, target), x)
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.02 * theirs.abs().max().item())


@pytest.mark.slow
def test_inductor_writes_the_gradient_over_the_logits() -> None:
    head, x, target = Head(), torch.randn(6, 16), torch.randint(40, (6,))
    compiled = torch.compile(head, backend="amp", options=ASKED)

    def step() -> Tensor:
        loss = compiled(x, target)
        loss.backward()
        return loss

    loss, (_, backward) = run_and_get_code(step)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(loss, head(x, target), rtol=1e-5, atol=0)
    assert "at::BFloat16* in_out_ptr0" in backward
