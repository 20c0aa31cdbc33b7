"""torch's own lists of autocast ops, each whole list as one model: output dtypes and values are eager autocast's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.utils import _pytree as pytree

from ampcompile.compiler import ambient
from ampcompile.config import Options
from ampcompile.passes.base import run_passes
from ampcompile.passes.before.insert_casts import InsertCasts
from ampcompile.passes.capture.capture import capture
from ampcompile.passes.decide.assign_precision import AssignPrecision
from ampcompile.passes.graph import Regions
from ampcompile.rules import table as tables
from ampcompile.torch_private import autocast, dispatcher
from tests.compiling import HALF, LOW, compiled, dtypes

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's deprecations, met on purpose

CASES = [(LOW, True), (HALF, True), (HALF, False)]
Row = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def rows(device: str) -> list[Row]:
    """Every entry, called as a function and as a method where there is one."""
    if device == "cuda":
        pytest.importorskip("expecttest")  # of torch's own tests, which a machine with a GPU may lack
    from torch.testing._internal import autocast_test_lists as lists

    kind = lists.AutocastCPUTestLists if device == "cpu" else lists.AutocastTestLists
    found: list[Row] = []
    for group, entries in vars(kind(device)).items():
        for name, *rest in entries:
            if name == "einsum":  # torch's entry has operands that don't fit its equation
                rest = [("ij,jk->ik", rest[1])]
            kwargs = next((part for part in rest if isinstance(part, dict)), {})
            homes = [torch, torch._C._nn, torch._C._linalg] if not group.startswith("methods") else []
            function = next((getattr(home, name) for home in homes if hasattr(home, name)), None)
            method = getattr(torch.Tensor, name, None)
            for args in (part for part in rest if isinstance(part, tuple)):
                if function is not None:
                    found.append((name, function, args, kwargs))
                if method is not None and isinstance(args[0], torch.Tensor):
                    found.append((name, method, args, kwargs))
    return found


def runs(row: Row, device: str, dtype: torch.dtype) -> bool:
    """Whether eager autocast itself runs an entry, here, in the region's dtype."""
    _, function, args, kwargs = row
    try:
        with torch.autocast(device, dtype):
            result = function(*args, **kwargs)
    except (RuntimeError, AssertionError):  # the other 16-bit type, or a kernel that fake CUDA tensors lack
        return False
    return result is not NotImplemented


def all_of(table: list[Row]) -> Callable[[Any], list[Any]]:
    def model(arguments: Any) -> list[Any]:
        return [f(*args, **kwargs) for (_, f, _, _), (args, kwargs) in zip(table, arguments, strict=True)]

    return model


@pytest.mark.parametrize("dtype,range_guards", [CASES[0], pytest.param(*CASES[1], marks=pytest.mark.ci), CASES[2]])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_compiled_list_equals_eager_autocast(device, dtype, range_guards):
    table = [row for row in rows(device) if runs(row, device, dtype)]
    arguments = [(args, kwargs) for _, _, args, kwargs in table]
    model = all_of(table)
    with torch.no_grad(), torch.autocast(device, dtype, cache_enabled=False):
        expected = model(arguments)
    with torch.no_grad():
        run, recorder = compiled(model, dtype=dtype, range_guards=range_guards)
        results = run(arguments)
    assert len(table) >= 95 and not recorder.disagreements
    for (name, *_), result, exact in zip(table, results, expected, strict=True):
        assert dtypes(result) == dtypes(exact), name
        for ours, theirs in zip(pytree.tree_leaves(result), pytree.tree_leaves(exact), strict=True):
            if isinstance(ours, torch.Tensor):
                assert torch.allclose(ours.double(), theirs.double(), rtol=1e-2, atol=1e-2, equal_nan=True), name
            else:
                assert ours == theirs, name


NO_FAKE_KERNEL = {"cudnn_convolution", "cudnn_convolution_transpose", "equal", "grid_sampler", "gru_cell"}
if dispatcher.TORCH < (2, 13) and torch.version.cuda and not torch.cuda.is_available():
    NO_FAKE_KERNEL |= {"_convolution"}  # its fake kernel chooses a backend by asking for the driver
OTHER_16_BITS = {"bilinear", "cat", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "stack", "vdot"}
OTHER_16_BITS |= {"addcdiv", "addcmul", "atan2", "tensordot"}
BANNED = {"binary_cross_entropy"}


@pytest.mark.parametrize("dtype,range_guards", CASES)
def test_the_cuda_list_on_fake_cuda_tensors_has_eager_autocasts_dtypes(dtype, range_guards):
    mode = FakeTensorMode()
    with mode, cuda_said_to_be_there():
        everything = rows("cuda")
        table = [row for row in everything if runs(row, "cuda", dtype)]
        skipped = {row[0] for row in everything} - {row[0] for row in table}
        assert skipped <= NO_FAKE_KERNEL | BANNED | (OTHER_16_BITS if dtype == LOW else set())
        assert skipped >= BANNED and {tables.table("cuda")[f"aten::{op}"].category for op in BANNED} == {"banned"}
        with torch.autocast("cuda", dtype, cache_enabled=False):
            expected = [dtypes(f(*args, **kwargs)) for _, f, args, kwargs in table]
        gm, inputs = as_graph(table)
        with ambient.autocast_for("cuda", Options(dtype=dtype)):
            captured = capture(gm, inputs, mode, Options().policy)
            regions = Regions(autocast.autocast_states())
        run_passes([AssignPrecision(Options().policy, regions, range_guards), InsertCasts()], captured)
        results = captured(*inputs)
    assert len(table) >= 120
    for (name, *_), result, types in zip(table, results, expected, strict=True):
        assert dtypes(result) == types, name


def as_graph(table: list[Row]) -> tuple[GraphModule, list[torch.Tensor]]:
    """The calls as Dynamo would have written them, and their tensors."""
    graph, inputs, outputs = Graph(), [], []
    for _, function, args, kwargs in table:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for n, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[n] = graph.placeholder(f"x{len(inputs)}")
                inputs.append(leaf)
        outputs.append((function, *pytree.tree_unflatten(leaves, spec)))
    graph.output([graph.call_function(f, args, kwargs) for f, args, kwargs in outputs])
    return GraphModule({}, graph), inputs


@contextmanager
def cuda_said_to_be_there() -> Iterator[None]:
    """`torch.autocast("cuda")` switches itself off on a machine without CUDA, fake tensors or not."""
    with (
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        mock.patch("torch.cuda.is_bf16_supported", lambda *args: True),
    ):
        yield
