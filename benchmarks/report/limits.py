"""How close figures come to what the machine reached in the same run."""

from dataclasses import dataclass

from benchmarks.records import Records, Row, spread


def rate(row: Row, figure: str) -> float:
    """Bytes or flops a second."""
    return row.figures[figure] / spread(row.figures["seconds"]).middle


@dataclass(frozen=True)
class Limits:
    """What a copy and a matrix product reached."""

    bandwidth: float
    """Bytes a second, read and written."""
    products: dict[str, float]
    """Flops a second, by dtype."""

    def share(self, row: Row) -> str:
        """The bandwidth that a row reached of a copy's, counting the bytes that it must move; else nothing."""
        return f"{100 * rate(row, 'bytes') / self.bandwidth:.0f} %" if "bytes" in row.figures else ""

    def __str__(self) -> str:
        products = (f"{most / 1e9:.0f} Gflop/s in {dtype}" for dtype, most in self.products.items())
        return (
            f"A copy moves {self.bandwidth / 1e9:.1f} GB/s; matrix products reach {' and '.join(products)}. "
            "What is written over its own input can go beyond the copy, which on a CPU also fetches what it overwrites."
        )


def measured_limits(records: Records) -> Limits | None:
    """The limits that a run measured, if it did."""
    alone = {case: rows["torch"] for case, rows in records.cases("kernels").items() if "torch" in rows}
    if "copy" not in alone:
        return None
    products = {case.split(", ")[1]: row for case, row in alone.items() if case.startswith("matrix product")}
    return Limits(rate(alone["copy"], "bytes"), {dtype: rate(row, "flops") for dtype, row in products.items()})
