"""What backward keeps, added up: equal layers in one row, the largest first; and what else is alive beside it."""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rich.table import Table
from torch import Tensor

from ampcompile.dtypes import short_name
from ampcompile.records.graphs import CastRecord, SavedRecord, plain
from ampcompile.torch_private import storages

from .show import human_bytes, table

MODULES = 16  # most rows of the text's table


class SavedTotals(NamedTuple):
    """Bytes that are alive between forward and backward."""

    backward: int
    """Kept by backward, alone or with the caller: what autograd holds, weights, copies and arguments aside."""
    results: int
    """Of results that only the caller holds."""
    freed: int
    """What a loss within the compiled function would free of these, at least."""
    alive: int
    """What backward reads and is alive anyway: weights, copies, arguments."""


class SavedRow(NamedTuple):
    """Equal values of repeated layers: the first of them, with `*` for the numbers of layers if there are more."""

    first: SavedRecord
    times: int
    bytes: int


def fold_layers(path: str) -> str:
    """Replace numbers in a path, `blocks.3.mlp` by `blocks.*.mlp`, so that rows of repeated layers are merged."""
    return re.sub(r"(?<![^. ])\d+(?![^., ])", "*", path)


def add_up_values(records: Iterable[SavedRecord]) -> list[SavedRow]:
    """Rows of equal values that are kept for backward, repeated layers folded, the largest first."""
    return _add_up(
        records, lambda r: (r.op, fold_layers(r.module), r.source, r.shape, r.kept_as, fold_layers(r.because))
    )


def add_up_modules(records: Iterable[SavedRecord]) -> list[SavedRow]:
    """Rows of the modules whose values are kept for backward, repeated layers folded, the largest first."""
    return _add_up(records, lambda r: fold_layers(r.module))


def _add_up(records: Iterable[SavedRecord], key: Callable[[SavedRecord], Hashable]) -> list[SavedRow]:
    groups: dict[Hashable, list[SavedRecord]] = {}
    for record in records:
        if not record.alive_anyway:
            groups.setdefault(key(record), []).append(record)
    rows = []
    for equal in groups.values():
        first = equal[0]
        if len({record.module for record in equal}) > 1:
            first = replace(first, module=fold_layers(first.module), because=fold_layers(first.because))
        rows.append(SavedRow(first, len(equal), sum(record.bytes for record in equal)))
    return sorted(rows, key=lambda row: -row.bytes)


def rows_for_page(records: Sequence[SavedRecord]) -> dict[str, list[dict[str, Any]]]:
    """Plain data of the rows, by module and by value."""
    return {
        "modules": [{"module": first.module, "times": n, "bytes": size} for first, n, size in add_up_modules(records)],
        "values": [
            {name: plain(getattr(first, name)) for name in ("op", "module", "source", "shape", "because")}
            | {"dtype": short_name(first.kept_as), "times": n, "bytes": size}
            for first, n, size in add_up_values(records)
        ],
    }


def bytes_of_caller(
    results: Iterable[Tensor], theirs: Iterable[Tensor], casts: Sequence[CastRecord], saved: Iterable[SavedRecord]
) -> tuple[int, int]:
    """Bytes of the results that only the caller holds, and how many of these a loss within the graph would free.

    `theirs`: tensors that were there before. `casts`: of results, after the call. A loss within reads what was cast.
    """
    seen, held, freed = {storages.storage_key(storages.local_part(tensor)) for tensor in theirs}, 0, 0
    cast = Counter((record.shape, record.dtype_to) for record in casts)
    both = Counter((record.shape, record.dtype) for record in saved if record.of == "result")
    for result in map(storages.local_part, results):
        like = (tuple(result.shape), result.dtype)
        if (key := storages.storage_key(result)) in seen:
            continue
        seen.add(key)
        if cast[like]:
            cast[like] -= 1
            freed += result.numel() * 2 if result.requires_grad and result.numel() > 1 else 0
        elif both[like]:
            both[like] -= 1
            continue
        held += result.numel() * result.itemsize
    return held, freed


def saved_table(records: Sequence[SavedRecord], totals: SavedTotals) -> Table:
    """The text's table: bytes by module, then the totals."""
    rows = add_up_modules(records)
    shown, rest = rows[:MODULES], rows[MODULES:]
    lines = [(row.first.module or "(none)", row.times, row.bytes) for row in shown]
    lines += [(f"{len(rest)} others", sum(r.times for r in rest), sum(r.bytes for r in rest))] if rest else []
    kept = sum(row.times for row in rows)
    lines += [
        ("in all", kept, totals.backward),
        ("alive anyway: weights, copies, arguments", len(records) - kept, totals.alive),
    ]
    lines += [("results that only the caller holds", 0, totals.results)] if totals.results else []
    lines += [("of these, a loss in the compiled function frees", 0, totals.freed)] if totals.freed else []
    texts = [(name, str(times or ""), human_bytes(size)) for name, times, size in lines]
    return table(["kept for backward, by module"], ["values", "bytes"], texts)
