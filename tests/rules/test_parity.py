"""The tables against eager autocast: each op run both ways, on real CPU tensors and on fake ones of other devices."""

import copy
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from ampcompile.rules.ours import CONTENTS
from ampcompile.rules.table import composite_needs_decomposition, table
from ampcompile.torch_private import dispatcher
from ampcompile.torch_private.dispatcher import op_named
from tests.compiling import amp, draws, error
from tests.op_calls import LOW, Call, autocast, calls_in, is_float, is_real, sampled_calls, tensors_on, under_rule

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's deprecations, met on purpose
DEVICES = ["cpu", "cuda", "xpu", "mps"]


def aten_ops(names: str) -> set[str]:
    return {f"aten::{name}" for name in names.split()}


# Fake kernels of these take mixed dtypes, and give the first one's; the real ones raise.
LAX_FAKES = aten_ops(
    "_unsafe_masked_index_put_accumulate embedding_bag embedding_bag.padding_idx heaviside index_add index_copy "
    "index_reduce linalg_cross put"
)
# The kernel of torch 2.11 takes a sum of another dtype than the products', and gives theirs; other mixtures raise.
LAX_KERNELS = aten_ops("addmv") if dispatcher.TORCH < (2, 13) else set()
# On autocast's lists, and run by test_autocast_lists.py, or only where their libraries are.
NOT_SAMPLED = aten_ops(
    "_convolution _convolution.deprecated _cudnn_rnn _grid_sampler_2d_cpu_fallback _mps_convolution "
    "_native_multi_head_attention _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell "
    "binary_cross_entropy cudnn_convolution cudnn_convolution_transpose grid_sampler gru_cell lstm_cell "
    "mkldnn_rnn_layer rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention "
    "cumprod.dimname cumsum.dimname index_copy.dimname log_softmax.Dimname norm.names_ScalarOpt_dim prod.dim_Dimname "
    "softmax.Dimname sum.dim_DimnameList"
)
# Its kernel calls bmm, on which eager autocast acts once more; here it computes in float32, as under Inductor.
LOWERED_INSIDE = {"aten::bilinear"}


def outcome(function: Any) -> Any:
    """Results of a call, with the same random numbers each time, or the error."""
    torch.manual_seed(0)
    try:
        return pytree.tree_leaves(function())
    except Exception as error:
        return error


def dtypes(results: Any) -> Any:
    return [getattr(x, "dtype", type(x)) for x in results] if isinstance(results, list) else "raises"


def same_values(ours: list[Any], theirs: list[Any]) -> bool:
    def bits(x: Any) -> torch.Tensor:
        return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x

    pairs = [(bits(x), bits(y)) for x, y in zip(ours, theirs, strict=True) if isinstance(x, torch.Tensor)]
    # LAPACK's last digits depend on the alignment of memory
    return all(torch.equal(x, y) or torch.allclose(x, y, rtol=1e-5, atol=1e-6, equal_nan=True) for x, y in pairs)


def arrivals(call: Call, mixtures: int) -> Iterator[list[torch.dtype]]:
    """Dtypes in which the floating operands of a call may arrive: all alike, or one of so many mixtures."""
    count = len(call.floats())
    for dtype in (torch.float32, LOW, torch.float16, torch.float64):
        yield [dtype] * count
    if count > 1:
        for first, rest in itertools.islice(itertools.permutations([torch.float32, LOW, torch.float64], 2), mixtures):
            yield [first] + [rest] * (count - 1)


def compare(call: Call, device: str) -> str:
    """Run a call under eager autocast and by its rule: same, both raise, eager raises, or an AssertionError."""
    rule = table(device)[call.op.name()]
    with torch.no_grad(), autocast(device, True):
        eager = outcome(call.copy().run)
    with torch.no_grad(), autocast(device, False):
        ours = outcome(lambda: under_rule(call, rule))
    if isinstance(eager, Exception):
        return "both raise" if isinstance(ours, Exception) else "eager raises"
    assert dtypes(ours) == dtypes(eager), f"{call.op} {[x.dtype for x in call.floats()]}: {rule.category} {ours}"
    if is_real(device) and call.op.name() not in LOWERED_INSIDE:
        assert same_values(ours, eager), f"{call.op} {[x.dtype for x in call.floats()]}"
    return "same"


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer_for_inference(norm_first):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first).eval()
    exact_layer, totals = copy.deepcopy(layer).double(), [0.0, 0.0]
    run, recorder = amp(layer)
    with torch.no_grad():
        for _ in draws(layer, exact_layer):
            x = torch.randn(3, 5, 16)
            exact = exact_layer(x.double())
            with autocast("cpu", True):
                eager = layer(x)
            ours = run(x)
            assert ours.dtype == eager.dtype == LOW
            totals = [total + error([found], [exact]) for total, found in zip(totals, (ours, eager), strict=True)]
    fast_path = op_named("aten::_transformer_encoder_layer_fwd")
    assert recorder.graphs[0].graph.graph.find_nodes(op="call_function", target=fast_path)
    assert 0 < totals[0] < 1.5 * totals[1]


@pytest.mark.parametrize(
    "device", [pytest.param(d, marks=pytest.mark.ci if d == "cpu" else pytest.mark.slow) for d in DEVICES]
)
def test_every_sampled_op_runs_as_in_eager(device):
    """Where eager raises on a mixture, ours may run; where eager runs, ours gives the same."""
    verdicts: Counter[str] = Counter()
    agreed = set()
    for name, calls in sampled_calls().items():
        for i, call in enumerate(calls if name in table(device) else ()):
            for arriving in arrivals(call, 3 if i else 6):
                lax = name in (LAX_KERNELS if is_real(device) else LAX_FAKES) and len(set(arriving)) > 1
                with tensors_on(device):
                    verdict = "lax" if lax else compare(call.on(device).in_dtypes(arriving), device)
                verdicts[verdict] += 1
                if verdict == "eager raises":
                    rule = table(device)[name]
                    assert "ampcompile's" in rule.because or rule.category == "promote", (call.op, arriving)
                elif verdict == "same":
                    agreed.add(name)
    print(f"{device}: {dict(verdicts)}, {len(agreed)} of {len(table(device))} ops")
    untested = {op for op, rule in table(device).items() if rule.because.startswith("on autocast's")} - agreed
    assert untested <= NOT_SAMPLED


def mixtures(call: Call) -> list[Call]:
    """A call that runs in float32 and in bfloat16, with its first operand in one and the others in the other."""
    count = len(call.floats())
    uniform = [call.in_dtypes([dtype] * count) for dtype in (torch.float32, LOW)]
    if count < 2 or not all(x.numel() for x in call.floats()) or any(raises(c.run) for c in uniform):
        return []
    return [
        call.in_dtypes([first] + [rest] * (count - 1)) for first, rest in ((LOW, torch.float32), (torch.float32, LOW))
    ]


def raises(function: Any) -> bool:
    return isinstance(outcome(function), Exception)


@pytest.mark.slow
def test_mixed_dtypes_run_in_the_widest_or_in_the_destination():
    """Each op of our own lists raises on a mixture without its rule, and gives the stated dtype with it."""
    sampled, tested = sampled_calls(), set()
    ours = {name: rule for name, rule in table("cpu").items() if rule.because.startswith("on ampcompile's")}
    ours = {name: rule for name, rule in ours.items() if rule.category in ("promote", "follow_destination")}
    for name, rule in ours.items():
        functional = name.replace("_.", ".").removesuffix("_")
        for call in sampled.get(name) or sampled.get(functional, ()):
            for mixed in mixtures(call if call.op.name() == name else replace(call, op=op_named(name))):
                destination = next(x.dtype for x in mixed.floats())
                if raises(mixed.copy().run):
                    result = under_rule(mixed, rule)
                    expected = destination if rule.category == "follow_destination" else torch.float32
                    assert {x.dtype for x in pytree.tree_leaves(result) if is_float(x)} <= {expected}, (
                        name,
                        destination,
                    )
                    tested.add(name)
    # torch has no samples of it, see test_grouped_products.py; what doesn't run in bfloat16 alone belongs here too
    assert tested == ours.keys() - aten_ops("_grouped_mm")


@pytest.mark.slow
def test_no_other_op_raises_on_a_mixture():
    """An op that runs in float32 and in bfloat16, but not in both at once, has a rule, or a stated reason for none."""
    stated = {
        "norms with bfloat16 input and float32 weights have kernels of their own": "_batch_norm_with_update "
        "_native_batch_norm_legit batch_norm group_norm instance_norm layer_norm native_batch_norm native_group_norm "
        "native_layer_norm",
        "is taken apart, and the ops inside decide": "chain_matmul einsum inner linalg_multi_dot nll_loss_nd tensordot",
        "is made of histogram.bins_tensor": "histogramdd.TensorList_bins",
        "takes a sparse matrix, which no rule casts": "_sparse_mm.reduce",
        "is called by other ops, whose operands agree": "_scaled_dot_product_flash_attention_for_cpu "
        "_softmax_backward_data max_pool2d_with_indices_backward",
    }
    exempt = aten_ops(" ".join(stated.values()))
    raising = {
        name
        for name, calls in sampled_calls().items()
        if any(raises(mixed.run) for call in calls for mixed in mixtures(call))
    }
    assert raising - table("cpu").keys() <= exempt


@pytest.mark.slow
def test_composites_hide_no_more_than_is_stated():
    """Each composite op, taken apart one level: what it hides that a device's list knows, it states."""
    taken, not_traced, unlisted = 0, set(), set()
    for name, calls in sampled_calls().items():
        op = op_named(name)
        devices = [device for device in DEVICES if name not in table(device)] if dispatcher.is_composite(op) else []
        for call in calls if devices else ():
            try:
                inside = {c.op.name() for c in calls_in(op, call.args, call.kwargs, [op]) if c.floats()} - {name}
            except (RuntimeError, TypeError):
                not_traced.add(name)
                continue
            taken += bool(inside)
            for inner, device in itertools.product(inside - set(CONTENTS.get(name, ())), devices):
                rule = table(device).get(inner)
                hides = rule is not None and rule.because.startswith("on autocast's")
                hides = hides or composite_needs_decomposition(op_named(inner), device)
                if hides:
                    unlisted.add((name, inner, device))
    # whose Python decomposition, not its kernel, stacks what it gathers
    assert unlisted == {("aten::upsample_bicubic2d.vec", "aten::stack", "cpu")}
    assert taken > 200
    data_dependent = "corrcoef cov narrow.Tensor one_hot tensor_split.tensor_indices_or_sections"
    assert not_traced <= aten_ops(f"{data_dependent} quantile quantile.scalar nanquantile nanquantile.scalar")
