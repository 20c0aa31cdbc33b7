"""What is put around a lowered graph: its copies of weights, up to date, and word of writes that nobody else tells."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule

from ampcompile import weights
from ampcompile.compiler.lower import _inductor_config, _shaped, _then_cast_again, _with_copies
from ampcompile.config import Options
from ampcompile.passes.weight_copy import Slot
from tests.compiling import amp, eager

LOW = torch.bfloat16


def slot(weight: int, layout: str = "strided", on_trial: bool = False) -> Slot:
    return Slot(weight=weight, dtype=LOW, layout=layout, on_trial=on_trial)


@pytest.mark.parametrize("read", [[1], [2, 1]])
def test_a_graph_gets_its_copies_after_its_inputs(read: list[int]) -> None:
    inputs = torch.randn(2), nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(4))
    run = _with_copies(lambda *args: args, [slot(i) for i in read], Options())
    for _ in range(2):
        given = run(*inputs)
        assert given[:3] == inputs
        assert [copy.tolist() for copy in given[3:]] == [inputs[i].detach().to(LOW).tolist() for i in read]
        with torch.no_grad():
            inputs[1].add_(1)


@pytest.mark.parametrize("replayed", [False, True])
def test_copies_keep_their_addresses_where_cuda_graphs_replay(replayed: bool) -> None:
    weight = nn.Parameter(torch.randn(3))
    run = _with_copies(lambda *args: args, [slot(0)], Options(inductor=(("triton.cudagraphs", replayed),)))
    first = run(weight)[1]  # still held, as by a backward
    with torch.no_grad():
        weight.add_(1)
    assert (run(weight)[1].data_ptr() == first.data_ptr()) == replayed


def test_a_weight_on_trial_is_compared_first() -> None:
    tensor = torch.randn(3)
    run = _with_copies(lambda *args: args[1], [slot(0, on_trial=True)], Options())
    for _ in range(3):
        tensor.numpy()[1] += 1
        assert torch.equal(run(tensor), tensor.to(LOW))


def test_where_all_is_fake_the_copies_are_shapes() -> None:
    run = _with_copies(lambda *args: args, [slot(0), slot(0, "packed")], Options())
    with FakeTensorMode():
        weight = torch.empty(4, 6).t().requires_grad_()
        _, strided, packed = run(weight)
    assert [(c.dtype, c.shape, c.requires_grad) for c in (strided, packed)] == [(LOW, (6, 4), False)] * 2
    assert strided.stride() == (1, 6) and packed.stride() == (4, 1)
    assert _shaped(torch.empty(2, 3), slot(0)).dtype == LOW


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_graph_writes_below_autograd_is_cast_again(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(weights, "invalidate", told.append)

    def run(*args: Any) -> Any:
        assert not told, "once it has run"
        if fails:
            raise KeyError
        return args[0] * 2

    wrapped = _then_cast_again(run, [2, 0])
    if fails:
        with pytest.raises(KeyError):
            wrapped(1, 2, 3)
    else:
        assert wrapped(1, 2, 3) == 2
    assert told == [[3, 1]]


@pytest.mark.parametrize(("numerics", "emulated"), [("eager", True), ("relaxed", False)])
def test_inductor_rounds_as_eager_does_unless_it_may_not(numerics: str, emulated: bool) -> None:
    gm = GraphModule({}, Graph())
    options = Options(numerics=numerics, inductor=(("max_autotune", True),))
    config = _inductor_config(gm, options, [slot(0)])
    assert config["emulate_precision_casts"] is emulated and config["max_autotune"] is True
    assert "size_asserts" not in config
    assert _inductor_config(gm, options, [slot(0), slot(1, "packed")])["size_asserts"] is False
    mine = Options(inductor=(("emulate_precision_casts", False),))
    assert _inductor_config(gm, mine, [])["emulate_precision_casts"] is False, "the user's own word is the last"


@pytest.mark.parametrize("lower", ["eager", "aot_eager"])
@pytest.mark.parametrize("grad", [True, False])
def test_either_way_the_numbers_are_eager_autocasts(lower: str, grad: bool) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 4)
    run, _ = amp(model, lower=lower)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            found: Tensor = run(x)
            assert torch.equal(found, eager(model, x)) and found.requires_grad == grad
            with torch.no_grad():
                model[0].weight.mul_(2)
