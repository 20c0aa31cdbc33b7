"""A linear layer fused with its cross entropy: where it fires, where it doesn't, and that numbers are no worse."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampcompile
from ampcompile.kernels import linear_cross_entropy as kernel
from ampcompile.kernels.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from ampcompile.passes.base import run_passes
from ampcompile.passes.fuse import fuse_linear_cross_entropy
from ampcompile.passes.fuse.fuse_linear_cross_entropy import FuseLinearCrossEntropy, keep_rows_whole
from tests import tiny_models
from tests.compiling import HALF, LOW, amp, error, gradients, training_errors
from tests.models import Net
from tests.passes.captured import captured, settled
from tests.passes.rewriting import count, rewritten
from tests.passes.tidied import inserted

ASKED = {"fuse": "linear_cross_entropy"}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PIECE", 1)
    monkeypatch.setattr(kernel, "FEWEST", 4)


def shifted_head(bias: bool = True) -> nn.Module:
    """Logits of a sequence, and the usual shift by one token."""

    def forward(m: Any, tokens: Tensor) -> Tensor:
        logits = m.head(torch.tanh(m.embed(tokens)))
        return F.cross_entropy(logits[:, :-1].reshape(-1, 40).float(), tokens[:, 1:].reshape(-1))

    embed, head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=bias)
    head.weight = embed.weight
    return Net(forward, embed=embed, head=head)


def head_alone() -> nn.Module:
    """A layer and its loss."""
    return Net(lambda m, x, target: F.cross_entropy(m.head(x), target, label_smoothing=0.1), head=nn.Linear(16, 40))


def with_labels(name: str) -> tuple[nn.Module, Callable[[Any], Any]]:
    """A tiny model and a call of it that returns all outputs, its own loss among them."""
    model, inputs = tiny_models.build(name)
    model.loss_type = {"gpt2": "ForCausalLM"}.get(name, model.loss_type)
    of_pictures = torch.randint(2, (2,))
    labels = inputs.get("decoder_input_ids", inputs.get("input_ids", of_pictures))
    return model, lambda m: m(**inputs, labels=labels)


def tokens(rows: int = 3) -> Tensor:
    return torch.randint(40, (rows, 9))


@pytest.mark.parametrize("name", tiny_models.FUSED_ON)
def test_fires_once_in_models_that_return_their_loss_alone(name: str) -> None:
    model, call = with_labels(name)
    (graph,) = rewritten(lambda: call(model).loss, **ASKED)
    assert count(graph, LINEAR_CROSS_ENTROPY) == 1
    (graph,) = rewritten(lambda: tuple(call(model)[:2]), **ASKED)
    assert count(graph, LINEAR_CROSS_ENTROPY) == 0, "who returns the logits needs them whole"
    (graph,) = rewritten(lambda: call(model).loss)
    assert count(graph, LINEAR_CROSS_ENTROPY) == 0, "nothing is fused on the CPU unless asked for"


@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
@pytest.mark.parametrize("weights", ["cached", "every_call"])
def test_loss_and_gradients_are_no_further_from_float64_than_eager_autocasts(name: str, weights: str) -> None:
    model, call = with_labels(name)
    exact = gradients(copy.deepcopy(model).double(), lambda m: call(m).loss)

    def under_autocast(m: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(m).loss

    reference = gradients(copy.deepcopy(model), under_autocast)
    run, recorder = amp(lambda: call(model).loss, weights=weights, **ASKED)
    ours = gradients(model, lambda _: run())
    assert count(recorder.graphs[0], LINEAR_CROSS_ENTROPY) == 1
    assert error(ours, exact) <= 1.05 * error(reference, exact)
    torch.testing.assert_close(run(), under_autocast(model), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bias", [False, True])
def test_a_shifted_tied_head(bias: bool) -> None:
    theirs, ours, recorder = training_errors(shifted_head(bias), lambda m, t: m(t), (tokens(20),), **ASKED)
    assert count(recorder.graphs[0], LINEAR_CROSS_ENTROPY) == 1
    assert ours <= 1.05 * theirs


def test_a_weight_that_was_updated_is_read_anew() -> None:
    head, given = shifted_head(), tokens()
    compiled = torch.compile(head, backend="amp", options={"lower": "aot_eager", **ASKED})
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss = compiled(given)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(loss, head(given), rtol=1e-5, atol=0)
        loss.backward()
        optimizer.step()


FUSE = FuseLinearCrossEntropy(sparingly=False)


def classes(rows: int) -> Tensor:
    return torch.arange(rows) % 5


FIRES = {  # of logits (3, 4, 5) of a linear layer
    "the cast before the views": lambda h: F.cross_entropy(h.float().view(-1, 5), classes(12)),
    "after them": lambda h: F.cross_entropy(h.reshape(-1, 5), classes(12)),
    "between them": lambda h: F.cross_entropy(h[1:].float().flatten(0, 1)[:4], classes(4)),
    "what can't be seen as rows in 16 bits": lambda h: F.cross_entropy(h[:, :-1].float().view(-1, 5), classes(9)),
    "all arguments": lambda h: F.cross_entropy(
        h.view(-1, 5), classes(12), torch.arange(1.0, 6.0), ignore_index=2, reduction="sum", label_smoothing=0.1
    ),
}


def read_twice(h: Tensor) -> Any:
    wide = h.float()
    return F.cross_entropy(wide.view(-1, 5), classes(12)), wide


def written(h: Tensor) -> Any:
    wide = h.float()
    h.zero_()
    return F.cross_entropy(wide.view(-1, 5), classes(12))


DECLINES = {
    "read twice": read_twice,
    "returned": lambda h: (F.cross_entropy(h.view(-1, 5), classes(12)), h),
    "written": written,
    "scaled": lambda h: F.cross_entropy((h * 2).view(-1, 5), classes(12)),
    "an addition in float32": lambda h: F.cross_entropy(h.float().view(-1, 5) + 1, classes(12)),
    "float64": lambda h: F.cross_entropy(h.double().view(-1, 5), classes(12)),
    "detached, which ends a gradient": lambda h: F.cross_entropy(h.float().detach().view(-1, 5), classes(12)),
    "repeated, whose gradient is a sum": lambda h: F.cross_entropy(h[:1].expand(3, 4, 5).reshape(-1, 5), classes(12)),
    "other numbers": lambda h: F.cross_entropy(h.float().view(torch.int32).float().view(-1, 5), classes(12)),
    "other rows": lambda h: F.cross_entropy(h.mT.reshape(-1, 4), torch.arange(15) % 4),
    "probabilities": lambda h: F.cross_entropy(h.view(-1, 5), torch.ones(12, 5)),
    "more dimensions": lambda h: F.cross_entropy(h.mT, classes(12).view(3, 4)),
    "one row": lambda h: F.cross_entropy(h[0, 0], torch.tensor(2)),
}


@pytest.mark.parametrize("dtype", [LOW, HALF])
@pytest.mark.parametrize("name", FIRES)
def test_fires_through_one_cast_and_views(name: str, dtype: torch.dtype) -> None:
    x, w = torch.randn(3, 4, 16), torch.randn(5, 16)
    gm = inserted(lambda x, w: FIRES[name](F.linear(x, w)), x, w, dtype=dtype)
    before = gm(x, w)
    assert run_passes([FUSE], gm)[0].rewrites == 1
    torch.testing.assert_close(gm(x, w), before, rtol=1e-5, atol=0)
    assert FUSE.apply(gm) == 0, "idempotent"


@pytest.mark.parametrize("name", DECLINES)
def test_declines(name: str) -> None:
    gm = inserted(lambda x, w: DECLINES[name](F.linear(x, w)), torch.randn(3, 4, 16), torch.randn(5, 16))
    before = str(gm.graph)
    assert FUSE.apply(gm) == 0 and str(gm.graph) == before


ROWS = {
    "a slice": (lambda x: x[1:].reshape(-1, 5), True),
    "a part": (lambda x: x[1].contiguous(), True),
    "flattened": (lambda x: x.flatten(0, 1), True),
    "flattened rows": (lambda x: x.flatten(1, 2), False),
    "two rows in one": (lambda x: x[:4].reshape(-1, 10)[:, :5], False),
    "columns": (lambda x: x.transpose(0, 2).reshape(-1, 5)[:, 1:], False),
    "shorter rows": (lambda x: x[..., 1:].reshape(-1, 4), False),
    # By size alone these would all be rows.
    **{f"dimension {dim}": (lambda x, dim=dim: x.select(dim, 1), dim in (0, 1, -2)) for dim in (0, 1, 2, -1, -2)},
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_known_to_stay_whole(name: str) -> None:
    f, whole = ROWS[name]
    graph = settled(captured(lambda x: f(x).exp(), torch.randn(5, 5, 5), dtype=None)).graph
    assert keep_rows_whole([node for node in graph.nodes if node.op == "call_function"][:-1]) == whole


def test_by_itself_it_fires_where_logits_are_a_tenth_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    (graph,) = rewritten(shifted_head(), tokens())
    monkeypatch.setattr(fuse_linear_cross_entropy, "PIECE", 1)
    logits = next(n for n in graph.graph.graph.nodes if n.target is torch.ops.aten.linear.default).meta["val"].nbytes
    auto = FuseLinearCrossEntropy(sparingly=True)
    assert auto.apply(graph.graph) == 0, "not on the CPU"
    for memory, fused in ((10 * logits, 0), (10 * (logits - 1), 1)):
        monkeypatch.setattr(fuse_linear_cross_entropy, "memory_of", lambda device, memory=memory: memory)
        assert auto.apply(graph.graph) == fused


def test_explain_shows_what_was_fused_what_it_costs_and_what_it_frees() -> None:
    given = torch.randn(6, 16), torch.randint(40, (6,))
    report = ampcompile.explain(head_alone(), **ASKED)(*given)
    (fusion,) = report.fusions
    assert (fusion.family, fusion.op) == ("linear_cross_entropy", "aten.linear, aten.cross_entropy_loss")
    logits, weight = 6 * 40 * 2, 40 * 16 * 2
    assert fusion.saved == -(logits + 3 * weight) and fusion.freed == 0, "one piece frees nothing"
    assert [cast.fate for cast in report.casts if cast.op == "aten.cross_entropy_loss"] == [("inserted", "fused")]
    assert "fused: 1 linear_cross_entropy; by count " in str(report)
    assert not ampcompile.explain(head_alone())(*given).fusions


def test_fires_in_a_checkpointed_stretch() -> None:
    theirs, ours, recorder = training_errors(
        head_alone(),
        lambda m, x, t: torch.utils.checkpoint.checkpoint(m, x, t, use_reentrant=False),
        (torch.randn(30, 16), torch.randint(40, (30,))),
        **ASKED,
    )
    assert count(recorder.graphs[0], LINEAR_CROSS_ENTROPY) == 1
    assert ours <= 1.05 * theirs


def test_a_gradient_of_a_gradient_is_that_of_the_graph_before_fusing() -> None:
    def penalty(f: Any, x: Tensor, target: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(f(x, target), x, create_graph=True)
        return grad.square().sum()

    layer, target = head_alone(), torch.randint(40, (6,))
    x = torch.randn(6, 16, requires_grad=True)
    compiled = torch.compile(layer, backend="amp", options={"lower": "aot_eager", **ASKED})
    (ours,) = torch.autograd.grad(penalty(compiled, x, target), x)
    with torch.autocast("cpu", torch.bfloat16):
        (theirs,) = torch.autograd.grad(penalty(layer, x, target), x)
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.02 * theirs.abs().max().item())


def test_every_number_of_rows_is_one_graph() -> None:
    head = shifted_head()
    compiled = torch.compile(head, backend="amp", dynamic=True, options={"lower": "aot_eager", **ASKED})
    for rows in (3, 5, 7):
        given = tokens(rows)
        with torch._dynamo.config.patch(error_on_recompile=rows != 3):
            loss = compiled(given)
            loss.backward()
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(loss, head(given), rtol=1e-5, atol=0)


@pytest.mark.parametrize("lower", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_late_backward_is_through_the_weights_of_before_the_step(lower: str) -> None:
    given, plain = tokens(), shifted_head()
    found = []
    for step in (False, True):
        head = copy.deepcopy(plain)
        compiled = torch.compile(head, backend="amp", options={"lower": lower, **ASKED})
        compiled(given).backward()
        late = compiled(given)
        if step:
            torch.optim.SGD(head.parameters(), lr=0.5).step()
            compiled(given)
        head.zero_grad()
        late.backward()
        found.append([parameter.grad for parameter in head.parameters()])
    for stepped, not_stepped in zip(*found, strict=True):
        assert torch.equal(stepped, not_stepped)
