"""More of the graphs that other engines are tested on: devices, training, loops, collectives, casts at every place.

Left out: weights listed as inputs in low precision are here the copies kept between calls; a container has no type of
its own, its elements have.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F

import ampcompile
from ampcompile.passes.base import run_passes
from ampcompile.passes.before.fold_casts import FoldCasts, is_cast
from ampcompile.passes.before.insert_casts import InsertCasts
from ampcompile.passes.before.move_casts import MoveCasts
from ampcompile.passes.before.share_casts import ShareCasts
from ampcompile.passes.before.split_casts_over_cat import SplitCastsOverCat
from ampcompile.passes.decide.assign_precision import AssignPrecision
from ampcompile.passes.graph import Regions
from ampcompile.policy import Policy
from tests.compiling import HALF, HIGH, LOW, amp, dtypes, eager, gradients, same_bits
from tests.passes.captured import captured
from tests.passes.tidied import inserted, ours, spelled, tidied

X, W, V = (torch.empty(8, 8) for _ in range(3))


@pytest.fixture(autouse=True)
def drawn() -> None:
    """Numbers of the test's own seed."""
    for value in (X, W, V):
        value.normal_()


def decided(f, *like, states):
    """A function's graph with its casts, under autocast states, on fake inputs of these devices and dtypes."""
    with torch._subclasses.FakeTensorMode():
        args = [torch.randn(8, 8, device=device, dtype=dtype) for device, dtype in like]
        gm = captured(f, *args, dtype=None)
    run_passes([AssignPrecision(Policy(), Regions(states), range_guards=False), InsertCasts()], gm)
    return gm


GPU, CPU = ("cuda", HIGH), ("cpu", HIGH)


def on_two_devices(x, w, v):
    return torch.mm(torch.mm(x.relu(), w).tanh().cpu(), v).relu()


def test_each_device_keeps_its_own_type():
    gm = decided(on_two_devices, GPU, GPU, CPU, states={"cuda": (True, HALF), "cpu": (True, LOW)})
    moved = "to:f32"  # `cpu()`, traced without autocast, keeps the type it had
    expected = f"relu:f32 to:f16 to:f16 mm:f16 tanh:f16 {moved} to:bf16 to:bf16 mm:bf16 relu:bf16"
    assert " ".join(spelled(gm)) == expected and len(ours(gm)) == 4


def test_a_product_on_the_cpu_stays_in_float32_beside_one_on_an_accelerator():
    def f(x, w, v):
        return torch.mm(x.relu(), w).tanh().cpu().float() + torch.mm(v, v).relu()

    gm = decided(f, GPU, GPU, CPU, states={"cuda": (True, HALF), "cpu": (False, LOW)})
    moved = "to:f32 to:f32"
    assert " ".join(spelled(gm)) == f"relu:f32 to:f16 to:f16 mm:f16 tanh:f16 {moved} mm:f32 relu:f32 add:f32"
    assert len(ours(gm)) == 2


class Normalised(torch.nn.Module):
    """A convolution used twice, with batch norm and a sum between."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 3, 3, padding=1, bias=False), torch.nn.BatchNorm2d(3)

    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.conv(h + h.relu())


def test_batch_norm_in_training_runs_on_low_numbers_with_float32_statistics():
    image = torch.randn(2, 3, 6, 6)
    found = []
    for run_of in (lambda m: amp(m, weights="every_call")[0], lambda m: lambda x: eager(m, x)):
        torch.manual_seed(0)
        model = Normalised()
        run = run_of(model)
        grads = gradients(model, lambda m, run=run: run(image).float().square().sum())
        found.append([grads, model.norm.running_mean, model.norm.running_var])
    assert same_bits(*found)
    torch._dynamo.reset()
    report = ampcompile.explain(Normalised(), weights="every_call")(image)
    norm = next(op for op in report.ops if op.op == "aten.batch_norm")
    assert norm.dtype == LOW and not any(cast.op == "aten.batch_norm" for cast in report.casts)
    totals = {t.stage.partition(",")[0]: t.casts for t in report.totals}
    assert totals["share_casts"] - totals["insert_casts"] <= 2, "forward casts the image, and the weight once"


def test_a_loops_carry_is_of_one_type_and_its_product_low():
    from torch._higher_order_ops.while_loop import while_loop

    def f(x, w):
        def body(i, carry):
            return i + 1, torch.mm(carry.sin(), w).float()

        return while_loop(lambda i, carry: i < 3, body, (torch.tensor(0), x.exp()))[1]

    run, recorder = amp(f)
    with torch.no_grad():
        found = run(X * 0.1, W * 0.1)
    assert found.dtype == HIGH and torch.isfinite(found).all()
    casts = ours(recorder.graphs[0].graph)
    assert [cast.args[1] for cast in casts] == [LOW, LOW], "the user's own cast closes the loop"


def test_a_lists_elements_keep_their_own_types():
    def f(x, w):
        kept, other = [torch.mm(x, w), x], [x]
        kept[1] = kept[1] + 1
        return torch.mm(kept[0].tanh(), kept[1]), other[0].tanh(), kept

    found, expected = amp(f)[0](X, W), eager(f, X, W)
    assert same_bits(found, expected) and dtypes(found) == [LOW, HIGH, LOW, HIGH]


def all_reduced(x, w):
    total = torch.ops._c10d_functional.all_reduce((x[:1] * 1.5).expand(8, 8), "sum", "0")
    return torch.mm(torch.ops._c10d_functional.wait_tensor(total), w) + torch.mm(total.relu(), w)


def test_nothing_is_cast_across_a_collective():
    gm = decided(all_reduced, CPU, CPU, states={"cpu": (True, LOW)})
    rewrites = run_passes([SplitCastsOverCat(), FoldCasts(False), MoveCasts(False)], gm)
    assert sum(done.rewrites for done in rewrites) == 0
    collectives = [op for op in spelled(gm) if op.startswith("_c10d")]
    assert collectives and all(op.endswith(":f32") for op in collectives)


def test_a_maximum_before_a_product_is_taken_where_its_operand_is():
    # Narrowing before a maximum gives the same number, but casts more of them, and zeros may change their sign.
    gm = inserted(lambda x, w: torch.mm(x.amax(0, keepdim=True), w), X, W)
    assert tidied(gm, MoveCasts(False), X, W, gradients=False) == 0
    assert spelled(gm)[0] == "amax:f32" and len(ours(gm)) == 2


def test_mixed_operands_are_left_to_ops_that_take_them():
    def f(x, w, c):
        return torch.mm(torch.mm(x, w).float() + c, w)

    gm = inserted(f, X, W, V)
    assert [n.args[1] for n in ours(gm)] == [LOW] * 4, "two operands of each product, none of the sum"
    run_passes([FoldCasts(True)], gm)
    assert "to:f32" in spelled(gm), "the user's cast feeds the sum"
    torch._dynamo.reset()
    assert same_bits(amp(f)[0](X, W, V), eager(f, X, W, V))


def test_a_product_with_a_mask_reads_the_mask_itself():
    f = lambda m, w: torch.mm(m.float(), w)  # noqa: E731
    mask = X > 0
    gm = inserted(f, mask, W)
    assert tidied(gm, FoldCasts(True), mask, W) == 1
    assert all(cast.args[0].op == "placeholder" for cast in ours(gm))
    counts = torch.randint(-(2**15), 2**15, (8, 8), dtype=torch.int16)
    assert tidied(inserted(f, counts, W), FoldCasts(True), counts, W) == 1
    long = torch.randint(-(2**40), 2**40, (8, 8))
    assert tidied(inserted(f, long, W), FoldCasts(True), long, W) == 0


FORWARD_CASTS = {  # case: function and inputs; casts of ours once nothing is differentiated
    "results of every stage returned": (
        lambda x, w: (a := torch.mm(x, w), b := a.relu().sqrt().exp().relu(), torch.mm(b, w).relu().exp(), b),
        (X, W),
        2,
    ),
    "a weight and a constant behind an identity": (
        lambda x, w, c: (torch.mm(x, w.clone()), torch.mm(x, c.detach())),
        (X, W, V),
        3,
    ),
    "one constant in a product and in sums": (lambda x, c: (torch.mm(x, c), x + c, x * c), (X, V), 2),
    "a product of two sums": (lambda x, w: torch.mm(x + w, x - w), (X, W), 2),
    "casts of the user's on both sides of a sum": (
        lambda x, w: (x.to(LOW).float() + w.to(LOW).float()).to(LOW),
        (X, W),
        0,
    ),
    "a low convolution's sum into a linear layer": (
        lambda x, w, v: F.linear(torch.mm(x, w) + torch.mm(x, v), w),
        (X, W, V),
        3,
    ),
}


@pytest.mark.parametrize("name", FORWARD_CASTS)
def test_as_few_casts_as_expected(name):
    f, args, casts = FORWARD_CASTS[name]
    gm = inserted(f, *args)
    for each in (SplitCastsOverCat(), FoldCasts(False), MoveCasts(False), ShareCasts(False)):
        tidied(gm, each, *args, gradients=False)
    assert len(ours(gm)) == casts
    assert dtypes(amp(f)[0](*args)) == dtypes(eager(f, *args))


def test_weights_that_are_kept_low_are_not_cast_in_a_call():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 2))
    run, recorder = amp(model)
    assert run(torch.randn(2, 3, 6, 6)).dtype == LOW
    casts = [n for n in recorder.graphs[0].graph.graph.nodes if is_cast(n)]
    assert len(casts) == 1, "the image; weights and biases have copies"


def test_a_bias_in_range_of_bfloat16_though_large_is_added_low():
    f = lambda x, w: torch.mm(x, w) + torch.tensor([70000.0, 0, 0, 0, 0, 0, 0, 0]).to(LOW)  # noqa: E731
    assert same_bits(amp(f)[0](X, W), eager(f, X, W)) and amp(f)[0](X, W).dtype == LOW


@pytest.mark.parametrize("low", [LOW, HALF])
def test_a_slice_whose_size_depends_on_data(low):
    def f(x, w, n):
        size = n.item()
        torch._check(size >= 2)
        torch._check(size <= x.shape[0])
        return torch.mm(x, w)[:size].float().to(low).relu()

    n = torch.tensor(5)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run, recorder = amp(f, dtype=low)
        assert same_bits(run(X, W, n), eager(f, X, W, n, dtype=low))
    assert not [c for c in ours(recorder.graphs[0].graph) if c.args[1] == HIGH]


def test_an_opaque_op_on_low_numbers_is_unchanged():
    with torch.library._scoped_library("ampcompile_case", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        twice = torch.ops.ampcompile_case.twice
        gm = inserted(lambda x: twice(twice(x).relu()), X.to(LOW))
    assert not ours(gm) and all(op.endswith(":bf16") for op in spelled(gm))


ROUNDED = ("a", "b", "product", "sum")
PLACES = [places for n in range(5) for places in itertools.combinations(ROUNDED, n)]


@pytest.mark.parametrize("transposed", ["", *ROUNDED])
def test_a_product_and_a_sum_with_casts_at_every_place(transposed):
    def at(place, value, places):
        if place in places:
            value = value.to(LOW).float()
        return value.t() if place == transposed else value

    for places in PLACES:

        def f(a, b, c, places=places):
            product = at("product", torch.mm(at("a", a, places), at("b", b, places)), places)
            return torch.mm(at("sum", product + c, places), c)

        gm = inserted(f, X, W, V)
        passes = [SplitCastsOverCat(), FoldCasts(False), MoveCasts(False), ShareCasts(False)]
        for each in passes:
            tidied(gm, each, X, W, V, gradients=False)
        casts = ours(gm)
        keys = [(cast.args[0], cast.args[1]) for cast in casts]
        assert len(set(keys)) == len(keys), "sibling casts are one"
        assert not any(_was(cast.args[0]) == cast.args[1] for cast in casts), "nothing is widened and narrowed again"
        assert sum(done.rewrites for done in run_passes(passes, gm)) == 0, "a fixpoint"
        # c, and of a, b and the sum those that the user did not round to the low type.
        assert len(casts) == 1 + len({"a", "b", "sum"} - set(places))


def _was(value):
    """The type that a value was widened from, behind views."""
    while value.op == "call_function" and value.target.is_view:
        value = value.args[0]
    return value.args[0].meta["val"].dtype if is_cast(value) else None
