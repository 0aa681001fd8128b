"""Names for what differs in nothing but some settings: rows of a table, runs of a sweep."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that are not equal in all of these; a missing one differs from any value."""
    keys = sorted({key for config in configs for key in config})
    # Dates, which YAML knows, are refused later, by the schema.
    return [
        key
        for key in keys
        if len({json.dumps(c.get(key, "\0"), sort_keys=True, default=str) for c in configs}) > 1
    ]


def settings_label(
    settings: Mapping[str, Any], keys: Sequence[str], text: Callable[[Any], str]
) -> str:
    """E.g. "gamma=0.2 lr=0.001"; the whole key where two of them end alike.

    What is None is left out: an unset setting is the plain case, and others show theirs.

    Args:
        settings: dotted key -> value.
        keys: which of them to show, in this order.
        text: how to write a value.
    """
    ends = {key: key.rpartition(".")[2] for key in keys if settings[key] is not None}
    count = Counter(ends.values())
    return " ".join(
        f"{end if count[end] == 1 else key}={text(settings[key])}" for key, end in ends.items()
    )
