"""The numbers that the two papers print, as `assets/paper_tables.yaml` holds them (PROTOCOL 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml


@dataclass(frozen=True)
class Printed:
    """One printed number.

    Attributes:
        value: percent, or points for a standard deviation; None: the papers do not print it.
        barred: why it must never be compared with; None: it may be.
    """

    value: float | None
    barred: str | None = None


def read_paper_tables() -> dict[str, Any]:
    """The packaged file, parsed."""
    file = resources.files("blend_core") / "assets" / "paper_tables.yaml"
    tables: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return tables


def printed(tables: Mapping[str, Any], path: str | None, metric: str) -> Printed:
    """Look up a number.

    Args:
        tables: what `read_paper_tables` returns.
        path: dotted keys of a row, e.g. "blend.main_table.datasets.dtd.blend", whose value is a
            mapping of metrics, or the number itself where a table has one metric; None: no path.
        metric: e.g. "hmean".
    """
    node: Any = tables
    barred = None
    for key in path.split(".") if path else []:
        node = node.get(key) if isinstance(node, Mapping) else None
        if isinstance(node, Mapping) and node.get("comparable") is False:
            barred = str(node["why"])
    if isinstance(node, Mapping):
        node = node.get(metric)
    return Printed(None if node is None else float(node), barred)
