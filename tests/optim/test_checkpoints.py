"""Files have one form: torch's names, and float32 masters, whatever the optimizer keeps. Others are refused whole."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import ampcompile
from ampcompile.errors import OptimizerError
from ampcompile.kernels import states as states_kernel
from ampcompile.kernels.tables import SPAN
from ampcompile.optim import masters as masters_room
from ampcompile.optim.masters import masters_of
from tests.scaler.cases import assert_equal, params

HOWS = ("remainder", "remainder8", "float32", "stochastic")
KINDS = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Adam": {"amsgrad": True}, "AdamW": {}}
SHAPES = ((33, 7), (), (2, 3, 4, 2), (5, 1025))


def ours(
    kind: str = "AdamW", how: str | None = "remainder", seed: int = 0, shapes: Any = SHAPES, **options: Any
) -> Any:
    random = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=random).to(torch.bfloat16 if how else torch.float32) for shape in shapes]
    drawn = [each.contiguous(memory_format=torch.channels_last) if each.dim() == 4 else each for each in drawn]
    return getattr(ampcompile.optim, kind)(map(nn.Parameter, drawn), masters=how, **KINDS[kind], **options)


def step(*optimizers: Any, seed: int = 0) -> None:
    for optimizer in optimizers:
        random = torch.Generator().manual_seed(seed)
        for param in params(optimizer):
            param.grad = torch.empty_like(param).copy_(torch.randn(param.shape, generator=random))
        optimizer.step()


def weights(optimizer: Any) -> list[Tensor]:
    """The float32 ones, of parameters of 16 bits."""
    kept = masters_of(optimizer)
    return [kept.read_weight(param.detach(), optimizer.state[param]) for param in params(optimizer)]


def load_model(optimizer: Any, other: Any) -> None:
    for param, value in zip(params(optimizer), params(other), strict=True):
        param.data.copy_(value.data)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("states", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("how", [None, *HOWS])
def test_a_file_has_torchs_form_and_float32_masters(kind: str, how: str | None, states: str) -> None:
    mine, other = (ours(kind, how, seed, states=states) for seed in (0, 1))
    theirs = getattr(torch.optim, kind)([nn.Parameter(p.detach().float()) for p in params(mine)], **KINDS[kind])
    mine.param_groups[0].update(masters="float32", seed=3)
    step(mine, theirs)
    saved, expected = mine.state_dict(), theirs.state_dict()
    assert saved["param_groups"][0].keys() == expected["param_groups"][0].keys()
    beside = {"stochastic": "rounding_key", None: None}.get(how, "master_param")
    for number, state in expected["state"].items():
        given = dict(saved["state"][number])
        master = given.pop(beside, None)
        assert given.pop("step").dtype == torch.float32 if "step" in given else how in (None, "stochastic")
        assert {k: (v.dtype, v.shape) for k, v in given.items()} == {
            k: (v.dtype, v.shape) for k, v in state.items() if k != "step"
        }
        if beside == "master_param":
            assert_equal([master], [weights(mine)[number]])
    theirs.load_state_dict(copy.deepcopy(saved))
    mine.load_state_dict(expected)
    assert mine.param_groups[0]["masters"] == "float32" and mine.param_groups[0]["seed"] == 3
    load_model(other, mine)
    other.load_state_dict(theirs.state_dict())
    for number, state in other.state_dict()["state"].items():  # what was decoded is coded with the same codes
        names = state.keys() - {"rounding_key"}
        assert_equal([state[name] for name in names], [saved["state"][number][name] for name in names])


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("form", ["remainders", "remainders and an older master", "a master"])
def test_files_of_all_forms_go_on_with_their_masters(form: str, order: str) -> None:
    optimizer = ours()
    step(optimizer)
    file = optimizer.state_dict()
    if form != "a master":
        file["state"] = {i: dict(optimizer.state[param]) for i, param in enumerate(params(optimizer))}
        for state in file["state"].values():
            del state["master_param"]
    if form == "remainders and an older master":
        for number, master in enumerate(weights(optimizer)):
            state = file["state"][number]
            state.update(master_param=master, remainder=torch.zeros_like(state["remainder"]))
    file, other = copy.deepcopy(file), ours(seed=1)
    if order == "model first":
        load_model(other, optimizer)
    other.load_state_dict(file)
    load_model(other, optimizer)
    assert_equal(weights(other), weights(optimizer))
    step(optimizer, other, seed=1)
    assert_equal(weights(other), weights(optimizer))


def of_bitsandbytes(file: dict[str, Any]) -> None:
    codes = torch.zeros(33, 7, dtype=torch.uint8)
    file["state"][0] = {"step": 3, "state1": codes, "qmap1": torch.zeros(256), "absmax1": torch.zeros(1)}


def codes_under_torchs_names(file: dict[str, Any]) -> None:
    file["state"][3]["exp_avg_sq"] = torch.zeros(5, 1025, dtype=torch.uint8)


def subclasses_under_torchs_names(file: dict[str, Any]) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    file["state"][3]["exp_avg"] = TwoTensor(torch.zeros(5, 1025), torch.zeros(5, 1025))


def with_names_of_codes(file: dict[str, Any]) -> None:
    """As a file that was flattened, which has none of them, is read."""
    file["state"][3].update({"exp_avg_codes": {}, "exp_avg_sq_codes": {}, "code_scales": {}})


FOREIGN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another library's": (
        of_bitsandbytes,
        r"found the states 'state1', 'qmap1', 'absmax1' for parameter 0 .*'exp_avg_sq'",
    ),
    "another optimizer's": (
        lambda file: file["state"].update({2: {"momentum_buffer": torch.zeros(2, 3, 4, 2)}}),
        "found the states 'momentum_buffer' for parameter 2",
    ),
    "codes": (codes_under_torchs_names, "found 'exp_avg_sq' of torch.uint8 for parameter 3"),
    "subclasses": (subclasses_under_torchs_names, "found 'exp_avg' in a TwoTensor for parameter 3"),
    "moments of another shape": (
        lambda file: file["state"][3].update(exp_avg=torch.zeros(5)),
        r"found 'exp_avg' of shape \(5,\) for parameter 3 .*expected \(5, 1025\)",
    ),
    "masters of another shape": (
        lambda file: file["state"][3].update(master_param=torch.zeros(5)),
        r"found 'master_param' of shape \(5,\) for parameter 3",
    ),
    "a missing group": (lambda file: file["param_groups"].clear(), "different number of parameter groups"),
    "coded: largest moments": (lambda file: file["param_groups"][0].update(amsgrad=True), "found amsgrad=True"),
    "coded: flattened": (with_names_of_codes, "found flatten_optimizer_state_dict for coded states of plain tensors"),
}
KEPT = [(None, "float32"), *((how, "float32") for how in HOWS), (None, "8bit"), ("remainder", "bfloat16")]


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize(("how", "states"), KEPT)
def test_a_foreign_file_is_refused_and_changes_nothing(how: str | None, states: str, foreign: str) -> None:
    optimizer = ours(how=how, states=states if "coded" not in foreign else "8bit")
    step(optimizer)
    change, text = FOREIGN[foreign]
    file = copy.deepcopy(optimizer.state_dict())
    file["param_groups"][0]["lr"] = 7.0
    change(file)
    held = {param: dict(state) for param, state in optimizer.state.items()}
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises((OptimizerError, ValueError), match=text):
        optimizer.load_state_dict(file)
    for param, state in held.items():
        assert all(state[name] is value for name, value in optimizer.state[param].items())
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    gone = weakref.ref(file["state"][3]["exp_avg"])
    del file
    assert gone() is None


@pytest.mark.parametrize("states", ["float32", "8bit"])
def test_what_a_users_hook_makes_of_a_file_is_what_is_checked(states: str) -> None:
    optimizer, other = (ours(how="float32", states=states, seed=seed) for seed in (0, 1))
    step(optimizer)
    file, saved = copy.deepcopy(optimizer.state_dict()), optimizer.state_dict()
    for state in file["state"].values():
        state["state1"] = state.pop("exp_avg")

    def rename(_: Any, file: dict[str, Any]) -> dict[str, Any]:
        states = {i: {"exp_avg" if k == "state1" else k: v for k, v in s.items()} for i, s in file["state"].items()}
        return {**file, "state": states}

    other.register_load_state_dict_pre_hook(rename)
    other.load_state_dict(file)
    torch.testing.assert_close(other.state_dict(), saved, rtol=0, atol=0)
    other.register_load_state_dict_pre_hook(lambda *_: {}["no such key"])
    with pytest.raises(KeyError):
        other.load_state_dict(file)
    torch.testing.assert_close(other.state_dict(), saved, rtol=0, atol=0)


class Peak(TorchDispatchMode):
    """The most bytes of new storages that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.living: dict[int, tuple[Any, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            storage = result.untyped_storage()
            if all(storage._cdata != each.untyped_storage()._cdata for each in args if isinstance(each, Tensor)):
                self.living[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.held())
        return result

    def held(self) -> int:
        self.living = {key: each for key, each in self.living.items() if not each[0].expired()}
        return sum(size for _, size in self.living.values())


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("states", ["8bit", *(pytest.param(s, marks=pytest.mark.ci) for s in ("float32", "bfloat16"))])
def test_a_load_and_a_save_take_at_most_the_largest_parameters_float32_more(
    how: str, states: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masters_room, "PIECE", SPAN)
    monkeypatch.setattr(states_kernel, "SLICE", SPAN)
    rows = 16
    numbers = rows * SPAN
    (optimizer, other) = (ours(how=how, states=states, seed=seed, shapes=[(rows, SPAN)] * 9) for seed in (0, 1))
    step(optimizer, other)
    for param in params(other):
        param.grad = None
    with Peak() as saving:
        file = optimizer.state_dict()
        assert saving.peak <= saving.held() + 4 * numbers
    with Peak() as loading:
        other.load_state_dict(file)
        assert loading.peak <= loading.held() + 4 * numbers
        coded = {"float32": 0, "bfloat16": 4 * numbers, "8bit": 2 * numbers + 2 * 4 * 2 * rows}[states]
        beside = {"remainder": 2 * numbers + 4 * rows, "remainder8": numbers + 4 * rows}.get(how, 0)
        assert loading.held() <= 9 * (beside + coded)


def test_a_file_is_made_on_the_cpu_where_the_optimizer_is_told_so() -> None:
    with FakeTensorMode() as mode:
        param = nn.Parameter(torch.zeros(4, 3, device="cuda"))
        optimizer = ampcompile.optim.SGD([param], 0.1, momentum=0.9)
        optimizer.state[param]["momentum_buffer"] = torch.zeros(4, 3, device="cuda")
        devices = {}
        for where in (None, "cpu"):
            optimizer.state_dict_device = where
            devices[where] = optimizer.state_dict()["state"][0]["momentum_buffer"].device.type
    assert devices == {None: "cuda", "cpu": "cpu"} and optimizer.state[param]["momentum_buffer"].is_cuda, mode
    assert copy.copy(optimizer).state_dict_device == "cpu"
    with pytest.raises(OptimizerError, match="found state_dict_device='disk'; expected 'cpu'"):
        optimizer.state_dict_device = "disk"
    assert ours(how=None).state_dict_device is None
