"""What backward keeps, as listed, is what autograd holds, to the byte; rows of it add up, and say what reads it."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ampcompile
from ampcompile.insight.report import Report
from ampcompile.records.graphs import SavedRecord
from tests.behaviour.test_late_backward import interpreted, saved_bytes
from tests.insight.made_up import graph
from tests.models import Attention, Block, Net, weight

LOW = torch.bfloat16
Built = tuple[nn.Module, tuple[Any, ...]]


def language_model(tied: bool, loss_within: bool) -> Built:
    def run(m: Any, tokens: Tensor) -> Tensor:
        logits = m.head(m.block(m.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) if loss_within else logits

    model = Net(run, embedding=nn.Embedding(32, 8), block=Block(8), head=nn.Linear(8, 32, bias=False))
    if tied:
        model.head.weight = model.embedding.weight
    return model, (torch.randint(32, (2, 5)),)


def convolutional() -> Built:
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)
    return nn.Sequential(*layers), (torch.randn(2, 3, 8, 8),)


def views() -> Built:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = m.wide(x)
        left, right = wide.chunk(2, -1)
        return left.sigmoid() * right.transpose(0, 1), wide[1:].exp()

    return Net(run, wide=nn.Linear(6, 12)), (torch.randn(7, 7, 6),)


def checkpointed() -> Built:
    def run(m: Any, x: Tensor) -> Tensor:
        return checkpoint(m.second, m.first(x), use_reentrant=False)

    return Net(run, first=Block(8), second=Block(8)), (torch.randn(3, 5, 8),)


@torch.compiler.nested_compile_region
def region(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).sigmoid().exp()


MODELS: dict[str, Callable[[], Built]] = {
    "an MLP": lambda: (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8)), _rows()),
    "blocks": lambda: (nn.Sequential(*(Block(8) for _ in range(2))), _rows()),
    "attention": lambda: (nn.Sequential(nn.LayerNorm(16), Attention(16)), (torch.randn(2, 6, 16),)),
    "a convolutional net": convolutional,
    "dropout": lambda: (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Softmax(-1)), _rows()),
    "tied weights": lambda: language_model(True, True),
    "a loss within": lambda: language_model(False, True),
    "views": views,
    "a checkpoint": checkpointed,
    "a nested region": lambda: (
        Net(lambda m, x: region(region(x, m.a), m.b), a=weight(8, 8), b=weight(8, 8)),
        (torch.randn(4, 8),),
    ),
    "an argument that wants a gradient": lambda: (nn.Linear(8, 4), (torch.randn(3, 8, requires_grad=True),)),
}


def _rows() -> tuple[Tensor]:
    return (torch.randn(4, 3, 8),)


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        pytest.param(name, dynamic, marks=() if name == "views" else pytest.mark.ci)
        for name in MODELS
        for dynamic in (False, True)
        if not dynamic or name in ("views", "blocks", "a loss within")  # they take twice as long
    ],
)
def test_the_list_is_what_autograd_holds(name: str, dynamic: bool) -> None:
    model, args = MODELS[name]()
    report = ampcompile.explain(model, dynamic=dynamic)(*args)
    with nullcontext() if name == "an MLP" else interpreted():  # the cut is Inductor's; its code takes a minute
        result = torch.compile(model, backend="amp", dynamic=dynamic)(*args)
    assert sum(record.bytes for record in report.saved) == saved_bytes(result) > 0
    totals = report.saved_totals
    assert totals.backward + totals.alive == saved_bytes(result)
    assert all(record.because and record.of for record in report.saved)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "a checkpoint"])
def test_without_a_cut_the_list_is_autograds_own(name: str) -> None:
    model, args = MODELS[name]()
    saved: dict[int, Tensor] = {}
    report = ampcompile.explain(model, lower="eager", weights="every_call")(*args)
    with (
        torch.autocast("cpu", cache_enabled=False),
        saved_tensors_hooks(
            lambda tensor: saved.setdefault(tensor.untyped_storage().data_ptr(), tensor) is None or tensor, lambda t: t
        ),
    ):
        model(*args)
    listed = sum(record.bytes for record in report.saved)
    assert listed == sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def test_a_value_is_listed_with_its_op_its_module_its_line_and_what_reads_it() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4, bias=False))
    for lower in ("inductor", "aot_eager"):
        report = ampcompile.explain(model, lower=lower, products="torch")(torch.randn(6, 8))
        assert {(r.of, r.dtype, r.kept_as, r.shape) for r in report.saved if r.of != "activation"} == {
            ("copy", LOW, LOW, (4, 16))
        }
        cast, product, *rest = (r for r in report.saved if r.of == "activation")
        assert (cast.shape, cast.bytes, cast.module) == ((6, 8), 96, "0") and "aten.mm of 0" in cast.because
        assert (product.op, product.module, product.bytes) == ("aten.addmm", "0", 192)
        assert "aten.gelu_backward of 1" in product.because and "test_saved.py" not in product.line
        assert all("aten.mm of 2" in r.because for r in rest)


@pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
def test_what_a_selective_checkpoint_saves_is_listed(lower: str) -> None:
    saves = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)
    run = lambda x: checkpoint(model, x, use_reentrant=False, context_fn=saves).sum()
    report = ampcompile.explain(run, lower=lower, products="torch")(x)
    assert [(r.op, r.shape) for r in report.saved if not r.alive_anyway] == [("aten.addmm", (4, 8))]


def test_nothing_is_kept_without_gradients() -> None:
    model, args = MODELS["blocks"]()
    with torch.no_grad():
        report = ampcompile.explain(model)(*args)
    assert not report.saved and "kept for backward" not in str(report)


def test_what_only_the_caller_holds_and_what_a_loss_within_frees() -> None:
    model, args = language_model(False, False)
    within, _ = language_model(False, True)
    totals, of_within = (ampcompile.explain(each)(*args).saved_totals for each in (model, within))
    logits = 2 * 5 * 32
    assert totals.results == 4 * logits and totals.freed == 2 * logits
    assert of_within.results == 4 and of_within.freed == 0
    # The loss outside keeps as much as the logits take again, and that's what the other keeps at most.
    assert of_within.backward + of_within.results <= totals.backward + 2 * totals.results - totals.freed


RESULTS: dict[
    str, tuple[Callable[[Tensor], Any], int, int]
] = {  # bytes that the caller alone holds, and that are freed
    "backward reads it": (lambda x: x.exp(), 0, 0),
    "backward reads one of two": (lambda x: (x.exp(), x.sin()), 64, 0),
    "one of two is cast": (lambda x: (x @ x, x.sin()), 128, 32),
    "without a gradient": (lambda x: (x @ x).detach(), 64, 0),
    "one number": (lambda x: x[:1] @ x[:, :1], 4, 0),
    "an argument": (lambda x: (x, x.sin()), 64, 0),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_counted_once(name: str) -> None:
    f, results, freed = RESULTS[name]
    totals = ampcompile.explain(f, lower="aot_eager")(torch.randn(4, 4, requires_grad=True)).saved_totals
    assert (totals.results, totals.freed) == (results, freed)


def test_a_users_own_cut_is_listed() -> None:
    from torch._functorch.partitioners import default_partition
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class KeepsAll(CustomPartitionerFn):
        def __call__(self, gm: Any, inputs: Any, **kwargs: Any) -> Any:
            return default_partition(gm, inputs, num_fwd_outputs=kwargs["num_fwd_outputs"])

        def uuid(self) -> str:
            return "keeps all"

    model, args = MODELS["blocks"]()
    ours, theirs = (ampcompile.explain(model, **given)(*args) for given in ({}, {"custom_partitioner_fn": KeepsAll()}))
    assert theirs.saved_totals.backward > ours.saved_totals.backward > 0


SAVED = SavedRecord(
    op="aten.mm", module="blocks.0.up", source="/home/me/model.py:7", shape=(2, 3), dtype=LOW, kept_as=LOW, bytes=12,
    because="read by aten.mul of blocks.0.up", of="activation",
)  # fmt: skip
ROWS = (
    SAVED,
    replace(SAVED, module="blocks.11.up", because="read by aten.mul of blocks.11.up"),
    replace(SAVED, module="head", bytes=40, op="aten.exp"),
    replace(SAVED, of="copy", module="", bytes=64),
)


def test_equal_layers_are_one_row_and_the_largest_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "118")
    report = Report([graph(saved=ROWS[:2]), graph(saved=ROWS[2:])], of_caller=(32, 16))
    assert (
        "\n".join(map(str.rstrip, str(report).splitlines())).split("\n\n")[-1].strip()
        == """\
kept for backward, by module                    values bytes
head                                                 1  40 B
blocks.*.up                                          2  24 B
in all                                               3  64 B
alive anyway: weights, copies, arguments             1  64 B
results that only the caller holds                      32 B
of these, a loss in the compiled function frees         16 B"""
    )
    assert report.as_dict()["saved_totals"] == {"backward": 64, "results": 32, "freed": 16, "alive": 64}
    assert (
        '"because":"read by aten.mul of blocks.*.up","dtype":"bf16","times":2,"bytes":24'
        in report._repr_html_().replace("&quot;", '"')
    )
