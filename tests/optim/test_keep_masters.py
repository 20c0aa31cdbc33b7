"""Steps of 16-bit parameters equal those of float32 masters beside them, through scalers, checkpoints and copies."""

import copy
import functools
import gc
import io
import logging
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.errors import OptimizerError
from ampcompile.kernels import native
from ampcompile.kernels.masters import read_master, write_master
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
kinds = pytest.mark.parametrize("kind", KINDS)


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


def twins(kind: str | Callable[..., Any], how: str = "remainder") -> tuple[Any, Any]:
    """An optimizer that keeps masters, and one of float32 weights."""
    make, narrow = KINDS[kind] if isinstance(kind, str) else kind, parameters()
    return kept(make(narrow), how), make(wide_of(narrow))


def fill(seed: int, *lists: list[nn.Parameter], scale: float = 1.0, bad: float | None = None) -> None:
    """The same gradients for all, each in its parameter's type."""
    generator = torch.Generator().manual_seed(seed)
    for group in zip(*lists, strict=True):
        grad = torch.randn(group[0].shape, generator=generator).bfloat16() * scale
        if bad is not None:
            grad.view(-1)[-1] = bad
        for param in group:
            param.grad = torch.empty_like(param).copy_(grad)


def masters(optimizer: Any) -> list[Tensor]:
    """The float32 weights of its parameters."""
    kept = masters_of(optimizer)
    assert kept is not None
    return [read_master(param.detach(), *kept.kept(optimizer.state[param])) for param in params(optimizer)]


def rounded(weights: list[Tensor], how: str) -> list[Tensor]:
    """Parameters as the reference casts its float32 masters."""
    if how == "float32":
        return [weight.bfloat16() for weight in weights]
    narrow = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in weights]
    for param, weight in zip(narrow, weights, strict=True):
        remainder = torch.empty_like(param, dtype=torch.int16)
        write_master(param, remainder, torch.empty(-(-param.numel() // SPAN)).int(), weight.detach())
    return narrow


def run(optimizer: Any, wide: Any, steps: range, clip: bool = True, found: Any = ampcompile.GradScaler) -> None:
    """Steps of both by scalers, of which one finds an overflow."""
    scalers = scaled(found, init_scale=64.0), scaled(init_scale=64.0)
    for i in steps:
        scale = scalers[0].get_scale()
        assert scale == scalers[1].get_scale()
        fill(i, params(optimizer), params(wide), scale=scale, bad=torch.inf if i % 5 == 2 else None)
        for scaler, each in zip(scalers, (optimizer, wide), strict=True):
            if clip:
                scaler.clip_grad_norm_(each, 1.0)
            scaler.step(each)
            scaler.update()


@kinds
@pytest.mark.parametrize("how", ["remainder", "float32"])
@pytest.mark.parametrize("clip", [False, True])
def test_they_train_as_float32_masters_beside_them_and_go_on_so_from_a_checkpoint(
    kind: str, how: str, clip: bool
) -> None:
    optimizer, wide = twins(kind, how)
    run(optimizer, wide, range(8), clip)
    assert_equal(masters(optimizer), params(wide))
    assert_equal(params(optimizer), rounded(params(wide), how))
    file = io.BytesIO()
    torch.save({"model": params(optimizer), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for order in (("model", "optimizer"), ("optimizer", "model")):
        resumed, beside = kept(KINDS[kind](parameters(1)), how), copy.deepcopy(wide)
        for which in order:
            if which == "optimizer":
                resumed.load_state_dict(copy.deepcopy(saved["optimizer"]))  # torch shares step counts
                continue
            for param, value in zip(params(resumed), saved["model"], strict=True):
                param.data.copy_(value.data)
        assert_equal(masters(resumed), params(wide))
        run(resumed, beside, range(8, 12), clip)
        assert_equal(masters(resumed), params(beside))


@kinds
def test_without_a_scaler_and_with_torchs_it_is_the_same(kind: str) -> None:
    optimizer, wide = twins(kind)
    run(optimizer, wide, range(4), clip=False, found=torch.amp.GradScaler)
    assert_equal(masters(optimizer), params(wide))
    alone, scaler = [kept(KINDS[kind](parameters())) for _ in range(2)], ampcompile.GradScaler("cpu", enabled=False)
    for i in range(4):
        fill(i, *map(params, alone))
        alone[0].step()
        scaler.step(alone[1])
    assert_equal(*map(masters, alone))


@kinds
@pytest.mark.parametrize("how", HOWS)
def test_torchs_own_optimizer_takes_the_step_where_the_kernels_cant(
    kind: str, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ampcompile")
    results = []
    for kernels in (True, False):
        optimizer = kept(KINDS[kind](parameters()), how)
        monkeypatch.setattr(native, "available", lambda *_, kernels=kernels: kernels)
        scaler = scaled(init_scale=8.0)
        for i in range(3):
            fill(i, params(optimizer), scale=8.0, bad=torch.nan if i == 1 else None)
            scaler.step(optimizer)
            scaler.update(8.0)
        results.append((masters(optimizer), optimizer.state[params(optimizer)[0]].keys()))
    assert caplog.text.count("on float32 masters is torch's: no C++ compiler works here") == 1
    if how in ("remainder", "float32"):  # in others a difference in the last bit may round the other way
        assert_close(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_sparse_gradients_and_dampening_are_torchs_too() -> None:
    table = nn.Embedding(7, 3, sparse=True).bfloat16()
    wide = nn.Embedding(7, 3, sparse=True)
    wide.weight.data.copy_(table.weight.data)
    optimizers = [torch.optim.SGD(each.parameters(), 0.001, momentum=0.5, dampening=0.1) for each in (table, wide)]
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


@kinds
@pytest.mark.parametrize("how", HOWS)
def test_copies_and_pickles_step_as_the_optimizer_does(kind: str, how: str) -> None:
    optimizer = kept(KINDS[kind](parameters()), how, seed=5)
    fill(0, params(optimizer))
    optimizer.step()
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for each in (optimizer, *copies):
        fill(1, params(each))
        each.step()
        assert_equal(params(each), params(optimizer))
        assert_equal(masters(each), masters(optimizer))


@kinds
def test_torchs_optimizer_reads_the_saved_state_and_gives_it_back(kind: str) -> None:
    optimizer = KINDS[kind](narrow := parameters())
    handle = ampcompile.keep_masters(optimizer)
    fill(0, narrow)
    optimizer.step()
    plain = KINDS[kind](others := [nn.Parameter(p.detach().clone()) for p in narrow])
    plain.load_state_dict(optimizer.state_dict())
    fill(1, others)
    plain.step()
    assert all(param.isfinite().all() for param in others)
    before = optimizer.state[narrow[0]]["remainder"].clone()
    optimizer.load_state_dict(plain.state_dict())
    assert_equal(masters(optimizer)[:1], [narrow[0].detach().float()]), "what torch made of remainders is none"
    fill(1, narrow)
    optimizer.step()
    assert optimizer.state[narrow[0]]["remainder"].dtype == before.dtype
    handle.remove()
    assert type(optimizer).step is optimizer.step.__func__ and masters_of(optimizer) is None
    assert {value.dtype for name, value in optimizer.state[narrow[0]].items() if name != "step"} == {torch.bfloat16}
    fill(2, narrow)
    optimizer.step()
    assert pickle.loads(pickle.dumps(optimizer)).step.__func__ is type(optimizer).step


@pytest.mark.parametrize("fails", ["a missing group", "another's hook"])
def test_a_load_that_fails_keeps_nothing_of_the_file(fails: str) -> None:
    optimizer = kept(KINDS["AdamW"](parameters()))
    file = {**optimizer.state_dict(), "state": {0: {"exp_avg": torch.zeros(33, 7)}}}
    gone = weakref.ref(file["state"][0]["exp_avg"])
    if fails == "a missing group":
        file["param_groups"] = []
    else:
        optimizer.register_load_state_dict_pre_hook(lambda *_: {}["no such key"])
    with pytest.raises(ValueError if fails == "a missing group" else KeyError):
        optimizer.load_state_dict(file)
    del file
    assert gone() is None and not optimizer.state


def test_state_that_torch_made_goes_on_in_float32() -> None:
    optimizer = torch.optim.AdamW(narrow := parameters(), 0.01)
    fill(0, narrow)
    optimizer.step()
    moments = [optimizer.state[param]["exp_avg"].float() for param in narrow]
    kept(optimizer)
    for param in narrow:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert_close([optimizer.state[param]["exp_avg"] for param in narrow], [0.9 * moment for moment in moments])


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


@pytest.mark.parametrize("first", ["scheduler", "masters"])
@pytest.mark.filterwarnings("error")
def test_schedulers_hooks_and_closures_work_as_ever(first: str) -> None:
    optimizer, seen = torch.optim.SGD(parameters(), 1.0), []
    if first == "scheduler":
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    handle = ampcompile.keep_masters(optimizer)
    if first == "masters":
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> str:
        for param in params(optimizer):
            param.grad = torch.ones_like(param)
        return "loss"

    for lr in (1.0, 0.5):
        before = masters(optimizer) if seen else [p.detach().float() for p in params(optimizer)]
        assert optimizer.step(closure) == "loss"
        assert_equal(masters(optimizer), [weight - lr for weight in before])
        scheduler.step()
    assert seen == ["before", "after"] * 2
    handle.remove()
    optimizer.step()


def test_parameters_of_several_types_and_gradients_of_float32() -> None:
    types, grad_types = (torch.bfloat16, torch.float32, torch.float16), (torch.float32, torch.float32, torch.float16)
    given = [nn.Parameter(torch.randn(50).to(dtype)) for dtype in types]
    given[0].grad_dtype = torch.float32
    wide = wide_of(given)
    optimizer, reference = kept(torch.optim.AdamW(given, 0.01), "float32"), torch.optim.AdamW(wide, 0.01)
    scalers = [scaled(init_scale=4.0) for _ in range(2)]
    for _ in range(3):
        for param, weight, dtype in zip(given, wide, grad_types, strict=True):
            param.grad = torch.randn(50).to(dtype)
            weight.grad = param.grad.float()
        for scaler, each in zip(scalers, (optimizer, reference), strict=True):
            scaler.step(each)
            scaler.update()
    states = [optimizer.state[param] for param in given]
    assert ["master_param" in state for state in states] == [True, False, True]
    assert_equal([states[0]["master_param"], given[1], states[2]["master_param"]], wide)
    assert_equal(given, [weight.to(dtype) for weight, dtype in zip(wide, types, strict=True)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])  # beside parameters of bfloat16 the latter is a copy
def test_a_compiled_model_of_bfloat16_reads_the_parameters_of_the_latest_step(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)).bfloat16()
    options: dict[str, Any] = {"lower": "aot_eager", "dtype": dtype}
    compiled = torch.compile(model, backend="amp", options=options)
    checked = torch.compile(model, backend="amp", options={**options, "weights": "every_call"})
    optimizer, scaler = kept(torch.optim.AdamW(model.parameters(), 1e-4)), ampcompile.GradScaler("cpu", init_scale=8.0)
    x = torch.randn(32, 8).bfloat16()
    losses = []
    for i in range(40):
        loss = (compiled(x).float() - x.float().sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        if i % 2:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
        assert torch.equal(compiled(x), checked(x))
    assert losses[-1] < losses[0]


@pytest.mark.ci
@kinds
def test_hundreds_of_steps_of_random_shapes(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [torch.randint(1, 70, (n,), generator=generator).tolist() for n in (1, 2, 2, 3)]
    narrow = [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in shapes]
    optimizer, wide = kept(KINDS[kind](narrow)), KINDS[kind](wide_of(narrow))
    run(optimizer, wide, range(300))
    assert_equal(masters(optimizer), params(wide))
    assert_equal(narrow, rounded(params(wide), "remainder"))


@pytest.mark.parametrize("by_torch", [False, True])
def test_updates_too_small_for_a_bfloat16_add_up(by_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_torch:
        monkeypatch.setattr(FusedStep, "plan", lambda *_, **__: None)
    moved = {}
    for how in (None, *HOWS):
        param = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([param], 2**-12)
        if how is not None:
            kept(optimizer, how)
        for _ in range(64):
            param.grad = torch.full_like(param, -1.0)
            optimizer.step()
        moved[how] = param.float().mean().item() - 1
    assert moved[None] == 0 and moved["remainder"] == moved["remainder8"] == moved["float32"] == 2**-6
    assert abs(moved["stochastic"] - 2**-6) < 2**-10
    assert param.max() < 1.25, "each step draws anew, or the same numbers would be rounded up 64 times"


@pytest.mark.parametrize("by_torch", [False, True])
def test_updates_too_small_for_24_bits_are_right_on_average_and_independent(
    by_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_torch:
        monkeypatch.setattr(FusedStep, "plan", lambda *_, **__: None)
    param = nn.Parameter(torch.full((64, 64), 1.5).bfloat16())
    optimizer, wide = ampcompile.optim.SGD([param], 1.5e-6, masters="remainder8", seed=3), torch.tensor(1.5)
    for _ in range(1000):
        param.grad = -torch.ones_like(param)
        optimizer.step()
        wide += 1.5e-6
    (moved,), ulp = [weight - 1.5 for weight in masters(optimizer)], 2.0**-15
    assert moved.mean().item() == pytest.approx(wide.item() - 1.5, rel=0.02)
    share = (wide.item() - 1.5) / 1000 / ulp
    assert (moved / ulp).std().item() == pytest.approx((1000 * share * (1 - share)) ** 0.5, rel=0.05)
    assert optimizer.state[param]["step"] == 1000


@functools.cache
def keeper() -> Any:
    return kept(KINDS["AdamW"](parameters()))


IMPOSSIBLE = [
    (lambda: KINDS["SGD"](parameters()), "half", "expected one of 'remainder', 'remainder8', 'float32', 'stochastic'"),
    (lambda: torch.optim.RMSprop(parameters()), "remainder", "of type RMSprop; expected torch's SGD, Adam or AdamW"),
    (lambda: torch.optim.Adam(parameters(), differentiable=True), "remainder", "found differentiable=True"),
    (lambda: KINDS["SGD"](parameters(dtype=torch.float32)), "remainder", "found no 16-bit parameter"),
    (lambda: KINDS["SGD"](parameters(dtype=torch.float16)), "remainder", "of torch.float16 with how='remainder'"),
    (lambda: KINDS["SGD"](parameters()), None, "found how=None with float32 states; expected masters or states="),
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


@pytest.mark.parametrize("by", ["scaler", "optimizer"])
def test_a_clipped_step_by_torch_rounds_no_gradient(by: str) -> None:
    """A first step with dampening is torch's."""
    optimizers = twins(lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, dampening=0.5), "float32")
    scaler = ampcompile.GradScaler("cpu", init_scale=16.0, enabled=by == "scaler")
    scaler.scale(torch.ones(()))
    for step in range(3):
        fill(step, params(optimizers[0]), scale=16.0 if by == "scaler" else 1.0)
        fill(step, params(optimizers[1]))
        scaler.clip_grad_norm_(optimizers[0], 1.0)
        nn.utils.clip_grad_norm_(params(optimizers[1]), 1.0)
        scaler.step(optimizers[0]) if by == "scaler" else optimizers[0].step()
        scaler.update()
        optimizers[1].step()
        buffers = [[o.state[p]["momentum_buffer"] for p in params(o)] for o in optimizers]
        assert_close(*buffers)


def test_parameters_that_join_later_are_kept_or_refused() -> None:
    optimizer = kept(KINDS["SGD"](parameters()))
    optimizer.add_param_group({"params": [late := nn.Parameter(torch.ones(3).bfloat16())]})
    late.grad = torch.ones_like(late)
    optimizer.step()
    assert optimizer.state[late]["remainder"].any()
    optimizer.add_param_group({"params": [half := nn.Parameter(torch.ones(3).half())]})
    half.grad = torch.ones_like(half)
    with pytest.raises(OptimizerError, match="float16 with how='remainder'"):
        optimizer.step()
    assert half.eq(1).all()
