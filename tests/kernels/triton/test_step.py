"""The scaler's GPU kernels on CPU tensors."""

import math
import random
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton")
from ampcompile.kernels import tables
from ampcompile.kernels.check_grads import Checked
from ampcompile.kernels.native import group_values
from ampcompile.kernels.step import _count_step, _count_steps, grad_table, kinds_of, table_of
from ampcompile.kernels.triton import adam_and_sgd, loss_scaling, quantize_many
from ampcompile.kernels.triton import step as steps
from ampcompile.optim import plan as scaler_plan
from ampcompile.scaler import generic as scaler_generic
from ampcompile.scaler import grad_scaler as scaler
from tests.kernels.references import adam_reference_, check_grads_reference, unscale_reference_
from tests.kernels.test_check_grads import others_of_their_norm
from tests.kernels.test_masters import check_step, weights_of
from tests.kernels.triton import OTHERS
from tests.optim import test_copies
from tests.pairs import pairs
from tests.scaler import test_differential
from tests.scaler.cases import (
    ADAM_GROUPS,
    GRAD_DTYPES,
    HOWS,
    MATRIX_SIZES,
    OPTIMIZERS,
    adam_tensors,
    assert_close,
    assert_equal,
    assert_quantized,
    odd_tensors,
    with_masters,
    with_quantized,
)

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("emulated")]  # 100 kernels, compiled in a minute
CHUNK = 64
SIZES = (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 3)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few programs, each of few numbers."""
    monkeypatch.setattr(tables, "CHUNK", CHUNK)
    for module in (steps, loss_scaling):
        monkeypatch.setattr(module, "BLOCK", 32)


def launching(name):
    """A step as the public function takes it."""

    def step(t, multiplier=None, found_inf=None, workspace=None):
        workspace, rates = {} if workspace is None else workspace, [group.lr for group in t.groups]
        step_as(name, table_of(t), group_values(t.groups), rates, multiplier, found_inf, workspace, t.quantized)

    return step


def check_(tensors, *arguments):
    return loss_scaling.check_grads(grad_table(tensors), *arguments)[:3]


def unscale_(tensors, *arguments):
    loss_scaling.unscale_(grad_table(tensors), *arguments)


def step_as(name, table, settings, rates, multiplier, found_inf, workspace, quantized):
    """The kernels' `step_`, by these."""
    _count_step(table.keys)
    _count_steps(table.counts, found_inf)
    table.kinds = table.kinds or kinds_of(table)
    quantize_many.take(table, quantized)
    adam_and_sgd.step_(name, table, settings, rates, multiplier, found_inf, workspace)


STEPS = {name: launching(name) for name in OPTIMIZERS}
adam_ = STEPS["adam"]


def grads(dtype=torch.float32):
    return odd_tensors(dtype, SIZES)


def assert_copies(params, copies):
    for param, copy in zip(params, copies, strict=True):
        if copy is not None:
            assert_equal([copy], [param.to(copy.dtype)])


@pytest.mark.parametrize(
    ("dtype", "scale", "multiplier", "max_norm"), pairs(GRAD_DTYPES, [None, 3.0], [None, 0.7], [None, 1.0, 1e9])
)
def test_check_grads(dtype, scale, multiplier, max_norm):
    arguments = [None if x is None else torch.tensor(x) for x in (scale, multiplier)]
    workspace = {}
    for _ in range(2):  # the second finds the counter as the first left it
        tensors = [*grads(dtype), torch.randn(40)]
        before = deepcopy(tensors)
        result = check_(tensors, *arguments, max_norm, workspace)
        assert_close(result, check_grads_reference(tensors, *arguments, max_norm)[:3])
        assert_equal(tensors, before)


def test_gradients_of_equal_norm_have_other_digests():
    grads = [torch.arange(1.0, 6.0), torch.arange(3.0, 8.0)]
    checked = [
        loss_scaling.check_grads(grad_table(g), None, None, None, {}) for g in (grads, *others_of_their_norm(grads))
    ]
    assert len({each[2].item() for each in checked}) == 1
    assert len({each[3].item() for each in checked}) == len(checked)


def test_a_check_that_was_interrupted_between_its_launches_leaves_the_next_ones_right(monkeypatch):
    tensors, workspace = [torch.randn(100), torch.randn(100).half()], {}
    expected = check_grads_reference(tensors)[:3]
    assert_close(check_(tensors, None, None, None, workspace), expected)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(loss_scaling, "amp_check_grads", OnlyOnce(loss_scaling.amp_check_grads))
        check_(tensors, None, None, None, workspace)
    for tensor in reversed(tensors):
        tensor *= 2
        expected = check_grads_reference(tensors)[:3]
        assert_close(check_(tensors, None, None, None, workspace), expected)


class OnlyOnce:
    """A kernel that is launched once, then interrupted."""

    def __init__(self, kernel):
        self.kernel, self.launched, self.arg_names = kernel, False, kernel.arg_names

    def __getitem__(self, grid):
        if self.launched:
            raise KeyboardInterrupt
        self.launched = True
        return self.kernel[grid]


@pytest.mark.parametrize("step", ["check", "adam"])
def test_a_captured_launch_has_memory_of_its_own(step, monkeypatch):
    """What the eager launches use, and may let go of, is nothing that a replay writes to."""
    workspace, used = {}, []
    tensors = adam_tensors(ADAM_GROUPS[:1], sizes=SIZES)
    module, name = (loss_scaling, "amp_check_grads") if step == "check" else (adam_and_sgd, "amp_adam_prepare")

    def start(kernel, programs, addressed, *rest):
        if kernel is getattr(module, name):
            used.append({t.data_ptr() for t in (addressed[4:7] if step == "check" else addressed[1:2])})

    def launch():
        if step == "check":
            check_(tensors.grads, None, None, None, workspace)
        else:
            adam_(tensors, workspace=workspace)

    monkeypatch.setattr(module, "start", start)
    launch()
    held = dict(workspace)
    with monkeypatch.context() as patched:
        patched.setattr(tables, "capturing", lambda device: True)
        launch()
    launch()
    assert used[0] == used[2] and not used[0] & used[1]
    assert held.keys() == workspace.keys()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_one_bad_element_anywhere_is_found(dtype, value):
    for size in SIZES[1:]:
        for index in {0, size // 2, size - 1}:
            tensors = [torch.randn(7).to(dtype), torch.randn(size).to(dtype)]
            tensors[1][index] = value
            assert check_(tensors, torch.tensor(4.0), None, 1.0, {})[0].item() == 1
            found_inf = torch.zeros(())
            unscale_(tensors, torch.tensor(0.25), found_inf, {})
            assert found_inf.item() == 1


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, 1e-45])
def test_a_scale_that_cannot_be_undone_is_an_overflow(scale):
    tensors = [torch.zeros(CHUNK + 1), torch.ones(3)]
    assert check_(tensors, torch.tensor(scale), None, None, {})[0].item() == 1


@pytest.mark.parametrize("dtype", GRAD_DTYPES)
@pytest.mark.parametrize("multiplier", [2.0**-16, 1 / 3, 1.0, 0.0])
def test_unscale(dtype, multiplier):
    tensors = grads(dtype)
    expected, flags = deepcopy(tensors), [torch.zeros(()), torch.zeros(1)]
    unscale_(tensors, torch.tensor(multiplier), flags[0], {})
    unscale_reference_(expected, torch.tensor(multiplier), flags[1])
    assert flags[0].item() == flags[1].item() == (multiplier == 0)
    assert_equal(tensors, expected)


@pytest.mark.parametrize(
    ("name", "options"), [("adam", {"amsgrad": False}), ("adam", {"amsgrad": True}), ("sgd", {})], ids=str
)
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_steps(name, dtype, options):
    make, groups, _, reference_step = OPTIMIZERS[name]
    ours = make(groups, dtype, sizes=SIZES, **options)
    reference, before = deepcopy(ours), deepcopy(ours.grads)
    workspace = {}
    for _ in range(2):
        STEPS[name](ours, torch.tensor(0.3), torch.zeros(()), workspace)
        reference_step(reference, torch.tensor(0.3))
    for kind in ("params", *ours.STATES):
        assert_close(getattr(ours, kind), getattr(reference, kind))
    assert_equal(ours.grads, before)
    assert_copies(ours.params, ours.copies)


@pytest.mark.parametrize(
    ("name", "how", "grad_dtype"),
    pairs([*OPTIMIZERS], [how for how in HOWS if how != ("float32", torch.bfloat16)], GRAD_DTYPES),
    ids=str,
)
def test_16_bit_parameters(name, how, grad_dtype, monkeypatch):
    """Steps, checksums and random bits; a chunk is two spans here. Masters of bfloat16 are cast as copies are."""
    monkeypatch.setattr(tables, "CHUNK", 2 * tables.SPAN)
    monkeypatch.setattr(steps, "BLOCK", tables.SPAN)
    sizes = (0, 1, tables.SPAN, tables.SPAN + 1, 2 * tables.SPAN, 5 * tables.SPAN + 3)
    (make, groups, *_), step = OPTIMIZERS[name], STEPS[name]
    ours = check_step(step, make(groups[:3], grad_dtype, sizes=sizes), *how)
    for param in ours.params:
        param[:7] = 3.0
    before = deepcopy(ours)
    step(ours, torch.tensor(math.nan), torch.tensor(1.0))
    for kind in ("params", "checksums", *ours.STATES):
        assert_equal(getattr(ours, kind), getattr(before, kind))
    wide = replace(before, params=weights_of(before), kept=[None] * len(sizes) + [None])
    step(ours)
    step(wide)
    if how[0] != "stochastic":
        assert_equal(weights_of(ours), wide.params)


@pytest.mark.parametrize("found_inf", [1.0, 2.0, -1.0, math.nan])
def test_a_skipped_step_changes_nothing_but_stale_copies(found_inf):
    for name, (make, groups, *_) in OPTIMIZERS.items():
        tensors = make(groups, sizes=SIZES)
        before = deepcopy(tensors)
        STEPS[name](tensors, torch.tensor(math.nan), torch.tensor(found_inf), {})
        for kind, value in vars(tensors).items():
            if kind not in ("groups", "copies", "group_of", "same"):
                assert_equal(value, getattr(before, kind))
        assert_copies(tensors.params, tensors.copies)


def need_8_bits(capability):
    if capability < 90:
        pytest.skip("before sm_90 kernels convert to no numbers of 8 bits")


@pytest.mark.parametrize(
    ("name", "how", "found_inf"), pairs(list(OPTIMIZERS), [None, *HOWS], [None, 0.0, 1.0]), ids=str
)
def test_quantized_weights_are_as_if_quantized_anew(name, how, found_inf, monkeypatch, emulated):
    """Some outgrew their scale, or shrank; what didn't isn't read again after the update."""
    need_8_bits(emulated)
    monkeypatch.setattr(tables, "CHUNK", 4 * tables.SPAN)
    monkeypatch.setattr(steps, "BLOCK", tables.SPAN)
    make, groups, *_ = OPTIMIZERS[name]
    ours = make(groups, sizes=MATRIX_SIZES)
    ours = with_quantized(ours if how is None else with_masters(ours, *how))
    workspace, written = {}, []

    def finish(poisoned, table, *rest):
        written[:] = deepcopy(ours.params)
        if poisoned:
            ours.params[0].fill_(math.nan)
        quantize_many.finish(table, *rest)

    for poisoned in (False, True):
        monkeypatch.setattr(steps, "finish", partial(finish, poisoned))
        flag = None if found_inf is None else torch.tensor(found_inf)
        launching(name)(ours, torch.tensor(1e-3), flag, workspace)
        assert_quantized(written[: len(ours.quantized)], [buffer for buffer, _ in ours.quantized.values()])
    both = ours.copies[7]
    assert how is not None or torch.equal(both, written[7].to(both.dtype))


def test_neither_multiplier_nor_flag_nor_copies():
    ours = adam_tensors(ADAM_GROUPS[:1], sizes=SIZES)
    ours.copies = [None] * len(ours.copies)
    reference = deepcopy(ours)
    adam_(ours, None, None, {})
    adam_reference_(reference)
    assert_close(ours.params, reference.params)


def test_a_learning_rate_on_the_device_is_read_at_each_step():
    lr = torch.tensor(0.5)
    for name, (make, groups, _, reference_step) in OPTIMIZERS.items():
        ours = make([groups[0]._replace(lr=lr), groups[1]], sizes=SIZES)
        workspace = {}
        for value in (0.5, 0.25):
            lr.fill_(value)
            reference = deepcopy(ours)
            STEPS[name](ours, None, None, workspace)
            reference_step(reference)
            assert_close(ours.params, reference.params)


def test_nan_reaches_the_largest_square():
    ours = adam_tensors(ADAM_GROUPS[:1], sizes=SIZES)
    for grad in ours.grads:
        grad.fill_(math.nan)
    adam_(ours, None, None, {})
    for name in ("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"):
        assert all(tensor is None or tensor.isnan().all() for tensor in getattr(ours, name))


def test_update_scale(draws=100):
    for _ in range(draws):
        scale = random.choice([random.uniform(0, 1e5), 2.0 ** random.randint(-140, 127), 1e38, 0.0, math.inf, math.nan])
        tracker, interval = random.randint(-2, 4), random.randint(0, 4)
        growth, backoff = random.choice([2.0, 1.1, 1.0001, 1e30]), random.choice([0.5, 0.7, 1e-30, 0.0])
        founds = [torch.tensor(random.choice([0.0, 0.0, 1.0, 2.0, math.nan])) for _ in range(random.randint(1, 2))]
        low, high = random.choice([(0.0, math.inf), (2.0**-24, 2.0**64)])
        expected, got = ((torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)) for _ in range(2))
        overflow = any(found.item() != 0 for found in founds)
        torch._amp_update_scale_(*expected, torch.tensor(float(overflow)), growth, backoff, interval)
        expected[0].clamp_(low, high)
        skips = torch.tensor(5, dtype=torch.int32)
        loss_scaling.update_scale_(*got, skips, founds, growth, backoff, interval, low, high)
        assert_equal(got, expected)
        assert skips.item() == (6 if overflow else 0)


@pytest.mark.parametrize(
    "name", [name for name in test_differential.OPTIMIZERS if name.split()[0] in ("SGD", "Adam", "AdamW")]
)
def test_the_whole_scaler_trains_as_torchs(name, monkeypatch):
    """The plain loop of the differential test, with these kernels under our scaler."""
    monkeypatch.setattr(scaler_plan, "check_grads", lambda *a: Checked(*loss_scaling.check_grads(*a)))
    monkeypatch.setattr(scaler_plan, "step_", step_as)
    monkeypatch.setattr(scaler_generic, "unscale_", unscale_)
    monkeypatch.setattr(scaler, "update_scale_", loss_scaling.update_scale_)
    twins = test_differential.Twins([name, "SGD"], {"growth_interval": 3})
    ours, stock = twins.ours, twins.stock
    for i in range(6):
        twins.scale()
        twins.fill(0, i, math.nan if i in (0, 3) else None)
        if i % 3 == 0:
            twins.unscale(0)
            twins.torchs_clip(0)
        elif i % 3 == 1:
            stock.scaler.unscale_(stock.optimizers[0])
            for _ in range(2):
                norm = ours.scaler.clip_grad_norm_(ours.optimizers[0], 0.5)
                expected = torch.nn.utils.clip_grad_norm_(stock.params(0), 0.5)
                torch.testing.assert_close(norm.to(expected.dtype), expected, rtol=1e-5, atol=0)
        twins.step(0, seed=i)
        twins.update(None)
        twins.compare()


@pytest.mark.parametrize("kind", test_copies.KINDS)
def test_a_step_of_the_scaler_writes_all_copies(kind, monkeypatch, emulated):
    need_8_bits(emulated)
    monkeypatch.setattr(scaler_plan, "step_", step_as)
    written = test_copies.test_copies_of_several_types_are_written_with_whatever_was_written_unseen
    written(kind, "our scaler", test_copies.BESIDE_8_BITS)


@pytest.mark.parametrize("emulated", OTHERS, ids=str, indirect=True)
def test_other_generations_run_what_comes_before_a_step(emulated):
    test_check_grads(torch.bfloat16, 3.0, 0.7, 1.0)
    test_unscale(torch.float16, 1 / 3)
    test_update_scale(20)


@pytest.mark.parametrize("emulated", [80, 100], indirect=True)  # tests/emulated has the steps' machine code
@pytest.mark.parametrize(
    ("name", "how"), [("adam", ("remainder", torch.bfloat16)), ("sgd", ("stochastic", torch.bfloat16))], ids=str
)
def test_other_generations_run_each_step(name, how, emulated, monkeypatch):
    test_steps(name, torch.bfloat16, {})
    test_16_bit_parameters(name, how, torch.float16, monkeypatch)
    if emulated >= 90:
        test_quantized_weights_are_as_if_quantized_anew(name, None, 0.0, monkeypatch, emulated)
