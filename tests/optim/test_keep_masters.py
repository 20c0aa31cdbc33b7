"""What masters are made of, and of whom; that steps have their bits, in whatever loop, `test_machine.py` sees."""

import copy
import gc
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.errors import OptimizerError
from ampcompile.kernels.masters import read_master
from ampcompile.kernels.tables import SPAN
from ampcompile.optim.fused_step import FusedStep
from ampcompile.optim.masters import STATES, masters_of
from ampcompile.optim.plan import NotFusedError
from tests.pairs import pairs
from tests.scaler.cases import assert_close, assert_equal, params, scaled

SHAPES = ((33, 7), (128,), (1,), (5, 1025), (2, 3, 4, 2))
KINDS: dict[str, Callable[..., Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adam": lambda params: torch.optim.Adam(params, 0.01, weight_decay=0.1, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
}
HOWS = ("remainder", "remainder8", "float32", "stochastic")


def parameters(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    params[-1].data = params[-1].data.contiguous(memory_format=torch.channels_last)
    return params


def wide_of(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().float()) for p in params]


def kept(optimizer: Any, how: str = "remainder", **options: Any) -> Any:
    """The optimizer, which keeps masters from now on."""
    ampcompile.keep_masters(optimizer, how, **options)
    return optimizer


def fill(seed: int, *lists: list[nn.Parameter], scale: float = 1.0) -> None:
    """The same gradients for all, each in its parameter's type."""
    generator = torch.Generator().manual_seed(seed)
    for group in zip(*lists, strict=True):
        grad = torch.randn(group[0].shape, generator=generator).bfloat16() * scale
        for param in group:
            param.grad = torch.empty_like(param).copy_(grad)


def masters(optimizer: Any) -> list[Tensor]:
    """The float32 weights of its parameters."""
    kept = masters_of(optimizer)
    assert kept is not None
    return [read_master(param.detach(), *kept.kept(optimizer.state[param])) for param in params(optimizer)]


def test_steps_on_sparse_gradients_are_torchs() -> None:
    table = nn.Embedding(7, 3, sparse=True).bfloat16()
    wide = nn.Embedding(7, 3, sparse=True)
    wide.weight.data.copy_(table.weight.data)
    optimizers = [torch.optim.SGD(each.parameters(), 0.001, momentum=0.5) for each in (table, wide)]
    kept(optimizers[0])
    for _ in range(3):
        for each, optimizer in zip((table, wide), optimizers, strict=True):
            optimizer.zero_grad()
            each(torch.tensor([1, 2, 2])).sum().backward()
            optimizer.step()
    assert_equal(masters(optimizers[0]), [wide.weight.detach()])


WRITERS: dict[str, Callable[[nn.Parameter], Any]] = {
    "data": lambda p: p.data.mul_(1.5),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).mul_(1.5),
    "load_state_dict": lambda p: nn.Module.load_state_dict(as_module(p), {"p": p.detach() * 1.5}),
    "copy_": lambda p: torch.no_grad()(p.copy_)(p * 1.5),
    "set data": lambda p: setattr(p, "data", p.data * 1.5),
}


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("how", ["remainder", "float32"])
def test_what_anyone_writes_counts_as_it_is_and_the_same_bits_change_nothing(how: str, write: str) -> None:
    optimizer = kept(KINDS["AdamW"](narrow := parameters()), how)
    fill(0, narrow)
    optimizer.step()
    before, averaged = masters(optimizer), [param.detach().clone() for param in narrow]
    for param, value in zip(narrow, averaged, strict=True):  # as an evaluation of averaged weights does
        param.data.mul_(0.5)
        param.data.copy_(value)
    assert_equal(masters(optimizer), before)
    for param in narrow:
        WRITERS[write](param)
    assert_equal(masters(optimizer), [param.detach().float() for param in narrow])
    wide = KINDS["AdamW"](weights := wide_of(narrow))
    wide.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    fill(1, narrow, weights)
    optimizer.step()
    ampcompile.GradScaler(enabled=False).step(wide)
    assert_equal(masters(optimizer), weights)


def as_module(param: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.p = param
    return module


@pytest.mark.parametrize("by_torch", [False, True])
def test_state_that_torch_made_goes_on_in_float32(by_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.AdamW(narrow := parameters(), 0.01)
    fill(0, narrow)
    optimizer.step()
    moments = [optimizer.state[param]["exp_avg"].float() for param in narrow]
    monkeypatch.setattr(FusedStep, "plan", (lambda *_, **__: None) if by_torch else FusedStep.plan)
    kept(optimizer)
    for param in narrow:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert_close([optimizer.state[param]["exp_avg"] for param in narrow], [0.9 * moment for moment in moments])
    assert by_torch or "step: fused" in str(optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_optimizer_of_16_bits_reads_a_file_and_ours_reads_its(kind: str) -> None:
    optimizer = kept(KINDS[kind](narrow := parameters()))
    fill(0, narrow)
    optimizer.step()
    plain = KINDS[kind](others := [nn.Parameter(p.detach().clone()) for p in narrow])
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    fill(1, others, narrow)
    plain.step()
    assert all(param.isfinite().all() for param in others)
    optimizer.load_state_dict(plain.state_dict())
    assert_equal(masters(optimizer), [param.detach().float() for param in narrow]), "torch has rounded the masters"
    optimizer.step()
    types = {name: value.dtype for name, value in optimizer.state[narrow[0]].items() if value is not None}
    assert types.pop("remainder") == torch.int16 and {*types.values()} == {torch.int32, torch.float32}


def test_a_master_that_was_loaded_becomes_remainders_of_the_parameters_that_are_there_or_come_later() -> None:
    optimizer = torch.optim.SGD([param := nn.Parameter(torch.ones(26, 10).t().bfloat16())], 0.1)
    ampcompile.keep_masters(optimizer)
    kept, master = masters_of(optimizer), torch.randn(26, 10).t()
    assert kept is not None
    master[:4, 0] = torch.tensor([-1e-45, 1 + 2**-8, torch.inf, 1 + 2**-8])
    param.data.copy_(master)
    param.data[:2, 0] = torch.tensor([0.0, 1 + 2**-7])  # another zero, and the tie as remainders round it
    loaded = param.detach().clone()
    param.data[:, 13:] *= 1.5
    before = param.detach().clone()
    state = optimizer.state[param] = {"master_param": master.clone()}
    kept.prepare(optimizer, [param])
    assert state.keys() == {*STATES["remainder"], "step"} and state["remainder"].stride() == param.stride()
    master[0, 0], master[3, 0] = 0.0, 1.0  # as the parameters are; the other tie, as torch rounds it
    assert_equal(masters(optimizer), [torch.where(torch.arange(260).view(26, 10).t() < SPAN, master, before.float())])
    assert_equal([param.detach()], [before])
    param.data.copy_(loaded)
    assert_equal(masters(optimizer), [master])
    state["remainder"] = torch.stack([state["remainder"]] * 2, -1)[..., 0]
    with pytest.raises(NotFusedError, match="strides"):
        kept.prepare(optimizer, [param])


WAYS = [*HOWS, "remainder, torch's class", "remainder, torch's step", "float32, torch's step", "none", "none, float32"]


def read(param: Tensor, state: dict[str, Any]) -> Tensor:
    beside = [state[name] for name in ("remainder", "master_param") if state.get(name) is not None]
    return read_master(param.detach(), *beside, state.get("checksums")) if beside else param.detach().float()


@pytest.mark.filterwarnings("ignore:found bfloat16 parameters")
@pytest.mark.parametrize("ways", pairs(WAYS, WAYS, WAYS))
def test_no_former_way_stays_in_the_state_where_it_would_win_at_a_later_load(ways: tuple[str, ...]) -> None:
    """A training goes on from file to file, each time in another way."""
    start, file, master, before = torch.linspace(1, 1.9, 256).view(16, 16), None, None, "none"
    for way in ways:
        how, _, detail = way.partition(", ")
        param = nn.Parameter(start.to(torch.float32 if detail == "float32" else torch.bfloat16))
        if detail == "torch's class":
            optimizer = kept(torch.optim.SGD([param], 1e-4, momentum=0.1), how)
        else:
            masters = {} if how == "none" else {"masters": how}
            optimizer = ampcompile.optim.SGD([param], 1e-4, momentum=0.1, **masters)
        if file is not None:
            optimizer.load_state_dict(file)
        state = optimizer.state[param]
        for _ in range(5):
            state.get("momentum_buffer", param.new_zeros(())).zero_()
            param.grad = torch.full_like(param, -1.0)
            if detail == "torch's step":
                param.grad = param.grad.t()
            optimizer.step()
        assert state.keys() - {"step"} == {"momentum_buffer", *STATES.get(how, ())}
        if {how, before} <= {"remainder", "remainder8", "float32"}:
            bits = 15 if "remainder8" in (how, before) else 23
            torch.testing.assert_close(read(param, state), master + 5e-4, rtol=4 * 2.0**-bits, atol=0)
        start, file, before = param.detach(), copy.deepcopy(optimizer.state_dict()), "" if how == "none" else how
        master = read(start, state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])  # beside parameters of bfloat16 the latter is a copy
def test_a_compiled_model_of_bfloat16_reads_the_parameters_of_the_latest_step(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)).bfloat16()
    options: dict[str, Any] = {"lower": "aot_eager", "dtype": dtype}
    compiled = torch.compile(model, backend="amp", options=options)
    checked = torch.compile(model, backend="amp", options={**options, "weights": "every_call"})
    optimizer, scaler, x = kept(torch.optim.AdamW(model.parameters(), 0.1)), scaled(), torch.randn(32, 8).bfloat16()
    for i in range(6):
        before = compiled(x)
        scaler.scale(before.float().square().mean()).backward()
        if i % 2:
            scaler.unscale_(optimizer)
        (optimizer.step if i % 2 else partial(scaler.step, optimizer))()
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(compiled(x), checked(x)) and not torch.equal(compiled(x), before)


@pytest.mark.parametrize("by_torch", [False, True])
def test_small_updates_add_up_and_what_is_rounded_at_random_is_right_on_average(
    by_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those too small for a bfloat16 and, of `remainder8`, for 24 bits."""
    if by_torch:
        monkeypatch.setattr(FusedStep, "plan", lambda *_, **__: None)
    moved = {}
    for how in HOWS:
        held = [nn.Parameter(torch.ones(1000).bfloat16()) for _ in range(2)]
        optimizer = ampcompile.optim.SGD(held, 2**-12, masters=how)
        for _ in range(64):
            for param in held:
                param.grad = torch.full_like(param, -1.0)
            optimizer.step()
        moved[how] = held[0].float().mean().item() - 1
        assert held[0].max() < 1.25, "each step draws anew, or the same numbers would be rounded up 64 times"
        assert torch.equal(*held) == (how != "stochastic"), "and so does each parameter"
    assert moved["remainder"] == moved["remainder8"] == moved["float32"] == 2**-6
    assert abs(moved["stochastic"] - 2**-6) < 2**-10
    param = nn.Parameter(torch.full((64, 64), 1.5).bfloat16())
    optimizer, wide = ampcompile.optim.SGD([param], 1.5e-6, masters="remainder8", seed=3), torch.tensor(1.5)
    for _ in range(1000):
        param.grad = -torch.ones_like(param)
        optimizer.step()
        wide += 1.5e-6
    (weight,), ulp, share = masters(optimizer), 2.0**-15, (wide.item() - 1.5) / 1000 / 2.0**-15
    assert (weight - 1.5).mean().item() == pytest.approx(wide.item() - 1.5, rel=0.02)
    assert (weight / ulp).std().item() == pytest.approx((1000 * share * (1 - share)) ** 0.5, rel=0.05)
    assert optimizer.state[param]["step"] == 1000


@cache
def keeper() -> Any:
    return kept(KINDS["AdamW"](parameters()))


IMPOSSIBLE = [
    (lambda: KINDS["SGD"](parameters()), "half", "expected one of 'remainder', 'remainder8', 'float32', 'stochastic'"),
    (lambda: torch.optim.RMSprop(parameters()), "remainder", "of type RMSprop; expected torch's SGD, Adam or AdamW"),
    (lambda: torch.optim.Adam(parameters(), differentiable=True), "remainder", "found differentiable=True"),
    (lambda: KINDS["SGD"](parameters(dtype=torch.float32)), "remainder", "found no 16-bit parameter"),
    (lambda: KINDS["SGD"](parameters(dtype=torch.float16)), "remainder", "of torch.float16 with how='remainder'"),
    (lambda: KINDS["SGD"](parameters()), None, "found how=None with float32 states; expected masters or states="),
    (
        lambda: ampcompile.optim.SGD(parameters(), masters="float32"),
        "remainder",
        "those of ampcompile.optim take masters=",
    ),
    (keeper, "remainder", "keeps masters already"),
    (
        lambda: KINDS["SGD"](params(keeper())),
        "float32",
        r"AdamW with how='remainder' and SGD with how='float32'; expected one way",
    ),
]


@pytest.mark.parametrize(("make", "how", "text"), IMPOSSIBLE)
def test_what_is_impossible_is_refused(make: Callable[[], Any], how: Any, text: str) -> None:
    with pytest.raises(OptimizerError, match=text):
        kept(make(), how)


@pytest.mark.parametrize("seed", ["a", 1.5, None, 2**70])
def test_a_seed_is_an_integer_of_64_bits(seed: Any) -> None:
    with pytest.raises(OptimizerError, match="expected an integer of 64 bits"):
        kept(KINDS["SGD"](parameters()), "stochastic", seed=seed)
    with pytest.raises(OptimizerError, match="expected an integer of 64 bits"):
        ampcompile.optim.AdamW(parameters(), masters="stochastic", seed=seed)


def test_what_is_gone_says_so() -> None:
    optimizer = KINDS["SGD"](parameters())
    handle = ampcompile.keep_masters(optimizer)
    handle.remove()
    with pytest.raises(OptimizerError, match=r"found masters that were removed, expected .*: call keep_masters"):
        handle.remove()
    handle = ampcompile.keep_masters(optimizer)
    del optimizer
    gc.collect()
    with pytest.raises(
        OptimizerError, match=r"found a step whose optimizer was deleted, expected .*: hold the optimizer"
    ):
        handle.remove()


@pytest.mark.parametrize("how", ["remainder", "float32"])
def test_a_parameter_of_two_optimizers_has_one_master(how: str) -> None:
    weights = wide_of(narrow := parameters())
    pair = [kept(torch.optim.SGD(narrow, lr), how) for lr in (1e-3, 2e-3)]
    wides = [torch.optim.SGD(weights, lr) for lr in (1e-3, 2e-3)]
    for step in range(12):
        if step == 6:
            for i, optimizer in enumerate(pair):
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                if how == "float32" and i:  # into one alone, as its whole
                    pair[0].state[narrow[0]].clear()
        fill(step, narrow, weights)
        for optimizer, wide in zip(pair, wides, strict=True):
            optimizer.step()
            wide.step()
        for optimizer in pair:
            assert_equal(masters(optimizer), weights)


@pytest.mark.parametrize("scale", [1.0, 16.0])
def test_a_clipped_step_by_torch_rounds_no_gradient(scale: float) -> None:
    """A first step with dampening is torch's."""
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)
    narrow, wide = kept(make(parameters()), "float32"), make(wide_of(parameters()))
    scaler = scaled(init_scale=scale, enabled=scale > 1)
    for step in range(3):
        fill(step, params(narrow), scale=scale)
        fill(step, params(wide))
        scaler.clip_grad_norm_(narrow, 1.0)
        nn.utils.clip_grad_norm_(params(wide), 1.0)
        scaler.step(narrow)
        scaler.update()
        wide.step()
        assert_close(*[[each.state[p]["momentum_buffer"] for p in params(each)] for each in (narrow, wide)])


def test_a_parameter_that_joins_later_is_refused_by_the_same_rules() -> None:
    optimizer = kept(KINDS["SGD"](parameters()))
    optimizer.add_param_group({"params": [half := nn.Parameter(torch.ones(3).half())]})
    half.grad = torch.ones_like(half)
    with pytest.raises(OptimizerError, match="float16 with how='remainder'"):
        optimizer.step()
    assert half.eq(1).all()
