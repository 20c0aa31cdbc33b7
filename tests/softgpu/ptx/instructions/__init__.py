"""All instructions that are known, as rows of tables, by name; one file for each kind."""

from tests.softgpu.ptx.instructions import accesses, bits, control, conversions, floating, integer, warps
from tests.softgpu.ptx.operation import Row

TABLE: dict[str, list[Row]] = {}
for kind in (floating, integer, bits, conversions, accesses, warps, control):
    for row in kind.ROWS:
        for name in row.names.split():
            TABLE.setdefault(name, []).append(row)
