"""python -m tests.behaviour.op_table   single ops on 16-bit numbers: Inductor's code for amp's graph beside eager's.

Prints those whose bits differ from eager autocast's, as docs/numerics.md shows them: the share of elements, the largest
distance in units in the last place of the larger value, and which is nearer to float64 where they differ.
"""

import warnings

import torch
from torch import Tensor

from tests.behaviour.programs import BINARY, CONSTANTS, REDUCING, SCALAR, UNARY, Chain, spelled, together
from tests.compiling import HALF, LOW, amp, bits

ROWS, COLUMNS = 512, 384
OPS = [*UNARY.split(), *SCALAR.split(), *BINARY.split(), *REDUCING.split()]


def row(ours: Tensor, eager: Tensor, exact: Tensor) -> str:
    """The cell of one op and type."""
    differs = bits(ours) != bits(eager)
    share = differs.float().mean().item()
    if not share:
        return "equal"
    a, b, e = (each[differs].double() for each in (ours, eager, exact))
    unit = torch.finfo(ours.dtype).eps * torch.maximum(a.abs(), b.abs()).log2().floor().exp2()
    mine, eagers = ((each - e).abs().nanmean().item() for each in (a, b))
    nearer = "Inductor" if mine < 0.95 * eagers else "eager" if eagers < 0.95 * mine else "neither"
    return f"{100 * share:.2g} %, {((a - b).abs() / unit).nan_to_num(0).max():.0f}, {nearer}"


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    chains = [Chain((f"y = {spelled(op, {'C': CONSTANTS['C'][0]})}",), (ROWS, COLUMNS)) for op in OPS]
    draw = torch.Generator().manual_seed(0)
    y, b = (torch.randn(ROWS, COLUMNS, generator=draw) * 2 for _ in range(2))
    r, s, m = torch.randn(COLUMNS, generator=draw), torch.randn((), generator=draw), torch.zeros(1, 1)
    cells: dict[str, list[str]] = {}
    for dtype in (LOW, HALF):
        for start in range(0, len(OPS), 24):
            part, given = chains[start : start + 24], [y, b, r, s, m] * len(chains[start : start + 24])
            run = together(part)
            with torch.no_grad():
                ours = amp(run, dtype=dtype, lower="inductor", range_guards=False)[0](
                    torch.empty(1, dtype=dtype), *given
                )
                with torch.autocast("cpu", dtype):
                    eager = run(torch.empty(1, dtype=dtype), *given)
                exact = run(torch.empty(1, dtype=torch.float64), *(each.to(dtype).double() for each in given))
            for chain, *values in zip(part, ours, eager, exact, strict=True):
                cells.setdefault(chain.steps[0][4:], []).append(row(*values))
    for op, found in cells.items():
        if found != ["equal"] * 2:
            print(f"| `{op}` | {' | '.join(found)} |")
    print(f"equal: {', '.join(op for op, found in cells.items() if found == ['equal'] * 2)}")


if __name__ == "__main__":
    main()
