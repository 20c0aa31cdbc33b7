"""`states=`: what the optimizer holds, saves and loads; and that all else of the step goes on."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ampcompile
from ampcompile.errors import OptimizerError
from ampcompile.kernels.states import blocks_of
from ampcompile.optim.states import SCALES

HOWS = ["bfloat16", "8bit"]
MASTERS = [None, "remainder", "remainder8", "float32", "stochastic"]
KINDS: dict[str, Any] = {
    "AdamW": (ampcompile.optim.AdamW, torch.optim.AdamW, {"lr": 1e-3}),
    "Adam": (ampcompile.optim.Adam, torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.1}),
    "SGD": (ampcompile.optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.995, "nesterov": True}),
}


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 67), nn.Linear(67, 128)).to(dtype)


def made(kind: str, how: str, masters: str | None = None, **more: Any) -> tuple[nn.Module, Any]:
    model = network(torch.float32 if masters is None else torch.bfloat16)
    ours, _, settings = KINDS[kind]
    return model, ours(model.parameters(), states=how, masters=masters, **settings, **more)


def train(model: nn.Module, optimizer: Any, steps: int, seed: int = 0, scaler: Any = None, clip: bool = False) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 128, generator=generator)
        optimizer.zero_grad()
        loss = (model(x.to(next(model.parameters()).dtype)).float() - x.flip(1)).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if clip and scaler is not None:
            scaler.clip_grad_norm_(optimizer, 0.1)
        elif clip:
            optimizer.clip_grad_norm_(0.1)
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()


def everything(model: nn.Module, optimizer: Any) -> list[Tensor]:
    states = [state[name] for state in optimizer.state.values() for name in sorted(state)]
    return [*model.parameters(), *(value for value in states if isinstance(value, Tensor))]


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_run_that_is_resumed_or_copied_has_the_bits_of_the_whole_one(kind: str, how: str, masters: Any) -> None:
    model, optimizer = made(kind, how, masters)
    train(model, optimizer, 3)
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    held = everything(model, optimizer)
    for other in copies:
        assert_same(everything(*other), held)
    resumed, loaded = made(kind, how, masters)
    resumed.load_state_dict(weights)
    loaded.load_state_dict(saved)
    assert [v.dtype for v in everything(resumed, loaded)] == [v.dtype for v in held]
    for one in (*copies, (resumed, loaded), (model, optimizer)):
        train(*one, 3, seed=5)
    for one in (*copies, (resumed, loaded), (model, optimizer)):
        assert_same(list(one[0].parameters()), list(model.parameters()))
        assert "step: fused" in str(one[1])


@pytest.mark.parametrize("how", ["float32", *HOWS])
@pytest.mark.parametrize("kind", KINDS)
def test_files_are_those_of_torchs_class_and_go_both_ways(kind: str, how: str) -> None:
    model, optimizer = made(kind, how)
    train(model, optimizer, 3)
    saved = optimizer.state_dict()
    plain = KINDS[kind][1](model.parameters(), **KINDS[kind][2])
    plain.load_state_dict(copy.deepcopy(saved))
    names = {"momentum_buffer"} if kind == "SGD" else {"exp_avg", "exp_avg_sq", "step"}
    for param in model.parameters():
        state = plain.state[param]
        assert names <= state.keys() <= names | {"step"}
        assert all(value.dtype == torch.float32 for value in state.values())
        assert all(state[name].shape == param.shape for name in names - {"step"})
    _, other = made(kind, how)
    other.load_state_dict(plain.state_dict())
    for name, value in other.state_dict()["state"][0].items():
        assert torch.equal(value, saved["state"][0][name]), name


def test_what_is_held_is_what_is_printed() -> None:
    model, optimizer = made("AdamW", "8bit")
    train(model, optimizer, 1)
    first = optimizer.state[model[0].weight]
    assert {name: (v.dtype, v.numel()) for name, v in first.items()} == {
        "step": (torch.float32, 1),
        SCALES: (torch.float32, 2 * blocks_of(64, 128)),
        "exp_avg_codes": (torch.int8, 64 * 128),
        "exp_avg_sq_codes": (torch.uint8, 64 * 128),
    }
    with pytest.raises(KeyError):
        first["exp_avg"]
    held = sum(v.nbytes for state in optimizer.state.values() for name, v in state.items() if name != "step")
    bytes_each = held / sum(p.numel() for p in model.parameters())
    assert f"states: 8bit, {bytes_each:.2f} bytes a parameter; " in str(optimizer)
    assert "float32 for 3 parameters of fewer than two dimensions" in str(optimizer)
    weights = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((256, 512), (128, 300))]
    optimizer = ampcompile.optim.AdamW(weights, states="8bit", masters="remainder8")
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    tensors = [*weights, *(weight.grad for weight in weights), *(value for value in states if value is not None)]
    held = sum(tensor.nbytes for tensor in tensors) / sum(map(torch.numel, weights))
    assert f"held: {held:.2f} bytes a parameter, its gradient too" in str(optimizer) and 7.1 < held < 7.3


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((5000,), "of fewer than two dimensions"),
        ((63, 65), "of fewer than 4,096 numbers"),
        ((200, 31), "with rows of fewer than 32"),
        ((64, 3, 3, 8), None),
    ],
)
def test_which_parameters_stay_float32(shape: tuple[int, ...], reason: str | None) -> None:
    param = nn.Parameter(torch.randn(shape))
    optimizer = ampcompile.optim.Adam([param], states="8bit")
    assert (f"float32 for 1 parameters {reason}" if reason else "2.") in str(optimizer)
    param.grad = torch.randn(shape)
    optimizer.step()
    assert ("exp_avg" in optimizer.state[param]) == (reason is not None)
    turned = nn.Parameter(torch.randn(90, 80).t())
    assert "first dimension isn't outermost" in str(ampcompile.optim.Adam([turned], states="8bit"))


@pytest.mark.parametrize(("how", "masters"), [("8bit", None), ("bfloat16", None), ("8bit", "remainder")])
@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_an_optimizer_of_torchs_gets_coded_states_and_gives_them_back(kind: str, how: str, masters: Any) -> None:
    """Begun by torch's class: what it has is coded to nearest. Given back, it has what files have, and goes on."""
    model, ours = made(kind, how, masters, seed=3)
    other = copy.deepcopy(model)
    _, torchs, settings = KINDS[kind]
    exchanged = torchs(other.parameters(), **settings)
    if masters is None:
        begun = torchs(model.parameters(), **settings)
        train(model, begun, 1)
        train(other, exchanged, 1)
        ours.load_state_dict(begun.state_dict())
    handle = ampcompile.keep_masters(exchanged, masters, states=how, seed=3)
    for one in ((model, ours), (other, exchanged)):
        train(*one, 2)
    assert_same(list(other.parameters()), list(model.parameters()))
    assert f"states: {how}, " in str(exchanged)
    with pytest.raises(OptimizerError, match="found an optimizer whose states are coded"):
        ampcompile.keep_masters(exchanged, None, states=how)
    copied = pickle.loads(pickle.dumps(exchanged))
    saved = exchanged.state_dict()
    handle.remove()
    assert type(exchanged) is torchs and copied.state_dict().keys() == saved.keys()
    for number, param in enumerate(other.parameters()):
        state = {name: v for name, v in saved["state"][number].items() if name != "master_param"}
        assert exchanged.state[param].keys() == state.keys()
        assert all(
            torch.equal(exchanged.state[param][k], v if k == "step" else v.to(param.dtype)) for k, v in state.items()
        )
    train(other, exchanged, 1)
    with pytest.raises(OptimizerError, match="found masters that were removed"):
        handle.remove()


PATTERNS = {"0.*": "float32", "2.weight": "8bit", "*weight": "bfloat16"}


@pytest.mark.parametrize("by", ["torch's names", "names=", "keep_masters"])
def test_patterns_of_names_choose(by: str) -> None:
    """The first that fits; others are float32. Wrappers add nothing to a name."""
    model = network()
    wrapped = torch.compile(model, backend="eager")
    if by == "torch's names":
        optimizer = ampcompile.optim.Adam(wrapped.named_parameters(), states=PATTERNS)
    elif by == "names=":
        optimizer = ampcompile.optim.Adam(model.parameters(), states=PATTERNS, names=wrapped)
    else:
        optimizer = torch.optim.Adam(model.parameters())
        ampcompile.keep_masters(optimizer, None, states=PATTERNS, names=wrapped)
    train(model, optimizer, 2)
    again = copy.deepcopy((model, optimizer))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    for tensors, of in ((model, optimizer), again, pickle.loads(pickle.dumps(again))):
        train(tensors, of, 1, seed=5)
        types = {
            name: next(v.dtype for key, v in of.state[p].items() if key.startswith("exp_avg"))
            for name, p in tensors.named_parameters()
        }
        weights = {"0.weight": torch.float32, "2.weight": torch.int8, "3.weight": torch.bfloat16}
        assert types == dict.fromkeys(types, torch.float32) | weights
        assert_same(list(tensors.parameters()), list(model.parameters()))
        assert "states: float32 and 8bit and bfloat16, " in str(
            of
        ) and "float32 for 4 parameters by their names" in str(of)


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_a_rebuilt_optimizer_and_later_groups_have_the_same_states(kind: str) -> None:
    model = network(torch.bfloat16)
    settings = {"states": {"*weight": "8bit"}, "masters": "remainder", "seed": 4}
    optimizer = KINDS[kind][0](model[0].named_parameters(), **KINDS[kind][2], **settings)
    late = [("late.weight", nn.Parameter(torch.randn(64, 128).bfloat16()))]
    optimizer.add_param_group({"params": late, "masters": "remainder"})
    assert "float32 for 1 parameters by their names" in str(optimizer)
    assert not settings.keys() & {name for group in optimizer.param_groups for name in group}, "torch looks for them"
    rebuilt = type(optimizer)(optimizer.param_groups, **optimizer.defaults)
    assert str(rebuilt) == str(optimizer)
    for value in ({"states": "float32"}, {"masters": "float32"}, {"seed": 1}):
        group = {"params": [("more", nn.Parameter(torch.zeros(3).bfloat16()))], **value}
        with pytest.raises(OptimizerError, match=r"in a parameter group, expected .*, as its optimizer has"):
            optimizer.add_param_group(group)
        with pytest.raises(OptimizerError, match="in a parameter group"):
            KINDS[kind][0]([group], **KINDS[kind][2], **settings)
        with pytest.raises(OptimizerError, match="in a parameter group"):
            ampcompile.keep_masters(KINDS[kind][1]([group], **KINDS[kind][2]), **({"states": "bfloat16"} | {"seed": 2}))
    assert len(optimizer.param_groups) == 2


def test_flat_parameters_of_fsdp1_stay_float32_with_a_warning() -> None:
    flat = [nn.Parameter(torch.zeros(5000)) for _ in range(2)]
    for param in flat:
        param._fsdp_flattened = True
    with pytest.warns(ampcompile.AmpWarning, match="FSDP1's flat parameters .* stay float32") as told:
        ampcompile.optim.Adam(flat, states={"*": "8bit"}, names=nn.ParameterList(flat))
    assert len(told) == 1


@pytest.mark.parametrize("masters", [None, "remainder8"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_scalers_clip_and_skip(kind: str, how: str, masters: Any) -> None:
    """A scale is a power of two, so nothing is rounded otherwise. A skipped step changes no byte."""
    model, optimizer = made(kind, how, masters)
    train(model, optimizer, 3, clip=True)
    scaled, other = made(kind, how, masters)
    scaler = ampcompile.GradScaler("cpu")
    train(scaled, other, 3, scaler=scaler, clip=True)
    assert_same(everything(scaled, other), everything(model, optimizer))
    before = copy.deepcopy(everything(scaled, other))
    for param in scaled.parameters():
        param.grad = torch.full_like(param, math.inf)
    scaler.scale(torch.ones(()))
    scaler.step(other)
    assert_same(everything(scaled, other), before)


@pytest.mark.parametrize("masters", [None, "remainder", "remainder8"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_steps_of_torchs_decode_and_code(kind: str, how: str, masters: Any) -> None:
    """As kernels do, up to what torch rounds otherwise: here gradients have strides that the kernels don't take."""
    runs = [made(kind, how, masters) for _ in range(2)]
    for model, optimizer in runs:
        train(model, optimizer, 2)
        for i, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(i)
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype) * 1e-2
    odd = runs[1][0][0].weight
    odd.grad = odd.grad.t().contiguous().t()
    for _, optimizer in runs:
        optimizer.step()
    assert "step: fused" not in str(runs[1][1]) and "step: fused" in str(runs[0][1])
    if masters == "remainder8":
        weights = ([each["master_param"] for each in run[1].state_dict()["state"].values()] for run in runs)
        torch.testing.assert_close(*weights, rtol=2e-4, atol=1e-6)
        for state in (state for run in runs for state in run[1].state.values()):
            del state["remainder"]
    for mine, torchs in zip(*(everything(*run) for run in runs), strict=True):
        if mine.dtype == torch.float32:
            torch.testing.assert_close(torchs, mine, rtol=1e-4, atol=1e-6)
        elif not mine.dtype.is_floating_point and mine.dtype in (torch.int8, torch.uint8):
            assert ((mine.int() - torchs.int()).abs() <= 1).all() and (mine == torchs).float().mean() > 0.99


def test_the_first_step_with_dampening_is_torchs() -> None:
    model = network()
    optimizer = ampcompile.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.5, states="8bit")
    plain = network()
    exact = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9, dampening=0.5)
    for one in ((model, optimizer), (plain, exact)):
        train(*one, 2)
    assert "momentum_buffer_codes" in optimizer.state[model[0].weight]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)


@pytest.mark.parametrize("how", HOWS)
def test_seeds_differ_and_parameters_train_as_with_float32(how: str) -> None:
    (model, optimizer), (other, second), (plain, exact) = (
        made("AdamW", how),
        made("AdamW", how, seed=1),
        made("AdamW", "float32"),
    )
    for one in ((model, optimizer), (other, second), (plain, exact)):
        train(*one, 30)
    assert not torch.equal(model[0].weight, other[0].weight)
    start = network()[0].weight
    for trained in (model, other):
        error = (trained[0].weight - plain[0].weight).norm() / (plain[0].weight - start).norm()
        assert error < 0.05


def test_other_files_are_refused_and_nothing_changes() -> None:
    model, optimizer = made("AdamW", "8bit")
    train(model, optimizer, 2)
    before, good = copy.deepcopy(everything(model, optimizer)), optimizer.state_dict()

    def refused(message: str, **states: Any) -> None:
        file = copy.deepcopy(good)
        file["state"][0] = {"step": torch.ones(()), **states}
        with pytest.raises(OptimizerError, match=message):
            optimizer.load_state_dict(file)
        assert_same(everything(model, optimizer), before)

    refused(r"found the states 'state1', 'qmap1' for parameter 0", state1=torch.zeros(4), qmap1=torch.zeros(4))
    flattened: dict[str, Any] = {name: {} for name in optimizer.state[model[0].weight] if name != "step"}
    refused("found flatten_optimizer_state_dict for coded states of plain tensors", **flattened)
    refused(r"found 'exp_avg' of shape \(3,\) for parameter 0 .* expected \(64, 128\)", exp_avg=torch.zeros(3))
    largest = copy.deepcopy(good)
    largest["param_groups"][0]["amsgrad"] = True
    with pytest.raises(OptimizerError, match="found amsgrad=True"):
        optimizer.load_state_dict(largest)
    renamed = copy.deepcopy(good)
    renamed["state"][0]["mean"] = renamed["state"][0].pop("exp_avg")
    handle = optimizer.register_load_state_dict_pre_hook(
        lambda _, file: {**file, "state": {**file["state"], 0: {**good["state"][0]}}}
    )
    optimizer.load_state_dict(renamed)  # a user's hook, which mends the names, comes before ours
    handle.remove()
    assert_same(everything(model, optimizer), before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"states": "4bit"}, "found states='4bit'; expected one of 'float32', 'bfloat16', '8bit'"),
        ({"states": None}, "found states=None"),
        ({"states": {"*": "4bit"}}, r"found states={'\*': '4bit'}; expected one of .* by names of parameters"),
        ({"states": {"*": "8bit"}}, "and 6 parameters without names; expected names: .* or names=model"),
        ({"states": {"*": "8bit"}, "names": nn.Module()}, "and 6 parameters without names"),
        ({"states": {"*": "8bit"}, "names": 3}, "found names of type int, expected the model"),
        ({"states": "8bit", "amsgrad": True}, "found amsgrad=True with states='8bit', expected one of both"),
        ({"states": "8bit", "differentiable": True}, "found differentiable=True with states='8bit'"),
    ],
)
def test_bad_input_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OptimizerError, match=message):
        ampcompile.optim.AdamW(network().parameters(), **settings)
    with pytest.raises(OptimizerError, match=r"found the pattern .embed\.\*. in states, which fits no parameter"):
        ampcompile.optim.AdamW(network().named_parameters(), states={"*": "8bit", "embed.*": "float32"})


def test_parameters_that_cannot_have_coded_states_are_refused() -> None:
    with pytest.raises(OptimizerError, match=r"found a parameter of torch.bfloat16 with states='8bit' without masters"):
        ampcompile.optim.AdamW(network(torch.bfloat16).parameters(), states="8bit")
    with pytest.raises(OptimizerError, match=r"found a parameter of torch.complex64"):
        ampcompile.optim.SGD([nn.Parameter(torch.ones(3, dtype=torch.complex64))], 0.1, states="bfloat16")


def test_a_step_under_a_mode_that_has_to_see_it_is_refused() -> None:
    model, optimizer = made("AdamW", "8bit")
    train(model, optimizer, 1)
    with pytest.raises(OptimizerError, match="found a step with coded states under"), FakeTensorMode():
        optimizer.step()


def test_parameters_that_are_added_later_are_coded() -> None:
    model, optimizer = made("AdamW", "8bit")
    train(model, optimizer, 1)
    late = nn.Parameter(torch.randn(64, 64))
    optimizer.add_param_group({"params": [late], "lr": 0.1})
    late.grad = torch.randn(64, 64)
    optimizer.step()
    assert optimizer.state[late]["exp_avg_codes"].dtype == torch.int8
    assert optimizer.state[late]["exp_avg_codes"].any()


def test_without_momentum_checksums_cover_rows_too() -> None:
    runs = []
    for how in ("float32", "8bit"):
        model = network(torch.bfloat16)
        optimizer = ampcompile.optim.SGD(model.parameters(), 0.1, masters="remainder", states=how)
        train(model, optimizer, 3)
        assert "step: fused" in str(optimizer)
        runs.append((list(model.parameters()), [len(state["checksums"]) for state in optimizer.state.values()]))
    assert_same(runs[0][0], runs[1][0])
    assert runs[1][1][2] == 67 > runs[0][1][2]
    narrow = [param for param in model.parameters() if param.dim() > 1]
    other = ampcompile.optim.SGD(narrow, 0.1, masters="remainder")
    with pytest.raises(OptimizerError, match="give both the same `how`, and the same `states`"):
        other.step()
