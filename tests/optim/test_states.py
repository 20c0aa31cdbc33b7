"""`states=`: what the optimizer holds, prints, codes and refuses; that it trains on with the same bits,
`test_machine.py` sees.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


def train(model: nn.Module, optimizer: Any, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 128, generator=generator)
        optimizer.zero_grad()
        (model(x.to(next(model.parameters()).dtype)).float() - x.flip(1)).square().mean().backward()
        optimizer.step()


def everything(model: nn.Module, optimizer: Any) -> list[Tensor]:
    states = [state[name] for state in optimizer.state.values() for name in sorted(state)]
    return [*model.parameters(), *(value for value in states if isinstance(value, Tensor))]


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b) and all(map(torch.equal, a, b))


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
    exchanged = KINDS[kind][1](other.parameters(), **KINDS[kind][2])
    if masters is None:
        train(other, exchanged, 1)
        model.load_state_dict(other.state_dict())
        ours.load_state_dict(copy.deepcopy(exchanged.state_dict()))
    handle = ampcompile.keep_masters(exchanged, masters, states=how, seed=3)
    for one in ((model, ours), (other, exchanged)):
        train(*one, 2)
    assert_same(list(other.parameters()), list(model.parameters()))
    with pytest.raises(OptimizerError, match="found an optimizer whose states are coded"):
        ampcompile.keep_masters(exchanged, None, states=how)
    saved = exchanged.state_dict()["state"]
    handle.remove()
    for number, param in enumerate(other.parameters()):
        state = {k: v if k == "step" else v.to(param.dtype) for k, v in saved[number].items() if k != "master_param"}
        torch.testing.assert_close(dict(exchanged.state[param]), state, rtol=0, atol=0)
    train(other, exchanged, 1)


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


@pytest.mark.parametrize("how", ["bfloat16", "8bit"])
def test_seeds_differ_and_parameters_train_as_with_float32(how: str) -> None:
    runs = [made("AdamW", "float32"), made("AdamW", how), made("AdamW", how, seed=1)]
    for one in runs:
        train(*one, 30)
    exact, *coded = [model[0].weight for model, _ in runs]
    assert not torch.equal(*coded)
    for weight in coded:
        assert (weight - exact).norm() < 0.05 * (exact - network()[0].weight).norm()


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
        ({"states": "8bit", "masters": None}, "found a parameter of torch.bfloat16 with states='8bit' without masters"),
    ],
)
def test_bad_input_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OptimizerError, match=message):
        ampcompile.optim.AdamW(
            network(torch.bfloat16 if "masters" in settings else torch.float32).parameters(), **settings
        )
    with pytest.raises(OptimizerError, match=r"found a parameter of torch.complex64"):
        ampcompile.optim.SGD([nn.Parameter(torch.ones(3, dtype=torch.complex64))], 0.1, states="bfloat16")
    with pytest.raises(OptimizerError, match=r"found the pattern .embed\.\*. in states, which fits no parameter"):
        ampcompile.optim.AdamW(network().named_parameters(), states={"*": "8bit", "embed.*": "float32"})


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
