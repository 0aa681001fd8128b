"""What groups of settings have in common, and what is wrong with a value in one line."""

from __future__ import annotations

import json
from difflib import get_close_matches

from pydantic import BaseModel, ConfigDict, ValidationError

from blend_core.errors import one_line

__all__ = ["Section", "validation_line"]


class Section(BaseModel):
    """A group of settings: immutable, no unknown keys, no silent casts such as "3" to 3."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted names of all settings of a model and its sections."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        key = f"{prefix}{field.alias or name}"
        if isinstance(kind, type) and issubclass(kind, Section):
            found += _known_keys(kind, f"{key}.")
        found.append(key)
    return found


def validation_line(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """What is wrong, by key; for an unknown key the nearest one of the model that was read."""
    parts = []
    for item in error.errors(include_url=False):
        place = ".".join(str(part) for part in item["loc"])
        key = f"{prefix}{place}" or "experiment"
        if item["type"] == "extra_forbidden":
            near = get_close_matches(place, _known_keys(model), 1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else ""
            parts.append(f"{key}: unknown key{hint}")
            continue
        text = item["msg"].removeprefix("Value error, ")
        shown = item.get("input")
        value = (
            "" if isinstance(shown, (dict, BaseModel)) else f" = {json.dumps(shown, default=str)}"
        )
        parts.append(f"{key}{value}: {text[:1].lower()}{text[1:]}")
    return one_line("; ".join(parts))
