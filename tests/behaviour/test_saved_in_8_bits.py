"""What backward keeps in 8 bits: which values, why not others, and gradients near those of exact ones."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ampcompile
from ampcompile.errors import OptionError
from ampcompile.passes.after import keep_in_8_bits
from tests.compiling import HALF, error, gradients, keep_small_values_too
from tests.models import Attention, Block, Net, weight

NUMBERS = torch.float8_e4m3fn
ASKED = {"lower": "aot_eager", "products": "torch", "saved": "fp8"}


@pytest.fixture(autouse=True)
def small_values_too(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_small_values_too(monkeypatch)


def errors(model: nn.Module, loss: Callable[[nn.Module], Tensor], **options: Any) -> tuple[float, float]:
    """The errors of all gradients beside float64: of amp, and of amp with `saved="fp8"`."""
    exact = copy.deepcopy(model).double()
    right = gradients(exact, loss)
    found = []
    for saved in (None, "fp8"):
        torch._dynamo.reset()
        twin = copy.deepcopy(model)
        compiled = torch.compile(twin, backend="amp", options={**ASKED, **options, "saved": saved})
        found.append(error(gradients(twin, lambda _, run=compiled: loss(run)), right))
    return found[0], found[1]


again = partial(checkpoint, use_reentrant=False)
READERS: dict[str, tuple[Callable[[Tensor], Tensor], str | None]] = {
    # What reads a product; the reader in backward if it may not, None if that reads a mask.
    "a product": (lambda v: v @ v.t(), ""),
    "a factor": (lambda v: v * v.neg(), ""),
    "gelu": (F.gelu, ""),
    "silu": (F.silu, ""),
    "a norm": (lambda v: F.layer_norm(v, v.shape[-1:]), ""),
    "a norm of batches": (lambda v: F.batch_norm(v, None, None, training=True), ""),
    "a power": (lambda v: v.pow(4), ""),
    "a root as a power": (lambda v: v.pow(1.5), "aten.pow"),
    "gelu, computed again": (lambda v: again(lambda v: F.gelu(v) @ v.t(), v), ""),
    "a difference, computed again": (lambda v: again(lambda v: (v - 1) @ v.t(), v), "aten.sub"),
    "a pool": (lambda v: F.avg_pool2d(v[None, None], 2), ""),
    "log": (torch.log, "aten.div"),
    "a root": (torch.sqrt, "aten.div"),
    "a reciprocal, of which the result is read": (lambda v: 1 / v, ""),
    "what is divided by": (lambda v: v.t() / v, "aten.div"),
    "sine": (torch.sin, "aten.cos"),
    "clamp": (lambda v: v.clamp(-0.5, 0.5), None),
    "relu": (torch.relu, "aten.threshold_backward"),
    "relu6": (F.relu6, "aten.hardtanh_backward"),
    "a maximum": (lambda v: v.amax(-1), None),
    "a softmax": (lambda v: v.softmax(-1), "aten._softmax_backward_data"),
    "a difference": (lambda v: F.mse_loss(v, v.detach().roll(1, 0)), "aten.mse_loss_backward"),
    "a mixture": (lambda v: v * v.sum(-1, True).softmax(0), "aten.mul, and that by the backward of softmax"),
    "gates": (lambda v: v * v.sum(-1, True).cumsum(0), "aten.mul, and that by the backward of cumsum"),
    "a product and a sine": (lambda v: v @ v.t() + v.sin(), "aten.cos"),
}


@pytest.mark.parametrize(("name", "lower"), [*((name, "aot_eager") for name in READERS), ("gates", "inductor")])
def test_what_reads_a_value_decides(name: str, lower: str) -> None:
    f, reader = READERS[name]
    given = torch.randn(16, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    report = ampcompile.explain(lambda x, w: f(x @ w).float().sum(), **ASKED | {"lower": lower})(*given)
    found = {r.because.partition("kept as it is: read by ")[2] for r in report.saved if len(r.shape) == 2}
    low = [r for r in report.saved if r.kept_as == NUMBERS and r.op != "aten._to_copy"]  # which is the product's own
    assert all(r.bytes == r.shape[0] * r.shape[1] + 4 * 2 for r in low)
    assert bool(low) is (reader == "") and (reader is None or reader in found)


@pytest.mark.parametrize(
    ("shape", "numbers", "scales"),
    [
        ((16, 256), (16, 2, 128), (16, 2, 1)),
        ((16, 6, 64), (16, 3, 2, 64), (16, 3, 1, 1)),
        ((16, 3, 64), (24, 128), (24, 1)),
        ((3, 8), (1, 128), (1, 1)),
    ],
)
def test_blocks_merge_no_sizes_where_they_can(shape: Any, numbers: tuple[int, ...], scales: tuple[int, ...]) -> None:
    """Over merged sizes Inductor's C++ divides every index, and vectorizes nothing."""
    x, w = (torch.randn(sizes, requires_grad=True) for sizes in ((*shape[:-1], 8), (*shape[:-2], 8, shape[-1])))
    loss = torch.compile(lambda: F.gelu(x @ w).float().sum(), backend="amp", options=ASKED)()
    saved = loss.grad_fn.saved_tensors
    assert numbers in {value.shape for value in saved if value.dtype == NUMBERS}
    assert scales in {value.shape for value in saved if value.dtype == torch.float32}


@pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
def test_norms_and_experts_read_8_bits(lower: str) -> None:
    """Inductor computes parts of a norm again; grouped products are products."""
    conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 3))
    (value,) = (
        r
        for r in ampcompile.explain(conv, **ASKED | {"lower": lower})(torch.randn(2, 3, 9, 9)).saved
        if r.op == "aten.convolution" and r.module == "0"
    )
    assert value.kept_as == NUMBERS
    ends = torch.tensor([8, 16], dtype=torch.int32)
    experts = lambda x, w: F.grouped_mm(F.silu(F.grouped_mm(x, w, offs=ends)), w, offs=ends).float().sum()
    x, w = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((16, 16), (2, 16, 16)))
    report = ampcompile.explain(experts, **ASKED | {"lower": lower})(x, w)
    assert {r.op for r in report.saved if r.kept_as == NUMBERS} == {"aten._grouped_mm", "aten.silu"}


def test_a_module_is_chosen_by_a_pattern_and_the_last_that_fits_wins() -> None:
    model, x = nn.Sequential(*(Block(16, activation=F.gelu) for _ in range(3))), torch.randn(4, 8, 16)
    for saved, modules in (
        ("fp8", {"0", "1", "2"}),
        ({"1": "fp8"}, {"1"}),
        ({"*": "fp8", "1": None}, {"0", "2"}),
        ({"*.up": "fp8"}, {"0", "1", "2"}),
        (None, set()),
    ):
        report = ampcompile.explain(model, **{**ASKED, "saved": saved})(x)
        low = [r for r in report.saved if r.kept_as == NUMBERS]
        assert {r.module.partition(".")[0] for r in low if r.module} == modules
        if saved == {"1": "fp8"}:
            assert "it isn't chosen" in next(r.because for r in report.saved if r.module == "0.up")


def test_small_values_results_and_statistics_stay_exact() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), torch.randn(8, 16)
    keep_in_8_bits.least = 16_384
    assert all(r.kept_as != NUMBERS for r in ampcompile.explain(model, **ASKED)(x).saved)
    keep_in_8_bits.least = 0
    report = ampcompile.explain(lambda x: (model[1](h := model[0](x)), h), **ASKED)(x)
    every_call = ampcompile.explain(nn.Linear(16, 4), **ASKED, weights="every_call")(x.requires_grad_())
    assert {r.shape: r.kept_as for r in every_call.saved if r.shape != (4,)}[4, 16] == torch.bfloat16, "a weight's cast"
    kept_as = {(r.of, r.shape): r.kept_as for r in report.saved}
    assert kept_as["result", (8, 16)] == torch.bfloat16 and NUMBERS not in {
        d for (_, s), d in kept_as.items() if 1 in s
    }


def test_values_with_dynamic_sizes_stay_exact() -> None:
    x = torch.randn(4, 8, 16)
    torch._dynamo.mark_dynamic(x, 0)
    saved = ampcompile.explain(Block(16, activation=F.gelu), **ASKED)(x).saved
    assert all(r.kept_as != NUMBERS for r in saved) and any("its size is dynamic" in r.because for r in saved)


def odd(m: Any, x: Tensor) -> Tensor:
    """Sizes that no block divides, another order in memory, and one value for two products."""
    h = F.gelu(m.first(x)).transpose(1, 2)
    return m.last(h @ m.weight) + m.last(h.flatten(0, 1)[:33] @ m.weight).sum()


def language_model(m: Any, x: Tensor) -> Tensor:
    return m.head(m.mlp(x + m.attention(x)))


@torch.compiler.nested_compile_region
def region(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x @ w)


def regions(m: Any, x: Tensor) -> Tensor:
    return F.gelu(region(region(m.first(x), m.a), m.b) @ m.a)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "odd sizes": (
        lambda: Net(odd, first=nn.Linear(5, 7), weight=weight(11, 13), last=nn.Linear(13, 3)),
        (6, 11, 5),
    ),
    "a transformer": (
        lambda: Net(language_model, attention=Attention(16), mlp=Block(16, 32, F.gelu), head=nn.Linear(16, 16)),
        (4, 8, 16),
    ),
    "nested regions": (
        lambda: Net(regions, first=nn.Linear(16, 16), a=weight(16, 16), b=weight(16, 16)),
        (4, 16),
    ),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 4, 3)),
        (2, 3, 9, 9),
    ),
}


@pytest.mark.parametrize(
    ("name", "lower"),
    [
        *((name, "aot_eager") for name in MODELS),
        *(pytest.param(name, "inductor", marks=pytest.mark.ci) for name in ("a transformer", "nested regions")),
        *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in ("odd sizes", "convolutions")),
    ],
)
def test_gradients_are_as_near_as_8_bits_allow(name: str, lower: str) -> None:
    build, shape = MODELS[name]
    model, x = build(), torch.randn(shape)

    def loss(run: Any) -> Tensor:
        dtype = next(run.parameters()).dtype if isinstance(run, nn.Module) else torch.float32
        return run(x.to(dtype)).square().mean()

    exact, low = errors(model, loss, lower=lower)
    assert exact < low < 0.06, "something is in 8 bits, and nothing is far off"


def attend(m: Any, x: Tensor, scale: float, fused: bool = True) -> Tensor:
    q, k, v = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (m.q, m.k, m.v))
    by_hand = lambda q, k, v: (q @ k.mT / 8**0.5).softmax(-1) @ v
    attention = F.scaled_dot_product_attention if fused else by_hand
    return m.out(attention(q * scale, k, v).transpose(1, 2).flatten(2)).square().mean()


def confident(m: Any, x: Tensor) -> Tensor:
    logits = 20 * m.out(F.gelu(m.q(x)))
    return F.cross_entropy(logits.flatten(0, 1), logits.detach().flatten(0, 1).argmax(-1))


def entropy(m: Any, x: Tensor) -> Tensor:
    shares = (5 * m.out(F.gelu(m.q(x)))).softmax(-1)
    return -(shares * shares.clamp_min(1e-9).log()).sum(-1).mean()


def decay(m: Any, x: Tensor) -> Tensor:
    """Attention whose shares fall by gates: gradients of its factors cancel in the gates'."""
    gates = F.logsigmoid(m.out(x) + 1).cumsum(1)
    return (((m.q(x) * gates.exp()) @ (m.k(x) * gates.neg().exp()).mT).tril() @ m.v(x) * x).mean()


HARD: dict[str, Callable[[Any, Tensor], Tensor]] = {  # gradients depend on exponentials, or on which number is largest
    "logits of 5": lambda m, x: attend(m, x, 15.0),
    "logits of 20": lambda m, x: attend(m, x, 60.0),
    "logits of 5, not fused": lambda m, x: attend(m, x, 15.0, False),
    "confident logits": confident,
    "an entropy": entropy,
    "sums of gates": decay,
    "a maximum": lambda m, x: m.out(F.gelu(m.q(x))).amax(1).square().mean(),
}


@pytest.mark.parametrize(
    ("name", "control"), [*((name, False) for name in HARD), *((name, True) for name in HARD if "logits of" in name)]
)
def test_what_is_exponential_stays_as_near_as_in_bfloat16(
    name: str, control: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control keeps attention's operands in 8 bits too, and is further."""
    if control:
        monkeypatch.setattr(keep_in_8_bits, "_unfit_reader", lambda *_: "")
    model = Net(HARD[name], **{part: nn.Linear(16, 16) for part in ("q", "k", "v", "out")})
    x = torch.randn(4, 32, 16)

    def loss(run: Any) -> Tensor:
        return run(x.to(next(run.parameters()).dtype) if isinstance(run, Net) else x)

    exact, low = errors(model, loss)
    assert (low <= max(2 * exact, 0.035)) is not control


def test_forward_stays_bit_for_bit_and_a_second_backward_gives_equal_gradients() -> None:
    model, x = MODELS["a transformer"][0](), torch.randn(4, 8, 16)
    plain = torch.compile(model, backend="amp", options={**ASKED, "saved": None})(x)
    torch._dynamo.reset()
    result = torch.compile(model, backend="amp", options=ASKED)(x)
    assert torch.equal(result, plain)
    first, second = (
        torch.autograd.grad(result.square().sum(), list(model.parameters()), retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def grouped(m: Any, x: Tensor, rounded: bool) -> Tensor:
    """Two heads of queries for one of keys and values; keys are float32 until attention reads them, or `rounded`."""
    q, k, v = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (m.q, m.k, m.v))
    k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for t in (1.5 * k.float(), v))
    k = k.half().float() if rounded else k
    return m.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("lower", "rounded"),
    [
        ("aot_eager", False),
        *(pytest.param(*c, marks=pytest.mark.ci) for c in (("aot_eager", True), ("inductor", False))),
    ],
)
def test_what_repeats_numbers_is_kept_without_repeats(lower: str, rounded: bool) -> None:
    """Where a checkpoint's policy asks for what is repeated: bit for bit, in half the bytes. Not if rounded twice."""
    keep_in_8_bits.least = 10**9
    sizes = {"q": (16, 32), "k": (16, 16), "v": (16, 16), "out": (32, 16)}
    model = Net(partial(grouped, rounded=rounded), **{name: nn.Linear(*size) for name, size in sizes.items()})
    ops, x = [torch.ops.aten.clone.default, torch.ops.aten._to_copy.default], torch.randn(4, 32, 16)
    contexts = partial(create_selective_checkpoint_contexts, ops)
    run = lambda model: checkpoint(model, x, use_reentrant=False, context_fn=contexts).square().mean()
    found = []
    for saved in (None, "fp8"):
        torch._dynamo.reset()
        options = {**ASKED, "lower": lower, "saved": saved}
        kept = ampcompile.explain(run, **options)(model).saved
        kinds = {(r.op, r.kept_as, r.bytes) for r in kept if "repeated" in r.because}
        found.append((gradients(model, torch.compile(run, backend="amp", options=options)), kinds))
    (usual, nothing), (other, kinds) = found
    assert all(map(torch.equal, usual, other)) and not nothing
    size = 4 * 2 * 32 * 8 * 2
    keys = set() if rounded else {("aten._to_copy", torch.bfloat16, size)}
    assert kinds == {("aten.clone", torch.bfloat16, size)} | keys


@pytest.mark.parametrize("saturates", [F.relu6, F.hardsigmoid, lambda x: x.clamp(-3, 3), F.hardtanh])
def test_an_overflow_before_what_saturates_leaves_gradients_as_they_are(saturates: Callable[[Tensor], Tensor]) -> None:
    model, x = Net(lambda m, x: saturates(m.up(x)), up=nn.Linear(16, 16)), torch.randn(8, 16)
    with torch.no_grad():
        model.up.weight.fill_(1e4)
    x[3] = 3.0  # beyond float16
    found = []
    for saved in (None, "fp8"):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="amp", options={**ASKED, "dtype": HALF, "saved": saved})
        found.append(gradients(model, lambda _, run=compiled: run(x).sum())[1])
    assert found[0].isfinite().all() and torch.equal(*found)


def test_a_block_with_an_infinity_arrives_as_nan() -> None:
    x = torch.ones(3, 128)
    x[1, 5] = torch.inf
    w = torch.randn(128, 4, requires_grad=True)
    run = torch.compile(lambda x, w: (x * 2) @ w, backend="amp", options=ASKED)
    run(x, w).sum().backward()
    assert w.grad.isnan().all()


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:pattern 'one' of the option saved")
def test_a_warm_cache_gives_no_other_models_choice() -> None:
    """Of equal graphs, whose modules have other names, each gets its own, and what is asked for now."""
    for name, how in (("one", "fp8"), ("other", "fp8"), ("one", None), ("one", "fp8")):
        torch._dynamo.reset()
        counters.clear()
        modules = {"up": nn.Linear(16, 32), name: nn.GELU(), "down": nn.Linear(32, 16)}
        model = Net(lambda m, x, name=name: m.down(getattr(m, name)(m.up(x))), **modules)
        options = {"saved": {"one": how}, "products": "torch"}
        result = torch.compile(model, backend="amp", options=options)(torch.randn(8, 16))
        node = result.grad_fn
        while not type(node).__name__.startswith("CompiledFunction"):
            node = node.next_functions[0][0]
        assert (NUMBERS in {tensor.dtype for tensor in node.saved_tensors}) is (name == "one" and how == "fp8")
        result.sum().backward()  # torch caches a graph once its backward is compiled
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


def test_a_pattern_that_fits_nothing_is_told() -> None:
    with pytest.warns(UserWarning, match=r"pattern 'upp' of the option saved matches no module. Did you mean 'up'"):
        torch.compile(Block(8), backend="amp", options={**ASKED, "saved": {"upp": "fp8"}})


def test_what_is_no_choice_is_an_error() -> None:
    for wrong in (True, "bf16", {"a": "int8"}):
        with pytest.raises(OptionError, match=r"option saved=.*: expected 'fp8', None, or a dict of patterns"):
            ampcompile.explain(nn.Linear(2, 2), saved=wrong)
    with pytest.raises(OptionError, match="found saved beside custom_partitioner_fn"):
        ampcompile.explain(nn.Linear(2, 2), saved="fp8", custom_partitioner_fn=print)
    with pytest.raises(OptionError, match="with lower='eager', which differentiates no graph"):
        ampcompile.explain(nn.Linear(2, 2), saved="fp8", lower="eager")
