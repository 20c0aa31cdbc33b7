"""What the scaler's kernels do on a GPU alone, on CPU tensors."""

import math
from copy import deepcopy

import pytest
import torch

pytest.importorskip("triton")
from ampcompile.kernels import tables
from ampcompile.kernels.check_grads import check_grads
from ampcompile.kernels.triton import adam_and_sgd, loss_scaling
from tests.kernels import test_loss_scaling, test_masters, test_states, test_step
from tests.kernels.engines import OTHERS, Engine
from tests.kernels.references import check_grads_reference
from tests.optim import test_copies
from tests.scaler import test_differential
from tests.scaler.cases import ADAM_GROUPS, OPTIMIZERS, adam_tensors, assert_close

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("on_a_gpu")]


class OnlyOnce:
    """A kernel that is launched once, then interrupted."""

    def __init__(self, kernel):
        self.kernel, self.launched, self.arg_names = kernel, False, kernel.arg_names

    def __getitem__(self, grid):
        if self.launched:
            raise KeyboardInterrupt
        self.launched = True
        return self.kernel[grid]


def test_a_check_that_was_interrupted_between_its_launches_leaves_the_next_ones_right(monkeypatch):
    tensors, workspace = [torch.randn(100), torch.randn(100).half()], {}
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        check_grads(tensors, workspace=workspace)
        patched.setattr(loss_scaling, "amp_check_grads", OnlyOnce(loss_scaling.amp_check_grads))
        check_grads(tensors, workspace=workspace)
    for tensor in reversed(tensors):
        tensor *= 2
        assert_close(check_grads(tensors, workspace=workspace)[:3], check_grads_reference(tensors)[:3])


@pytest.mark.parametrize("step", ["check", "adam"])
def test_a_captured_launch_has_memory_of_its_own(step, monkeypatch):
    """What the eager launches use, and may let go of, is nothing that a replay writes to."""
    workspace, used = {}, []
    tensors = adam_tensors(ADAM_GROUPS[:1], sizes=(300,))
    module, name = (loss_scaling, "amp_check_grads") if step == "check" else (adam_and_sgd, "amp_adam_prepare")

    def start(kernel, programs, addressed, *rest):
        if kernel is getattr(module, name):
            used.append({t.data_ptr() for t in (addressed[4:7] if step == "check" else addressed[1:2])})

    def launch(captured):
        with monkeypatch.context() as patched:
            patched.setattr(module, "start", start)
            patched.setattr(tables, "capturing", lambda device: captured)
            if step == "check":
                check_grads(tensors.grads, workspace=workspace)
            else:
                OPTIMIZERS["adam"][2](tensors, workspace=workspace)

    launch(captured=False)
    held = dict(workspace)
    launch(captured=True)
    launch(captured=False)
    assert used[0] == used[2] and not used[0] & used[1] and held.keys() == workspace.keys()


def test_a_learning_rate_on_the_device_is_read_at_each_step(on_a_gpu: Engine):
    lr = torch.tensor(0.5)
    for make, groups, step, reference_step in OPTIMIZERS.values():
        ours, workspace = make([groups[0]._replace(lr=lr), groups[1]], sizes=on_a_gpu.sizes), {}
        for value in (0.5, 0.25):
            lr.fill_(value)
            reference = deepcopy(ours)
            step(ours, None, None, workspace)
            reference_step(reference)
            assert_close(ours.params, reference.params)


@pytest.mark.parametrize(
    "name", [name for name in test_differential.OPTIMIZERS if name.split()[0] in ("SGD", "Adam", "AdamW")]
)
def test_the_whole_scaler_trains_as_torchs(name):
    """The plain loop of the differential test."""
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
def test_a_step_of_the_scaler_writes_all_copies(kind, on_a_gpu: Engine):
    on_a_gpu.need_8_bits()
    written = test_copies.test_copies_of_several_types_are_written_with_whatever_was_written_unseen
    written(kind, "our scaler", test_copies.BESIDE_8_BITS)


@pytest.mark.parametrize("on_a_gpu", OTHERS, ids=str, indirect=True)
def test_other_generations_run_what_comes_before_a_step_and_coded_states(on_a_gpu: Engine):
    test_loss_scaling.test_it_equals_plain_torch_and_a_float64_run(torch.bfloat16, 3.0, 0.7, 1.0, on_a_gpu)
    test_loss_scaling.test_same_bits_as_torchs_kernel(torch.float16, 1 / 3, on_a_gpu)
    test_loss_scaling.test_random_updates_equal_torchs_bit_for_bit(on_a_gpu)
    test_states.test_a_step_has_the_bits_of_the_reference("adam", False, on_a_gpu)


@pytest.mark.parametrize("on_a_gpu", [80, 100], indirect=True)  # tests/emulated has the steps' machine code
@pytest.mark.parametrize(("name", "how"), [("adam", "remainder"), ("sgd", "stochastic")])
def test_other_generations_run_each_step(name, how, on_a_gpu: Engine):
    test_step.test_several_groups_gradient_types_and_copies_equal_plain_torch(name, torch.bfloat16, on_a_gpu)
    test_masters.test_steps_are_those_of_float32_parameters(name, (how, torch.bfloat16), torch.float16, on_a_gpu)
    if on_a_gpu.capability >= 90:
        test_step.test_quantized_weights_are_as_if_quantized_anew(name, None, 0.0, on_a_gpu)
