"""All instructions that are known, as rows of tables, by name; one file for each kind."""

from softgpu.program import by_name
from softgpu.ptx.instructions import accesses, bits, control, conversions, floating, integer, warps

KINDS = (floating, integer, bits, conversions, accesses, warps, control)
TABLE = by_name(row for kind in KINDS for row in kind.ROWS)
