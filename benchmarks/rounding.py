"""Which ops between products give eager autocast's bits when compiled: every bfloat16 number, op by op.

python -m benchmarks.rounding writes docs/numerics.md for the torch it runs on.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

PAGE = Path(__file__).parents[1] / "docs" / "numerics.md"

OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a + b": lambda a, b: a + b,
    "a * b": lambda a, b: a * b,
    "a / b": lambda a, b: a / b,
    "a * b + b": lambda a, b: a * b + b,
    "a * sigmoid(b)": lambda a, b: a * b.sigmoid(),
    "sigmoid": lambda a, b: a.sigmoid(),
    "tanh": lambda a, b: a.tanh(),
    "exp": lambda a, b: a.exp(),
    "silu": lambda a, b: F.silu(a),
    "relu": lambda a, b: F.relu(a),
    "sqrt": lambda a, b: a.abs().sqrt(),
    "gelu": lambda a, b: F.gelu(a),
    "gelu, tanh": lambda a, b: F.gelu(a, approximate="tanh"),
    "elu": lambda a, b: F.elu(a),
    "softplus": lambda a, b: F.softplus(a),
    "a + 0.1": lambda a, b: a + 0.1,
    "1.1 - a": lambda a, b: 1.1 - a,
    "a * 0.1": lambda a, b: a * 0.1,
    "add(a, b, alpha=0.3)": lambda a, b: torch.add(a, b, alpha=0.3),
    "lerp(a, b, 0.3)": lambda a, b: torch.lerp(a, b, 0.3),
}


def operands() -> tuple[Tensor, Tensor]:
    """Every finite bfloat16 number, and as many random ones, float32 so that autocast has something to cast."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = patterns[patterns.isfinite()]
    return finite, torch.randn(len(finite)).to(torch.bfloat16)


def differing(numerics: str) -> dict[str, tuple[float, float]]:
    """Per op the share of elements that differ from eager: (normal numbers, denormal numbers)."""
    a, b = operands()

    def every(a: Tensor, b: Tensor) -> list[Tensor]:
        return [op(a, b) for op in OPS.values()]

    found = torch.compile(every, backend="amp", options={"numerics": numerics})(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        eager = every(a, b)
    tiny = torch.finfo(torch.bfloat16).tiny
    shares = {}
    for name, ours, theirs in zip(OPS, found, eager, strict=True):
        differs = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
        normal = (a.abs() >= tiny) & ((theirs.abs() >= tiny) | (theirs == 0) | theirs.isnan())
        shares[name] = (differs[normal].float().mean().item(), differs[~normal].float().mean().item())
    return shares


def shown(share: float) -> str:
    """A share of elements in percent; the empty share says so."""
    return "equal" if share == 0 else f"{100 * share:.2g} %"


def main() -> None:
    """Measure and write the page."""
    eager, relaxed = differing("eager"), differing("relaxed")
    rows = [f"| `{op}` | {shown(eager[op][0])} | {shown(eager[op][1])} | {shown(relaxed[op][0])} |" for op in OPS]
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(
        "# Rounding between products\n\n"
        'With `numerics="eager"`, the default, a value that eager autocast would have stored in 16 bits is rounded '
        'to 16 bits inside a fused kernel too (in registers: no memory traffic). With `"relaxed"` it stays in '
        "float32 until the kernel ends, as Inductor does by itself; that is never further from float64.\n\n"
        "Share of elements whose bits differ from eager autocast's, over every finite bfloat16 number; products "
        "themselves are the same oneDNN calls. Written by `python -m benchmarks.rounding`, on "
        f"torch {torch.__version__}, {platform.machine()} CPU ({torch.backends.cpu.get_cpu_capability()}).\n\n"
        "| op on bfloat16 | `eager`, normal numbers | `eager`, denormal | `relaxed`, normal numbers |\n"
        "|---|--:|--:|--:|\n" + "\n".join(rows) + "\n\n"
        "Ops with Python scalars differ where eager rounds the scalar to the tensor's type and the kernel does not, "
        "or the other way round. On torch 2.11 Inductor ignores the setting on the CPU: there the `relaxed` column "
        "holds for both. What the rounding costs in time is in the benchmarks (amp against amp relaxed).\n\n"
        "The backward of `scaled_dot_product_attention` on the CPU, without dropout, isn't torch's flash kernel: with "
        "AVX512-BF16, without AMX, it is a kernel of ours (bfloat16, 16 dividing the features of a head), and "
        "elsewhere, up to 128 tokens and without a mask, products over all heads in float32. Both start from torch's "
        "own forward result, and their gradients are on average no further from float64 than the flash kernel's, not "
        "the same bits. The kernel rounds what the flash kernel rounds, but adds up the gradients of keys and values "
        "in float32 to the end; its times are in the benchmarks. Norms are another place: with 16-bit input and "
        "float32 weights, Inductor on the CPU rounds the mean and deviation that it keeps for the backward; here, in "
        "both modes, they stay in float32, as in eager's kernels.\n"
    )
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
