"""Where older pickles of reports, audits and modules find their classes: modules under the names they had."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

MOVED = {
    "audit_numbers": "auditing.numbers",
    "audit_records": "auditing.records",
    "audit_result": "auditing.result",
    "estimate": "passes.analysis.product_cost",
    "precision_class": "precision",
    "report": "explaining.report",
    "report_graph": "records.graph",
    "report_records": "records.casts",
    "report_totals": "records.totals",
}


class _Moved(ModuleType):
    """Looks its names up in the module that has them now."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        package, _, old = self.__name__.rpartition(".")
        return getattr(importlib.import_module(f"{package}.{MOVED[old]}"), name)


def install() -> None:
    """Let the older names be imported."""
    for old in MOVED:
        name = f"{__package__}.{old}"
        sys.modules.setdefault(name, _Moved(name, f"See `{__package__}.{MOVED[old]}`."))
