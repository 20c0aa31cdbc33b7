"""Graphs that other engines' mixed-precision passes are tested on, in our terms: which op runs where, how many casts.

Left out: retargeting a user's cast, one type for a container or a loop's carry chosen by its readers, and deleting
round trips that lose digits by default, because eager autocast does none of them and results would differ from it.
"""

import pytest
import torch
import torch.nn.functional as F

from ampcompile.passes.base import run_passes
from ampcompile.passes.before.fold_casts import FoldCasts
from ampcompile.passes.before.insert_casts import InsertCasts
from ampcompile.passes.decide.assign_precision import AssignPrecision
from ampcompile.passes.graph import Regions
from ampcompile.passes.share_casts import ShareCasts
from ampcompile.policy import Policy
from ampcompile.torch_private.tracing import elements_hint
from tests.compiling import HALF, HIGH, LOW, amp, eager, same_bits
from tests.passes.captured import captured
from tests.passes.tidied import inserted, ours, spelled, tidied

X, W, V = (torch.empty(8, 8) for _ in range(3))
IMAGE, KERNEL, KERNEL2, BIAS = torch.empty(1, 3, 8, 8), torch.empty(3, 3, 3, 3), torch.empty(3, 3, 3, 3), torch.ones(3)
TIDYING = [FoldCasts(False), ShareCasts(False)]


@pytest.fixture(autouse=True)
def drawn() -> None:
    """Numbers of the test's own seed."""
    for value in (X, W, V, IMAGE, KERNEL, KERNEL2):
        value.normal_()


def chain(x, w):
    y = x.exp().relu().sqrt().relu()
    return F.softmax(F.mse_loss(torch.mm(y, w).relu(), torch.zeros(8, 8), reduction="none").relu(), -1)


def stages(x, w):
    low = torch.mm(x, w)
    high = low.relu().sqrt().exp().relu()
    return low, torch.mm(high, w).relu().exp(), high


CASES = {  # function, inputs, and the elements that are cast where nothing is differentiated
    "no op for low precision": (lambda x: x.exp().relu().sqrt().relu(), (X,), 0),
    "in low precision by hand": (lambda x: torch.mm(x.to(LOW), x.to(LOW)).relu().float().relu(), (X,), 0),
    "already low": (lambda x: torch.mm(x, x).relu(), (torch.ones(8, 8, dtype=LOW),), 0),
    "sums, pooling, softmax alone": (lambda x: (x.sum(), F.adaptive_avg_pool2d(x[None], 1), x.softmax(-1)), (X,), 0),
    "one stretch in low precision": (chain, (X, W), 64 + 64 + 64),
    "two convolutions": (lambda x, w, v: F.conv2d(F.relu(F.conv2d(x, w)), v), (IMAGE, KERNEL, KERNEL2), 192 + 81 + 81),
    "a float32 weight added, silu": (lambda x, w, v: F.silu(torch.mm(x, w) + v), (X, W, V), 64 + 64),
    "one input for two ops": (lambda x, w: F.conv2d(x, w, padding=1) + x.softmax(-1), (IMAGE, KERNEL), 192 + 81),
    "cat before a product": (lambda a, b, w: torch.cat([a, b]) @ w, (X, V, W), 128 + 64),
    "a bias in range": (lambda x, w, b: F.conv2d(x, w, b), (IMAGE, KERNEL, BIAS), 192 + 81 + 3),
    "a linear layer and a mean": (lambda x, w, b: F.linear(x, w, b).mean(), (X, W, torch.ones(8)), 64 + 64 + 8),
    "added, returned and multiplied": (lambda x, w: (y := x + w, torch.mm(y, w)), (X, W), 64 + 64),
    "no rows": (torch.mm, (torch.empty(0, 8), W), 64),
    "widened and narrowed": (lambda a, b, c: torch.mm(a, b).float().to(LOW) + c.to(LOW), (X, W, V), 128),
    "widened and turned": (lambda a, b, c: torch.mm(torch.mm(a, b).float().t(), c), (X, W, V), 192),
    "rounded by the user": (lambda a, b, c: torch.mm(a.t().to(LOW).float(), b) + c.to(LOW).float(), (X, W, V), 64),
    "results of every stage returned": (stages, (X, W), 128),
    "behind an identity": (lambda x, w, c: (torch.mm(x, w.clone()), torch.mm(x, c.detach())), (X, W, V), 192),
    "one constant in a product and in sums": (lambda x, c: (torch.mm(x, c), x + c, x * c), (X, V), 128),
    "a product of two sums": (lambda x, w: torch.mm(x + w, x - w), (X, W), 128),
    "casts on both sides of a sum": (lambda x, w: (x.to(LOW).float() + w.to(LOW).float()).to(LOW), (X, W), 0),
    "a low sum into a layer": (lambda x, w, v: F.linear(torch.mm(x, w) + torch.mm(x, v), w), (X, W, V), 192),
    "a wide sum into a product": (lambda x, w, c: torch.mm(torch.mm(x, w).float() + c, w), (X, W, V), 192),
}


@pytest.mark.parametrize("name", CASES)
def test_as_little_is_cast_as_expected_and_every_bit_is_eagers(name):
    f, args, elements = CASES[name]
    gm = inserted(f, *args)
    for each in TIDYING:
        tidied(gm, each, *args, gradients=False)
    assert sum(elements_hint(cast.meta["val"]) for cast in ours(gm)) == elements
    with torch.no_grad():
        assert same_bits(amp(f)[0](*args), eager(f, *args))


def decided(f, *like, states):
    """A function's graph with its casts, under autocast states, on fake inputs of these devices and dtypes."""
    with torch._subclasses.FakeTensorMode():
        args = [torch.randn(8, 8, device=device, dtype=dtype) for device, dtype in like]
        gm = captured(f, *args, dtype=None)
    run_passes([AssignPrecision(Policy(), Regions(states), range_guards=False), InsertCasts()], gm)
    return gm


GPU, CPU = ("cuda", HIGH), ("cpu", HIGH)


def test_each_device_keeps_its_own_type():
    def f(x, w, v):
        return torch.mm(torch.mm(x.relu(), w).tanh().cpu(), v).relu()

    gm = decided(f, GPU, GPU, CPU, states={"cuda": (True, HALF), "cpu": (True, LOW)})
    moved = "to:f32"  # `cpu()`, traced without autocast, keeps the type it had
    expected = f"relu:f32 to:f16 to:f16 mm:f16 tanh:f16 {moved} to:bf16 to:bf16 mm:bf16 relu:bf16"
    assert " ".join(spelled(gm)) == expected and len(ours(gm)) == 4


def test_nothing_is_cast_across_a_collective():
    def all_reduced(x, w):
        total = torch.ops._c10d_functional.all_reduce((x[:1] * 1.5).expand(8, 8), "sum", "0")
        return torch.mm(torch.ops._c10d_functional.wait_tensor(total), w) + torch.mm(total.relu(), w)

    gm = decided(all_reduced, CPU, CPU, states={"cpu": (True, LOW)})
    assert sum(done.rewrites for done in run_passes(TIDYING[:1], gm)) == 0
    collectives = [op for op in spelled(gm) if op.startswith("_c10d")]
    assert collectives and all(op.endswith(":f32") for op in collectives)


def test_a_product_with_a_mask_reads_the_mask_itself():
    counts, long = torch.randint(-(2**15), 2**15, (8, 8), dtype=torch.int16), torch.randint(-(2**40), 2**40, (8, 8))
    for mask, folded in ((X > 0, 1), (counts, 1), (long, 0)):
        gm = inserted(lambda m, w: torch.mm(m.float(), w), mask, W)
        assert tidied(gm, FoldCasts(True), mask, W) == folded
        assert all(cast.args[0].op == "placeholder" for cast in ours(gm)) == folded


def test_a_slice_whose_size_depends_on_data():
    def f(x, w, n):
        size = n.item()
        torch._check(size >= 2)
        torch._check(size <= x.shape[0])
        return torch.mm(x, w)[:size].float().to(LOW).relu()

    n = torch.tensor(5)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run, recorder = amp(f)
        assert same_bits(run(X, W, n), eager(f, X, W, n))
    assert not [c for c in ours(recorder.graphs[0].graph) if c.args[1] == HIGH]
