"""Captured steps read kept copies, in place: no bit is another than in steps that are launched one by one."""

import contextlib
import gc
import re
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile import CaptureError, weight_stats
from ampcompile.scaler import captured_step
from ampcompile.torch_private import pytree
from tests.devices import profiled
from tests.scaler.captured_mixtures import MIXTURES, Ours, TwoHeads
from tests.scaler.captured_programs import FP8, WIDTH, Lora, Plain, Program, Sgd, Sharing
from tests.scaler.cases import counts, replays_of
from tests.weights.bindings import bind

pytestmark = pytest.mark.gpu
REPLAYS = 12


def programs(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", [MIXTURES[name] for name in names], ids=lambda kind: kind.__name__)


@programs(*[name for name in MIXTURES if not name.startswith("Followed")])
def test_replays_train_as_steps_do(kind: type[Program]) -> None:
    train_both(kind)


def pair(kind: type[Program]) -> tuple[Any, Any]:
    """A program whose step is captured, and one that takes single steps."""
    captured, one_by_one = kind("cuda"), kind("cuda")
    captured.capture()
    one_by_one.train = one_by_one.step
    return captured, one_by_one


def train_both(kind: type[Program], turns: int = 2 + REPLAYS) -> Program:
    captured, one_by_one = pair(kind)
    for turn in range(turns):
        for each in (one_by_one, captured):
            each.go(range(turn, turn + 1))
        said = zip(one_by_one.said, captured.said, strict=True)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in said), turn
        assert all(map(torch.equal, one_by_one.weights(), captured.weights())), turn
    assert getattr(captured.train, "captured", True)
    return captured


class Unlike(Ours):
    """Forms that return other things; one of them waits for the GPU, and begins after the others."""

    def step(self, x: Tensor) -> Any:
        loss = super().step(x)
        if len(x) == 4:
            loss.item()
        return {16: loss, 8: {"loss": loss, "more": (x.mean(), None)}}.get(len(x), "nothing")

    def go(self, turns: range) -> None:
        for turn in turns:
            for rows in (16, 8, 4)[: 2 + (turn > 2)]:
                result = pytree.tree_leaves(self.train(self.batch(turn, rows)))
                self.said += [each.clone() for each in result if isinstance(each, Tensor)]


def test_a_form_that_cant_be_captured_leaves_the_others_and_each_returns_what_it_likes() -> None:
    with pytest.warns(ampcompile.AmpWarning, match=r"can't be captured, \(float32\[4, 32\]\) .*it runs as it is"):
        program: Any = train_both(Unlike, 8)
    assert [replays for _, replays in counts(program.train)] == [6, 6, 0]


class Seventeen(Sgd):
    """Forms by turns, without a compiler."""

    def compiled(self, model: nn.Module, **options: Any) -> Any:
        return model

    def go(self, turns: range) -> None:
        for turn in turns:
            self.said += [self.train(self.batch(turn, rows)).clone() for rows in range(1, 18)]


def test_of_seventeen_forms_by_turns_sixteen_are_captured() -> None:
    with pytest.warns(ampcompile.AmpWarning, match=r"more than 16 forms .*float32\[8, 32\].*pad to a few"):
        program: Any = train_both(Seventeen, 5)
    assert [replays for _, replays in counts(program.train)] == [3] * 16 + [0]


class UnlikeHeads(TwoHeads):
    """Of unlike numbers of parameters."""

    def add(self) -> None:
        super().add()
        self.heads[1].requires_grad_(False)[2].requires_grad_(True)


def test_two_heads_of_unlike_numbers_of_parameters_are_captured_by_turns() -> None:
    program: Any = train_both(UnlikeHeads, 8)
    assert replays_of(program.train) == 3


def go_in_two_sizes(program: Program, turns: range) -> None:
    program.said += [program.train(program.batch(turn, rows)).clone() for turn in turns for rows in (16, 8)]


def test_a_number_of_torchs_optimizer_that_changes_is_an_error_in_each_form_until_all_are_forgotten() -> None:
    captured, one_by_one = pair(MIXTURES["TorchsOwn"])
    for program in (captured, one_by_one):
        go_in_two_sizes(program, range(4))
        program.optimizers[0].param_groups[0]["lr"] = 0.05
    for rows in (16, 8):
        with pytest.raises(CaptureError, match=r"changed since the capture, from 0.01 to 0.05"):
            captured.train(captured.batch(4, rows))
    captured.train.forget()
    for program in (captured, one_by_one):
        go_in_two_sizes(program, range(4, 8))
    assert all(map(torch.equal, one_by_one.said, captured.said)) and captured.train.captured


@programs(*[name for name in MIXTURES if name.startswith("Followed")])
def test_numbers_that_change_at_each_call_lead_to_no_other_capture(kind: type[Program]) -> None:
    program: Any = train_both(kind, 14)
    assert counts(program.train) == [(2, 12), (2, 12)]


def test_gradients_before_the_call_are_checked_for_each_form() -> None:
    captured, one_by_one = pair(MIXTURES["TwoSizes"])
    for program in (captured, one_by_one):
        program.go(range(4))
        program.train(program.batch(9))
        for param in program.model.parameters():
            param.grad = param.grad.clone()
        if program is captured:
            with pytest.raises(CaptureError, match="found gradients that aren't those before the capture"):
                program.train(program.batch(9, 8))
        program.optimizers[0].zero_grad()
        program.go(range(4, 6))
    assert all(map(torch.equal, one_by_one.said, captured.said))


SCALE = 1.0
aside, other_aside = types.ModuleType("aside"), types.ModuleType("other_aside")  # with a number and a function each
for module in aside, other_aside:
    exec("factor = 1.0\ndef scaled(x):\n    return x * factor", vars(module))


class Chosen:
    scale = 1.0


class Block(nn.Module):
    bias = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.0)

    def scaled(self, x: Tensor) -> Tensor:
        return x * SCALE + self.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.scaled(self.linear(x))))


class Reading(Ours):
    """An eager step that reads this and that, the model as an argument."""

    compiled = Seventeen.compiled

    def net(self, features: int = WIDTH) -> nn.Module:
        return Block().to(self.device)

    def add(self) -> None:
        super().add()
        self.teacher, self.offset = nn.Linear(WIDTH, WIDTH).to(self.device), torch.zeros(WIDTH, device=self.device)
        self.model.linear.weight.register_hook(halve).remove()

    def step_of(self, model: nn.Module, x: Tensor) -> Tensor:
        y = other_aside.scaled(aside.scaled(model(x))) * Chosen.scale * aside.factor
        loss = (y - self.teacher(x).detach() - self.offset).square().mean()
        loss.backward()
        self.update(self.optimizers[0])
        return loss.detach()

    def capture(self) -> None:
        self.step_of = ampcompile.capture_step(self.step_of, *self.optimizers, warm_up=2)

    def step(self, x: Tensor) -> Tensor:
        return self.step_of(self.model, x)


def halve(grad: Tensor) -> Tensor:
    return grad * 0.5


def move(tensor: Tensor) -> None:
    tensor.data = tensor.detach() * 2 + 1


UNSEEN: dict[str, Any] = {
    "a module's number": lambda program, at: at.setattr(aside, "factor", 3.0),
    "another module's of the same name": lambda program, at: at.setattr(other_aside, "factor", 3.0),
    "a class's number": lambda program, at: at.setattr(Chosen, "scale", 3.0),
    "a number of a module's class": lambda program, at: at.setattr(Block, "bias", 1.0),
    "a method of a module's class": lambda program, at: at.setattr(Block, "forward", lambda self, x: self.linear(x)),
    "torch's class": lambda program, at: at.setattr(nn.LayerNorm, "forward", lambda self, x: x),
    "a global that a method names": lambda program, at: at.setitem(globals(), "SCALE", 3.0),
    "a part of an argument": lambda program, at: setattr(program.model.drop, "p", 1.0),
    "a flag of an argument": lambda program, at: program.model.drop.train(False),
    "a hook where one was": lambda program, at: program.model.linear.weight.register_hook(halve),
    "memory of a weight that none trains": lambda program, at: move(program.teacher.weight),
    "memory of a tensor": lambda program, at: move(program.offset),
}


@pytest.mark.parametrize("change", UNSEEN)
def test_what_changes_where_eager_code_reads_it_is_seen(change: str) -> None:
    captured, one_by_one = Reading("cuda"), Reading("cuda")
    captured.capture()
    for program in captured, one_by_one:
        program.train = program.step
        with pytest.MonkeyPatch.context() as at:
            program.go(range(5))
            UNSEEN[change](program, at)
            program.go(range(5, 9))
    assert all(map(torch.equal, one_by_one.said, captured.said))
    assert all(map(torch.equal, one_by_one.weights(), captured.weights()))
    assert replays_of(captured.step_of) >= 5


def test_a_variable_of_a_script_that_bears_a_methods_name_is_no_change() -> None:
    """The step names `optimizer.step()`, no variable `step`."""
    global step
    program: Any = Reading("cuda")
    program.capture()
    for step in range(6):
        program.step(program.batch(step))
    assert counts(program.step_of) == [(2, 4)]


def read_by_hand(program: Any, loss: Tensor) -> None:
    for param in program.model.parameters():
        program.total.add_(param.grad.sum())
    program.optimizers[0].zero_grad()
    loss.backward()


def add_by_hand(program: Any, loss: Tensor) -> None:
    loss.backward(create_graph=True)


def add_and_forget(program: Any, loss: Tensor) -> None:
    loss.backward()
    program.optimizers[0].zero_grad()


def step_and_forget(program: Any, loss: Tensor) -> None:
    program.optimizers[0].step()
    program.optimizers[0].zero_grad()


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("optim", [torch.optim, ampcompile.optim])
@pytest.mark.parametrize("act", [add_by_hand, add_and_forget, step_and_forget, read_by_hand])
def test_gradients_that_the_step_reads_are_no_forgotten_ones(act: Any, optim: Any) -> None:
    """Of a backward outside of it, which makes others at each call."""
    program: Any = Seventeen("cuda")
    program.optimizers = [optim.SGD(program.model.parameters(), lr=0.1)]
    program.step, program.total = lambda x: act(program, program.loss(x)), torch.zeros((), device="cuda")
    program.capture()
    with pytest.raises(CaptureError, match=r"gradients that aren't those before the capture, .*set_to_none=False"):
        for turn in range(5):
            if act is not add_by_hand:
                program.loss(program.batch(turn)).backward()
            program.train(program.batch(turn))


def test_a_step_of_an_optimizer_of_ours_that_wasnt_given_is_refused() -> None:
    program: Any = MIXTURES["Ours"]("cuda")
    other = ampcompile.optim.SGD([nn.Parameter(torch.zeros(1, device="cuda"))])
    program.train = ampcompile.capture_step(program.step, other, warm_up=2)
    with pytest.raises(CaptureError, match="a step of an optimizer that capture_step wasn't given"):
        program.go(range(3))


def borrowed(tensor: Tensor | None) -> Tensor | None:
    """The same memory, which isn't kept for it."""
    if tensor is None:
        return None
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, tensor.nbytes)
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())


def test_a_planted_fault_is_seen_two_graphs_whose_results_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that the first graph makes, and the second adds to, aren't held: the second makes its own there."""
    around = captured_step._grads_around

    def around_and_let_go(*noted: Any) -> Any:
        before, (params, grads) = around(*noted)
        return before, (params, list(map(borrowed, grads)))

    monkeypatch.setattr(captured_step, "_grads_around", around_and_let_go)
    with pytest.raises(AssertionError):
        train_both(MIXTURES["TwoSizes"])


def pool_of_forms(*sizes: int) -> tuple[int, str]:
    """The bytes of the pool of forms that are captured in this order, and what `repr` says of them."""
    program: Any = MIXTURES["Ours"]("cuda")
    program.capture()
    for rows in sizes:
        for _ in range(3):
            program.train(program.batch(0, rows))
    pool = program.train._graphs._pool
    (said,) = re.findall(r"([\d,]+) bytes of memory for all graphs(.*)", repr(program.train))
    size = sum(each["total_size"] for each in torch.cuda.memory_snapshot(pool))
    assert said[0] == f"{size:,}"
    return size, said[1]


def test_three_forms_share_memory_where_the_largest_comes_first() -> None:
    alone, _ = pool_of_forms(512)
    (shared, no_less), (grown, less) = pool_of_forms(512, 256, 128), pool_of_forms(128, 256, 512)
    assert shared <= 1.3 * alone < grown and no_less == ""
    up_to = re.fullmatch(r", up to ([\d,]+) less if the largest form is called first", less)
    assert up_to is not None and int(up_to[1].replace(",", "")) >= grown - shared


def ready(kind: type[Program]) -> Program:
    program = kind("cuda")
    program.capture()
    program.go(range(4))
    assert program.train.captured
    return program


@programs("Plain", "PlainFp8", "Lora", "LoraFp8", "Sharing")
def test_no_replay_casts_a_weight_where_the_fused_step_is_inside(kind: type[Program]) -> None:
    program = kind("cuda")
    program.capture()
    program.go(range(2))
    with profiled(torch.profiler.ProfilerActivity.CUDA) as names:  # of the capture or its first replay
        program.go(range(2, 3))
    assert not any("amp_cast" in name or "amp_magnitudes" in name for name in names)
    steps = sum("amp_adam" in name and "prepare" not in name for name in names)
    assert steps == (2 if kind is Sharing else 1)
    assert sum("amp_quantize" in name for name in names) == (program.options == FP8)
    casts = weight_stats().casts
    program.go(range(3, 7))
    assert weight_stats().casts == casts


def test_replays_cast_nothing_of_a_second_model_and_that_is_evaluated_without_a_cast() -> None:
    both = [Plain("cuda"), Lora("cuda")]
    for program in both:
        program.capture()
    for turn in range(8):
        for program in both:
            program.go(range(turn, turn + 1))
            program.evaluate(program.run)
        if turn == 3:
            casts = weight_stats().casts
    assert weight_stats().casts == casts


def test_copies_take_two_bytes_a_parameter() -> None:
    gc.collect()
    before = weight_stats().bytes
    program = ready(Plain)
    read = [param for name, param in program.model.named_parameters() if param.dim() > 1]
    assert weight_stats().bytes - before <= 2 * sum(param.numel() for param in program.model.parameters())
    assert weight_stats().bytes - before >= 2 * sum(param.numel() for param in read)


@programs("Plain", "PlainFp8", "Averaged")
def test_a_backward_that_a_replay_comes_before_raises_autograds_error(kind: type[Program]) -> None:
    program = ready(kind)
    x = program.batch(9).requires_grad_()
    pending = program.run(x).square().mean()
    program.train(program.batch(5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pending.backward()


def test_a_backward_of_frozen_weights_may_come_after_a_replay() -> None:
    program = ready(Lora)
    x = program.batch(9).requires_grad_()
    expected = torch.autograd.grad(program.run_base(x).square().mean(), x)[0]
    pending = program.run_base(x).square().mean()
    program.train(program.batch(5))
    assert torch.equal(torch.autograd.grad(pending, x)[0], expected)


def test_forgotten_graphs_leave_no_tables_and_the_step_is_captured_again() -> None:
    program = ready(MIXTURES["Ours"])
    (form,) = program.train._forms.values()
    tables = form.graph.tables
    assert tables
    program.train.forget()
    assert not tables and form.graph is None and not program.train.captured
    program.go(range(4, 8))
    assert program.train.captured


def replace(program: Any) -> None:
    program.base[0].weight = nn.Parameter(torch.randn_like(program.base[0].weight), requires_grad=False)


CHANGES: dict[str, Any] = {
    "frozen": lambda program: program.model[0].weight.requires_grad_(False),
    "thawed": lambda program: program.base[0].bias.requires_grad_(True),
    "moved": lambda program: setattr(program.base[2].weight, "data", program.base[2].weight.detach().clone()),
    "a bias moved": lambda program: setattr(program.base[0].bias, "data", program.base[0].bias.detach().clone()),
    "replaced": replace,
}


@pytest.mark.parametrize("change", CHANGES)
def test_where_what_the_graph_reads_moved_or_was_frozen_or_thawed_it_is_captured_anew(change: str) -> None:
    captured, one_by_one = ready(Lora), Lora("cuda")
    one_by_one.train = one_by_one.step
    one_by_one.go(range(4))
    for program in captured, one_by_one:
        program.go(range(4, 5))
        torch.manual_seed(0)
        CHANGES[change](program)
        gc.collect()
        program.go(range(5, 9))
    assert all(map(torch.equal, one_by_one.said, captured.said))
    assert counts(captured.train) == [(3, 6)]


def test_the_same_lines_run_in_a_replay_of_many_weights_as_of_few() -> None:
    from tests.weights.bindings import lines_of

    class Deep(Program):
        depth = 2

        def net(self, features: int = WIDTH) -> nn.Module:
            return nn.Sequential(*(nn.Linear(features, features) for _ in range(self.depth))).to(self.device)

    def lines(depth: int) -> int:
        Deep.depth = depth
        program = ready(Deep)
        program.go(range(4, 6))
        x = program.batch(6)
        return lines_of(lambda: program.train(x))

    assert lines(10) == lines(74), "20 weights and 148"


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, ampcompile.optim.AdamW])
def test_a_rate_that_is_a_tensor_on_the_cpu_is_refused(kind: Any) -> None:
    program = Plain("cuda")
    program.optimizers = [kind(program.model.parameters(), lr=torch.tensor(1e-2), fused=True)]
    program.capture()
    program.go(range(2))
    with pytest.raises(CaptureError, match=r"found lr of \w+ as a tensor on the cpu, expected one on the GPU"):
        program.go(range(2, 3))


@pytest.fixture
def two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


def test_a_graph_that_reads_weights_on_two_devices_reads_what_they_hold(two_devices: None) -> None:
    """On streams of each device, after updates of one part, of both, and of none."""
    params = [nn.Parameter(torch.randn(24, 16, device=f"cuda:{i}")) for i in (0, 1, 0, 1)]
    binding, other = (bind([torch.bfloat16] * 4) for _ in range(2))
    lanes = [[torch.cuda.Stream(i) for _ in range(2)] for i in (0, 1)]
    for turn in range(12):
        with torch.no_grad():
            for param in params[turn % 3 : 1 + turn % 4]:
                param.mul_(-0.75)
        with contextlib.ExitStack() as here:
            for pair in lanes if turn % 4 else ():
                pair[turn % 2].wait_stream(torch.cuda.current_stream(pair[0].device))
                here.enter_context(torch.cuda.stream(pair[turn % 2]))
            with torch.cuda.device(turn % 2):
                found = [copy.clone() for copy in (other if turn % 5 == 0 else binding).copies(params)]
        for pair in lanes:
            torch.cuda.current_stream(pair[0].device).wait_stream(pair[turn % 2])
        assert all(torch.equal(a, b.detach().bfloat16()) for a, b in zip(found, params, strict=True)), turn
        assert [a.device for a in found] == [b.device for b in params]


@programs("Plain", "PlainFp8", "Averaged")
def test_captured_steps_on_two_devices_train_as_steps_do(two_devices: None, kind: type[Program]) -> None:
    """In turn, while another device is the current one."""
    one_by_one, captured = ([kind(f"cuda:{i}") for i in (0, 1)] for _ in range(2))
    for program in captured:
        program.capture()
    for program in one_by_one:
        program.train = program.step
    for turn in range(8):
        for i, program in enumerate([*one_by_one, *captured]):
            with torch.cuda.device((i + turn) % 2):
                program.go(range(turn, turn + 1))
        for a, b in zip(one_by_one, captured, strict=True):
            assert all(map(torch.equal, a.said, b.said)) and all(map(torch.equal, a.weights(), b.weights())), turn
    assert all(program.train.captured for program in captured)
