"""All machine instructions that are known, as rows of tables, by name."""

from tests.softgpu.machine_code.instructions import accesses, control, floating, integer
from tests.softgpu.machine_code.operation import Row

TABLE: dict[str, list[Row]] = {}
for kind in (integer, floating, accesses, control):
    for row in kind.ROWS:
        for name in row.names.split():
            TABLE.setdefault(name, []).append(row)
