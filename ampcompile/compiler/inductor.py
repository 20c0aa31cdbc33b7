"""Inductor as we use it: the key of its caches, its settings, and decompositions where its own are wrong.

Our decompositions are for the CPU, where Inductor's are slow or inexact, and for calls that its patterns get wrong: a
pattern matches a call whatever keyword arguments it has, and forgets those that it doesn't name. Beside a product `add`
and `sub` lose `alpha` (https://github.com/pytorch/pytorch/issues/167313). Ours leave no such call to a pattern.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ampcompile.config import Options
from ampcompile.dtypes import LOW
from ampcompile.kernels.attention_backward import FLASH_BACKWARD, attention_backward
from ampcompile.passes.analysis.products import WideProducts
from ampcompile.torch_private import lowering, tracing

# These rooms don't affect compiled graphs: they use the compiler, or work around a graph. Only `weights/spec.py` does.
_WITHOUT = frozenset({"command_line", "insight", "optim", "records", "scaler", "timing", "weights"})
ATEN = torch.ops.aten
EMBEDDING_BACKWARD = ATEN.embedding_dense_backward.default
NORMS = (
    ATEN.native_layer_norm.default,
    ATEN.native_group_norm.default,
    ATEN.native_batch_norm.default,
    ATEN._native_batch_norm_legit.default,
    ATEN._native_batch_norm_legit.no_stats,
    ATEN._native_batch_norm_legit_functional.default,
    ATEN._batch_norm_with_update.default,
    ATEN._batch_norm_with_update_functional.default,
)


def settings_for(gm: GraphModule, inputs: Sequence[Any], options: Options, **more: Any) -> dict[str, Any]:
    """Inductor's settings for a graph. Those in `more` beat ours, and the user's beat both."""
    rounding = lowering.config_for_rounding(options.numerics == "eager", inputs)
    return rounding | lowering.config_for_bodies(gm) | more | dict(options.inductor)


def cache_key(wide: WideProducts) -> str:
    """The key of what compiled code depends on besides the graph: the package, the CPU's vectors and units.

    Inductor's own keys leave out the CPU's vectors: code that it wrote for AVX-512 is wrong when compiled for AVX2.
    """
    return f"{source_key()} {torch.backends.cpu.get_cpu_capability()} {wide}"


@cache
def source_key() -> str:
    """The key of the installed package, computed once per process, when the first graph is lowered."""
    return lowering.hash_of_files(covered_files())


def covered_files() -> list[Path]:
    """The package's files that the key covers, passes, kernels and their C++ included."""
    rooms = [find_spec(f"ampcompile.{name}") for name in ("passes", "kernels")]  # elsewhere in an editable install
    folders = [Path(folder) for room in rooms if room is not None for folder in room.submodule_search_locations or ()]
    own = Path(__file__).parents[1]
    folders += [folder for folder in own.iterdir() if folder.is_dir() and folder.name not in _WITHOUT]
    inside = (path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    return sorted({*own.glob("*.py"), own / "weights" / "spec.py", *inside})


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's table of decompositions with ours added."""
    table = lowering.inductors_decompositions(kept=[EMBEDDING_BACKWARD])
    embedding_backward = table[EMBEDDING_BACKWARD]

    def embedding_dense_backward(grad: Tensor, *args: Any) -> Any:
        """Keep eager's kernel on the CPU, which adds whole rows; Inductor's loop adds each number atomically."""
        return NotImplemented if grad.device.type == "cpu" else embedding_backward(grad, *args)

    table[EMBEDDING_BACKWARD] = embedding_dense_backward
    table |= {norm: _with_exact_statistics(table[norm]) for norm in NORMS if norm in table}
    table[FLASH_BACKWARD] = attention_backward
    table[ATEN.expm1.default] = _expm1
    table |= dict.fromkeys((ATEN.remainder.Tensor, ATEN.remainder.Scalar, ATEN.remainder.Scalar_Tensor), _remainder)
    if (fp8 := sys.modules.get("ampcompile.kernels.fp8")) is not None:  # a graph has its ops
        table |= fp8.DECOMPOSITIONS
    table |= {
        op: partial(rewrite, op, table.get(op, lambda *_, **__: NotImplemented)) for op, rewrite in REWRITTEN.items()
    }
    return table


def _expm1(x: Tensor) -> Any:
    """Keep the digits of small numbers on the CPU, where Inductor's vectors compute exp(x) - 1."""
    if x.device.type != "cpu" or not x.is_floating_point():
        return NotImplemented
    wide = x.float() if x.itemsize == 2 else x
    half = (wide / 2).tanh()
    return torch.where(wide < 1, 2 * half / (1 - half), wide.exp() - 1).to(x.dtype)


def _remainder(x: Any, y: Any) -> Any:
    """Compute exact remainders of large numbers on the CPU, where Inductor's vectors subtract a rounded product."""
    tensors = [operand for operand in (x, y) if isinstance(operand, Tensor)]
    if any(operand.device.type != "cpu" or not operand.is_floating_point() for operand in tensors):
        return NotImplemented
    dtype = torch.result_type(x, y)
    x, y = (operand.float() if isinstance(operand, Tensor) and operand.itemsize == 2 else operand for operand in (x, y))
    rest = torch.fmod(x if isinstance(x, Tensor) else torch.full_like(y, x), y)
    return torch.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest).to(dtype)


def _scaled_sum(op: Any, keep: Callable[..., Any], x: Tensor, y: Tensor, *, alpha: float = 1) -> Any:
    """`x + alpha * y`, or the difference: in 16 bits rounded once, after a sum in float32, as eager's kernels do.

    On a GPU Inductor computes an `addcmul` without a rounding between, too.
    """
    dtype = torch.result_type(x, y)
    if alpha == 1 or not (isinstance(x, Tensor) and isinstance(y, Tensor) and dtype.is_floating_point):
        return keep(x, y, alpha=alpha)
    if dtype in LOW and x.device.type == y.device.type == "cpu" and isinstance(alpha, int | float):
        with tracing.on_real_tensors():
            alpha = torch.tensor(alpha, dtype=dtype, device="cpu").item()
    wide = torch.float32 if dtype in LOW else dtype
    factor = -alpha if op is ATEN.sub.Tensor else alpha
    return torch.addcmul(x.to(wide), y.to(wide), y.new_ones((), dtype=wide), value=factor).to(dtype)


def _scaled_product(
    op: Any, keep: Callable[..., Any], x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    """`beta * x + alpha * a @ b` as a batch of one, which no pattern takes apart; `x` isn't read if `beta` is 0."""
    if beta == 0:
        return op(x.new_zeros(1), a, b, alpha=alpha)
    if op is ATEN.addmm.default and not beta == alpha == 1:
        return torch.baddbmm(x, a.unsqueeze(0), b.unsqueeze(0), beta=beta, alpha=alpha).squeeze(0)
    return keep(x, a, b, beta=beta, alpha=alpha)


def _converted_sum(op: Any, keep: Callable[..., Any], x: Tensor, *args: Any, dtype: torch.dtype | None = None) -> Any:
    """A sum in another dtype as a sum of converted numbers."""
    return keep(x, *args, dtype=dtype) if dtype in (None, x.dtype) else op(x.to(dtype), *args)


def _rounded_once(op: Any, keep: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    """Compute an op on 16-bit numbers in float32 and round its result, as eager's kernels do."""
    if x.dtype not in LOW:
        return keep(x, *args)
    wide = (operand.float() if isinstance(operand, Tensor) else operand for operand in args)
    return op(x.float(), *wide).to(x.dtype)


REWRITTEN: dict[Any, Callable[..., Any]] = {
    ATEN.add.Tensor: _scaled_sum,
    ATEN.sub.Tensor: _scaled_sum,
    ATEN.addmm.default: _scaled_product,
    ATEN.baddbmm.default: _scaled_product,
    ATEN.sum.dim_IntList: _converted_sum,
    ATEN.cumsum.default: _converted_sum,
    **dict.fromkeys((ATEN.glu.default, ATEN.lerp.Scalar, ATEN.lerp.Tensor), _rounded_once),
}
"""Calls whose keyword arguments some pattern forgets, and ops that Inductor's code rounds on the way to the result."""


def _with_exact_statistics(decompose: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a norm's statistics in float32 for the backward, as eager's kernels do: with a 16-bit input and float32
    weights Inductor rounds mean and deviation on the CPU, and gradients are then a fifth further from float64."""

    def norm(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if x.device.type != "cpu" or x.itemsize != 2 or all(t.dtype != torch.float32 for t in tensors):
            return decompose(x, *args, **kwargs)
        out, *others = decompose(x.float(), *args, **kwargs)
        return out.to(x.dtype), *others

    return norm
