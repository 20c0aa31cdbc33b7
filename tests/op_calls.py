"""Calls of ATen ops as the dispatcher's Autocast key sees them, and the two ways to run one that must agree."""

import contextlib
import itertools
import logging
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompile.dtypes import FLOATS
from ampcompile.rules.table import Rule
from ampcompile.torch_private.dispatcher import op_named

LOW = torch.bfloat16
aten = torch.ops.aten


@dataclass(frozen=True)
class Call:
    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def map(self, function: Callable[[Any], Any]) -> "Call":
        args, kwargs = pytree.tree_map(function, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def floats(self) -> list[torch.Tensor]:
        return [x for x in pytree.tree_leaves((self.args, self.kwargs)) if is_float(x)]

    def in_dtypes(self, dtypes: list[torch.dtype]) -> "Call":
        """A copy whose floating operands have these dtypes, in order."""
        remaining = iter(dtypes)
        return self.copy().map(lambda x: x.to(next(remaining)) if is_float(x) else x)

    def copy(self) -> "Call":
        return self.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x)

    def on(self, device_type: str) -> "Call":
        """The same call with `moved` operands."""
        return self.map(lambda x: moved(x, device_type))

    def run(self) -> Any:
        return self.op(*self.args, **self.kwargs)


def is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in FLOATS


def is_real(device_type: str) -> bool:
    return device_type == "cpu" or (device_type == "cuda" and torch.cuda.is_available())


def moved(x: Any, device_type: str) -> Any:
    """A tensor, or a device argument, on a device; a fake one where the device is missing."""
    if isinstance(x, torch.device):
        return torch.device(device_type)
    if not isinstance(x, torch.Tensor) or is_real(device_type):
        return x.to(device_type) if isinstance(x, torch.Tensor) else x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device_type)


class Recorder(SchemaCheckMode):
    """Runs ops as autocast meets them; `calls` are those it ran, with copies of their operands.

    Those in `apart` are taken apart. Of torch's modes because it lets no other stand before autocast.
    """

    def __init__(self, apart: Iterable[OpOverload]) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self.calls: list[Call] = []
        self.apart = set(apart)

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in op.tags or op is aten.is_nonzero.default:
            raise RuntimeError(f"{op} gives Python a number, which ends a graph")
        if op in self.apart:
            with self:
                return op.decompose(*args, **kwargs or {})
        self.calls.append(Call(op, args, kwargs or {}).copy())
        return op(*args, **kwargs or {})


def calls_in(function: Callable[..., Any], args: Any, kwargs: Any, apart: Iterable[OpOverload] = ()) -> list[Call]:
    """The op calls that a function makes."""
    with torch.no_grad(), enable_python_dispatcher(), Recorder(apart) as recorder:
        function(*args, **kwargs)
    return recorder.calls


@contextlib.contextmanager
def autocast(device_type: str, enabled: bool, low: torch.dtype = LOW) -> Iterator[None]:
    """`torch.autocast` without its checks of the device, for devices that are not there."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, enabled)
    torch.set_autocast_dtype(device_type, low)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])
        torch.clear_autocast_cache()


@contextlib.contextmanager
def tensors_on(device_type: str) -> Iterator[None]:
    """Fake tensors for a device that is missing, without torch's log of what fails on fakes."""
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.nullcontext() if is_real(device_type) else FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        logging.disable(logging.NOTSET)


def under_rule(call: Call, rule: Rule, low: torch.dtype = LOW) -> Any:
    """Run a call as its rule says: the plainest reading, without a graph."""
    assert rule.category != "banned", "banned"
    op, args, kwargs = call.op, call.args, call.kwargs
    names = [argument.name for argument in op._schema.arguments]
    bound = dict(zip(names[: len(args)], args, strict=True)) | kwargs
    arriving = [x.dtype for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if arriving and rule.asks_float32(arriving):
        if rule.redispatch:  # whose arguments may have no defaults
            omitted = op._schema.arguments[len(args) :]
            bound, op = {a.name: a.default_value for a in omitted} | bound, op_named(rule.redispatch)
        bound["dtype"] = bound.get("dtype") or torch.float32
    dtype = rule.operand_dtype(arriving, low) if arriving else None
    if dtype is not None:
        leaders = {name: bound[leader].dtype for name, leader in rule.follows if not is_float(bound[leader])}
        for name in bound.keys() - set(rule.keeps):
            to = leaders.get(name, dtype)
            bound[name] = pytree.tree_map(lambda x, to=to: x.to(to) if is_float(x) else x, bound[name])
        bound |= dict.fromkeys(rule.drops)
    keyword_only = {argument.name for argument in op._schema.arguments if argument.kwarg_only}
    positional = [bound.pop(a.name) for a in op._schema.arguments[: len(args)] if a.name not in keyword_only]
    result, back = op(*positional, **bound), rule.result_dtype(arriving, low)
    return pytree.tree_map(lambda x: x.to(back) if back is not None and is_float(x) else x, result)


@cache
def sampled_calls(per_op: int = 4) -> dict[str, list[Call]]:
    """Calls of several hundred ATen ops, by name, in float32: those of torch's operator database, and some by hand.

    They are drawn from the run's seed, not from that of the test that asks first.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(os.environ["AMPCOMPILE_TEST_SEED"]))
        return _calls_of_torch(per_op) | _calls_by_hand()


def _calls_of_torch(per_op: int) -> dict[str, list[Call]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db

    # Each sample asks `inspect` for the test that takes it, at a cost that grows with the modules of the process.
    common_utils.extract_test_fn = lambda: None
    found: dict[str, list[Call]] = defaultdict(list)
    for info in op_db:
        dtype = torch.float32 if torch.float32 in info.dtypes else next(iter(info.dtypes), torch.float32)
        # what can't be made or traced here (sparse, data-dependent, CUDA only) has no samples
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            for sample in itertools.islice(info.sample_inputs("cpu", dtype), 6):
                with contextlib.suppress(Exception):
                    for call in calls_in(info.op, (sample.input, *sample.args), sample.kwargs):
                        if call.op.namespace == "aten" and len(found[call.op.name()]) < per_op:
                            found[call.op.name()].append(call)
    return dict(found)


def _calls_by_hand() -> dict[str, list[Call]]:
    """Calls of ops that torch's database lacks, or has with one tensor only."""
    x, y, index = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([0, 2])
    images = [torch.randn(1, 2, *[5] * n) for n in range(4)]
    calls = [
        Call(aten._index_put_impl_.default, (x, [index], y[:2]), {}),
        Call(aten.embedding_bag.default, (x, index, index[:1], False, 0, False, y[0, :2]), {}),
        Call(aten.meshgrid.default, ([x[0], y[0]],), {}),
        Call(aten.meshgrid.indexing, ([x[0], y[0]],), {"indexing": "ij"}),
        Call(aten.frobenius_norm.dim, (x, [0, 1]), {}),
        Call(aten.linalg_matrix_norm.default, (x, 1), {}),
        Call(aten.nuclear_norm.default, (x,), {}),
        Call(aten.nuclear_norm.dim, (x, [0, 1]), {}),
        Call(aten.norm.Scalar, (x, 3), {}),
        Call(aten.norm.ScalarOpt_dim, (x, 3, [0]), {}),
        Call(aten.pow.Scalar, (2, x), {}),
        Call(aten.quantile.default, (x, torch.rand(2)), {}),
        Call(aten.nanquantile.default, (x, torch.rand(2)), {}),
        Call(aten.inverse.default, (torch.eye(3) + 0.1,), {}),
        Call(aten.linalg_cond.p_str, (x[:, :3], "fro"), {}),
        Call(aten.linalg_matrix_rank.default, (x, 0.1), {}),
        Call(aten.linalg_matrix_rank.atol_rtol_float, (x,), {"atol": 0.1}),
        Call(aten.linalg_matrix_rank.tol_tensor, (x, torch.rand(())), {}),
        Call(aten.orgqr.default, (torch.randn(4, 3), torch.rand(3)), {}),
        Call(aten.stft.center, (torch.randn(64), 16), {"return_complex": True, "window": torch.rand(16)}),
        Call(aten.fake_quantize_per_tensor_affine.default, (x, 0.1, 0, 0, 255), {}),
        Call(aten.multilabel_margin_loss_forward.default, (x, torch.zeros(3, 4, dtype=torch.long), 1), {}),
        Call(aten.nll_loss.default, (x, torch.tensor([0, 2, 1])), {}),
        Call(aten.nll_loss2d.default, (images[2], torch.zeros(1, 5, 5, dtype=torch.long)), {}),
        Call(aten.conv2d.padding, (images[2], torch.randn(3, 2, 3, 3), None, [1, 1], "same"), {}),
        Call(
            aten.convolution.default,
            (images[2], torch.randn(3, 2, 3, 3), None, [1] * 2, [0] * 2, [1] * 2, False, [0] * 2, 1),
            {},
        ),
        Call(aten.conv_tbc.default, (torch.randn(5, 1, 2), torch.randn(3, 2, 4), torch.randn(4)), {}),
        Call(aten.chain_matmul.default, ([x, y.mT, x],), {}),
        Call(aten._addmm_activation.default, (torch.randn(3), x, torch.randn(4, 3)), {}),
        Call(aten.grid_sampler.default, (images[2], torch.rand(1, 3, 3, 2), 0, 0, False), {}),
        *(
            Call(getattr(aten, f"{kind}_pad{n}d").default, (images[n], [1] * (2 * n)), {})
            for kind in ("reflection", "replication")
            for n in (1, 2, 3)
        ),
        Call(aten.upsample_linear1d.default, (images[1], [7], False), {}),
        Call(aten.upsample_trilinear3d.default, (images[3], [7] * 3, False), {}),
        *(
            Call(getattr(aten, name).default, (images[2], [7, 7], False), {})
            for name in (
                "upsample_bilinear2d",
                "upsample_bicubic2d",
                "_upsample_bilinear2d_aa",
                "_upsample_bicubic2d_aa",
            )
        ),
        *(
            Call(getattr(aten, f"{name}{n}d").default, (images[n], [7] * n), {})
            for name in ("upsample_nearest", "_upsample_nearest_exact")
            for n in (1, 2, 3)
        ),
        *(
            Call(getattr(aten, name).vec, (images[n], [7] * n, *([False] if "nearest" not in name else []), None), {})
            for n, names in {
                1: "upsample_linear1d upsample_nearest1d _upsample_nearest_exact1d",
                2: "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
                "upsample_nearest2d _upsample_nearest_exact2d",
                3: "upsample_trilinear3d upsample_nearest3d _upsample_nearest_exact3d",
            }.items()
            for name in names.split()
        ),
    ]
    return {call.op.name(): [call] for call in calls}
