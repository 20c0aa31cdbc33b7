"""What the dispatcher says of ops: who has autocast kernels, who is composite, and what tracing calls first."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompile.torch_private import dispatcher

aten = torch.ops.aten


def test_ops_with_autocast_kernels_are_told_from_those_without() -> None:
    assert list(map(dispatcher.autocast_key, ("cpu", "cuda", "meta"))) == ["AutocastCPU", "AutocastCUDA", None]
    assert dispatcher.has_autocast_kernel("aten::mm", "cpu") and dispatcher.has_autocast_kernel("aten::mm", "cuda")
    assert not dispatcher.has_autocast_kernel("aten::relu", "cpu")
    assert not dispatcher.has_autocast_kernel("aten::mm", "meta")


def test_ops_are_found_by_the_names_under_which_they_are_listed() -> None:
    assert dispatcher.op_named("aten::add.Tensor") is aten.add.Tensor
    assert dispatcher.op_named("aten::mm") is aten.mm.default
    assert {"aten::add.Tensor", "aten::mm"} <= set(dispatcher.all_op_names())


class Seeing(TorchDispatchMode):
    """Keeps the names of the ops that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


def test_no_mode_sees_what_is_to_stay_unseen() -> None:
    x = torch.ones(2)
    with dispatcher.without_modes(), Seeing() as outer, Seeing() as inner:
        x.sin()
        with dispatcher.without_modes():
            x.cos()
        x.tan()
    assert outer.seen == inner.seen == ["aten.sin.default", "aten.tan.default"]


def test_composite_ops_and_those_that_may_return_their_argument() -> None:
    assert dispatcher.is_composite(aten.linear.default) and not dispatcher.is_composite(aten.mm.default)
    assert dispatcher.may_return_argument(aten.to.dtype) and dispatcher.may_return_argument(aten.alias.default)
    assert not dispatcher.may_return_argument(aten.mm.default)
    assert not dispatcher.may_return_argument(aten.add_.Tensor), "it writes"


def test_the_dtype_registered_for_a_custom_op_is_found() -> None:
    @torch.library.custom_op("torch_private::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return 2 * x

    assert dispatcher.registered_autocast_dtype(double._opoverload, "cpu") is None
    double.register_autocast("cpu", torch.bfloat16)
    assert dispatcher.registered_autocast_dtype(double._opoverload, "cpu") == torch.bfloat16
    assert dispatcher.registered_autocast_dtype(double._opoverload, "cuda") is None


def test_the_dtype_registered_for_a_library_s_op_is_found() -> None:
    with torch.library._scoped_library("torch_private", "FRAGMENT") as library:
        library.define("triple(Tensor x) -> Tensor")
        torch.library.register_autocast("torch_private::triple", "cpu", torch.float16, lib=library)
        op = torch.ops.torch_private.triple.default
        assert dispatcher.registered_autocast_dtype(op, "cpu") == torch.float16
        assert dispatcher.registered_autocast_dtype(op, "cuda") is None
    assert dispatcher.registered_autocast_dtype(aten.mm.default, "cpu") is None


def test_autocast_acts_where_it_is_on_and_its_key_is_not_excluded() -> None:
    assert not dispatcher.autocast_acts("cpu")
    with torch.autocast("cpu"):
        assert dispatcher.autocast_acts("cpu") and not dispatcher.autocast_acts("cuda")
        with torch._C._DisableAutocast():
            assert not dispatcher.autocast_acts("cpu")


def test_tracing_calls_an_interposed_kernel_and_what_it_stands_before() -> None:
    """`dist` has an autocast kernel, `erfinv` none, so that the kernel stands at Autograd: gradients still flow."""
    for op, arguments in ((aten.dist.default, 2), (aten.erfinv.default, 1)):
        calls: list[Any] = []

        def kernel(*args: Any, calls: list[Any] = calls) -> Any:
            calls.append(args)
            return calls[0](*args)

        before = dispatcher.interpose(op, "cpu", kernel)
        assert before is not None
        assert dispatcher.interpose(op, "cpu", kernel) is None, "there is one already"
        calls.append(before)
        inputs = [torch.rand(3, requires_grad=True) for _ in range(arguments)]

        def run(*inputs: Tensor, op: Any = op) -> Any:
            return torch.autograd.grad(op(*inputs).sum(), inputs)

        expected = run(*inputs)
        assert len(calls) == 1, "eager mode passes by"
        with torch.autocast("cpu"):
            traced = make_fx(run, tracing_mode="symbolic")(*inputs)
        assert len(calls) > 1
        for gradient, wanted in zip(traced(*inputs), expected, strict=True):
            assert torch.equal(gradient, wanted)


def test_a_functionalized_op_takes_its_arguments_by_name_and_returns_copies() -> None:
    def fill(x: Tensor, value: float) -> None:
        x.fill_(value)

    with torch.library._scoped_library("torch_private", "FRAGMENT") as library:
        library.define("fill(Tensor(a!) x, float value) -> ()")
        library.impl("fill", fill, "CompositeExplicitAutograd")
        x = torch.zeros(2)
        none, filled = dispatcher.AS_A_FUNCTION(torch.ops.torch_private.fill.default, x=x, value=3.0)
    assert none is None and filled.tolist() == [3, 3] and x.tolist() == [0, 0]


def test_fakes_of_a_wrong_dtype_get_that_of_the_kernel() -> None:
    """The first half says that torch's fake kernel still differs from its real one."""
    op, (position,) = aten.native_group_norm_backward.default, dispatcher.FAKES_OF_WRONG_DTYPE.values()
    x = torch.randn(2, 4, 3, dtype=torch.bfloat16)
    out, mean, rstd = aten.native_group_norm(x, torch.ones(4), torch.zeros(4), 2, 4, 3, 2, 1e-5)
    args = (torch.ones_like(out), x, mean, rstd, torch.ones(4), 2, 4, 3, 2, [True, True, True])
    assert args[position] is x
    real = [result.dtype for result in op(*args)]
    fakes = op(*(arg.to("meta") if isinstance(arg, Tensor) else arg for arg in args))
    assert [fake.dtype for fake in fakes] != real
    assert [fake.dtype for fake in dispatcher.as_computed(op, args, fakes)] == real


DEFINES = """
import sys
sys.modules["triton"] = None
import torch
from ampcompile.torch_private.dispatcher import triton_op

def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

print(triton_op("ampcompile_tests::twice")(twice)(torch.ones(1)).item())
torch.library.triton_op("ampcompile_tests::again", twice, mutates_args=())
"""


def test_an_op_is_defined_without_triton_in_silence() -> None:
    """But for torch's own, of which torch still complains."""
    run = subprocess.run([sys.executable, "-P", "-c", DEFINES], capture_output=True, text=True, timeout=300, check=True)
    assert run.stdout == "2.0\n" and run.stderr.count("Triton not available") == 1
