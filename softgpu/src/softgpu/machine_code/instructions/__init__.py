"""All machine instructions that are known, as rows of tables, by name."""

from softgpu.machine_code.instructions import accesses, control, floating, integer
from softgpu.program import by_name

TABLE = by_name(row for kind in (integer, floating, accesses, control) for row in kind.ROWS)
