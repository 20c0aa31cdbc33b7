"""`precision` and `keep_fp32`: as decorator of a function, a class, an object, and as a block."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompile import keep_fp32, precision
from ampcompile.errors import OptionError
from tests.models import Net

LOW, HIGH = torch.bfloat16, torch.float32
WAYS = {
    "eager": lambda f: f,
    "amp": lambda f: torch.compile(
        f, backend="amp", fullgraph=True, options={"lower": "aot_eager", "outputs": "autocast"}
    ),
    "another backend": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True),
}
ways = pytest.mark.parametrize("compiled", WAYS.values(), ids=WAYS)


class Pool(nn.Module):
    """Stands for a class of another library: pools features (N, C, L) at `rois`, (start, stop) each."""

    def __init__(self, size: int) -> None:
        super(Pool, self).__init__()  # noqa: UP008  (as older libraries write it)
        self.size = size
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, rois: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.seen = [x.dtype, rois.dtype]
        middle = rois.to(x.dtype).mean(-1, keepdim=True)
        return torch.exp(-((torch.arange(x.shape[-1]) - middle) ** 2)) @ x.mT


PooledHigh = keep_fp32(Pool)


@keep_fp32
class Decorated(nn.Module):
    def __init__(self) -> None:
        super(Decorated, self).__init__()  # noqa: UP008
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def product(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


def under_autocast(f: Callable[..., Any], *args: Any) -> Any:
    with torch.autocast("cpu"):
        return f(*args)


@ways
def test_a_function(compiled: Callable[..., Any]) -> None:
    kept = keep_fp32(product)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        low = x @ x
        return low, kept(low, y=x)

    x = torch.randn(4, 4)
    low, high = under_autocast(compiled(f), x)
    assert (low.dtype, high.dtype) == (LOW, HIGH)
    torch.testing.assert_close(high, low.float() @ x)
    assert kept.__name__ == "product"


@ways
@pytest.mark.parametrize("rois", [torch.int64, torch.float32])
def test_an_imported_class(compiled: Callable[..., Any], rois: torch.dtype) -> None:
    class Subclassed(Pool):
        forward = keep_fp32(Pool.forward)

    for cls in (PooledHigh, Subclassed):
        pool = cls(3)
        assert isinstance(pool, Pool) and pool.size == 3 and PooledHigh.__doc__ == Pool.__doc__
        features, boxes = torch.randn(2, 3, 8, dtype=torch.float16), torch.tensor([[1001, 1003]]).to(rois)
        out = under_autocast(compiled(pool), features, boxes)
        assert out.dtype == HIGH
        assert pool.seen in ([], [HIGH, rois])  # raised, and never lowered
    assert under_autocast(compiled(Pool(3)), torch.randn(2, 3, 8), boxes).dtype == LOW, "the class is as it was"


@ways
def test_a_class_and_an_object(compiled: Callable[..., Any]) -> None:
    parts = {"kept": Decorated(), "first": nn.Linear(4, 4), "second": keep_fp32(nn.Linear(4, 4))}
    model = Net(lambda m, x: [low := m.first(x), m.kept(low), m.second(low)], **parts)
    assert [v.dtype for v in under_autocast(compiled(model), torch.randn(2, 4))] == [LOW, HIGH, HIGH]
    assert isinstance(model.second, nn.Linear) and set(model.second.state_dict()) == {"weight", "bias"}


@ways
@pytest.mark.parametrize("fresh", [True, False])
def test_a_block(compiled: Callable[..., Any], fresh: bool) -> None:
    def f(x: Tensor) -> list[Tensor]:
        low = x @ x
        with precision(torch.float32) if fresh else keep_fp32:
            kept = [low.exp(), low @ x, nn.functional.softmax(low, -1), 2 - low, low.t() @ low]
            view = low.view(-1)
        view.add_(1)
        return [*kept, low, x @ x]

    x = torch.randn(4, 4)
    *kept, low, after = under_autocast(compiled(f), x)
    assert [v.dtype for v in kept] == [HIGH] * 5
    assert (low.dtype, after.dtype) == (LOW, LOW)
    expected = under_autocast(torch.matmul, x, x)
    torch.testing.assert_close(low, expected + 1)  # a view of it was written to
    torch.testing.assert_close(kept[1], expected.float() @ x)


@ways
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(compiled: Callable[..., Any], dtype: torch.dtype) -> None:
    layer, function = precision(dtype)(nn.Linear(4, 4)), precision(dtype)(lambda x: x)

    def f(x: Tensor) -> list[Tensor]:
        with precision(dtype):
            y = x @ x
        return [layer(x), function(x), y]

    assert [v.dtype for v in compiled(f)(torch.randn(4, 4))] == [dtype] * 3
    with torch.autocast("cpu", enabled=False):
        assert [v.dtype for v in compiled(f)(torch.randn(4, 4))] == [dtype] * 3


@ways
def test_on_the_meta_device_it_converts_what_arrives(compiled: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=LOW), keep_fp32(nn.Linear(4, 4))).to("meta")
    assert compiled(model)(torch.empty(2, 4, dtype=LOW, device="meta")).dtype == HIGH


def test_what_is_converted() -> None:
    arguments = {
        "half": torch.ones(2, dtype=torch.float16),
        "nested": [(torch.ones(2, dtype=torch.bfloat16), 3), {"wide": torch.ones(2, dtype=torch.float64)}],
        "same": torch.ones(2),
        "int": torch.ones(2, dtype=torch.int32),
        "bool": torch.ones(2, dtype=torch.bool),
        "complex": torch.ones(2, dtype=torch.complex64),
        "stored": torch.ones(2).to(torch.float8_e5m2),
        "text": "x",
    }
    seen: dict[str, Any] = keep_fp32(lambda **kwargs: kwargs)(**arguments)
    assert seen["half"].dtype == seen["nested"][0][0].dtype == seen["nested"][1]["wide"].dtype == HIGH
    for name in ("same", "int", "bool", "complex", "stored", "text"):
        assert seen[name] is arguments[name]


def test_gradients_come_back_in_the_dtype_that_arrived() -> None:
    x = torch.randn(4, 4, dtype=LOW, requires_grad=True)
    keep_fp32(product)(x, x).sum().backward()
    assert x.grad.dtype == LOW


@pytest.mark.parametrize("make", [Decorated, lambda: PooledHigh(2), lambda: keep_fp32(nn.Linear(4, 4))])
def test_copies_and_pickles_keep_their_precision_and_have_their_own_weights(make: Callable[[], nn.Module]) -> None:
    module = make()
    once = pickle.loads(pickle.dumps(module))
    for other in (copy.deepcopy(module), once, pickle.loads(pickle.dumps(once))):
        assert type(other).__mro__[1] is type(module).__mro__[1] and type(other).__name__ == type(module).__name__
        args = (torch.randn(1, 4), torch.zeros(1, 2)) if isinstance(module, Pool) else (torch.randn(2, 4),)
        assert under_autocast(other, *args).dtype == HIGH
        for parameter in other.parameters():
            nn.init.zeros_(parameter)
        if list(other.parameters()):
            assert not under_autocast(other, *args).any() and under_autocast(module, *args).any()


def test_a_compiled_object_and_one_with_a_forward_of_its_own() -> None:
    compiled = keep_fp32(torch.compile(nn.Linear(4, 4), backend="amp", options={"lower": "aot_eager"}))
    patched = nn.Linear(4, 4)
    patched.forward = lambda x: x @ x.t()
    for module in (compiled, keep_fp32(patched)):
        assert under_autocast(module, torch.randn(2, 4, dtype=LOW)).dtype == HIGH


def generator(x: Tensor) -> Any:
    yield x


@pytest.mark.parametrize("target", [generator, int, 3, torch.Tensor])
def test_what_cant_be_decorated(target: Any) -> None:
    with pytest.raises(OptionError, match=r"expected a function, a torch\.nn\.Module or a class of modules"):
        keep_fp32(target)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, "fp64", "fp8", None])
def test_dtypes_that_make_no_sense(dtype: Any) -> None:
    with pytest.raises(OptionError, match=r"expected torch\.float32, torch\.bfloat16 or torch\.float16") as caught:
        precision(dtype)
    assert ("by a policy" in str(caught.value)) == (dtype == "fp8")


@ways
def test_a_dtype_may_be_a_name(compiled: Callable[..., Any]) -> None:
    def f(x: Tensor) -> Tensor:
        with precision("half"):
            y = x @ x
        return precision("torch.float32")(torch.mm)(y, y)

    x = torch.randn(3, 3)
    with torch.autocast("cpu"):
        assert f(x).dtype == compiled(f)(x).dtype == HIGH
    assert torch.equal(precision("fp16")(torch.mm)(x, x), (x.half() @ x.half()))


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "/": lambda x: x / 3,
    "reflected /": lambda x: 3 / x,
    "//": lambda x: x // 3,
    "reflected %": lambda x: 3 % x,
    "**": lambda x: x**2,
    "reflected -": lambda x: 2 - x,
    "@": lambda x: x @ x,
    "reflected @": lambda x: x.__rmatmul__(x),
    "-": lambda x: -x,
    "abs": abs,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_computes_in_a_block_as_the_op_does(name: str) -> None:
    low = (torch.rand(3, 3) + 1).bfloat16()
    with precision(torch.float32):
        found = OPERATORS[name](low)
    assert found.dtype == torch.float32 and torch.equal(found, OPERATORS[name](low.float()))
