"""The `[tool.flwr.app]` part of pyproject.toml, generated from the schema of an experiment.

`python -m deploy.app_config` prints it. Every key is empty, which means "not set": the preset's
value, then the default. So `flwr run . --run-config "rounds=3 method.gamma=0.3"` works, and wrong
keys are refused by Flower, wrong values by the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from blend_core.config import Experiment
from blend_core.methods import BUILT_IN, config_class
from blend_core.settings import CARRIER_KEYS
from deploy.engine import COMPONENTS

EMPTY = '""'
# Flower's own local simulation has two nodes unless it is told otherwise.
SET = {"clients": "2", "preset": '"quickstart"'}

HEAD = """\
[tool.flwr.app]
publisher = "blend"
# No code travels: every site runs its installed package, whose version the server checks.
fab-include = ["LICENSE"]

[tool.flwr.app.components]
"""


def app_config() -> str:
    """The TOML text, with one commented line per setting."""
    components = "".join(f'{key} = "{value}"\n' for key, value in COMPONENTS.items())
    lines = [HEAD + components, "[tool.flwr.app.config]"]
    helps = {**CARRIER_KEYS, **dict(_settings(Experiment, "")), **_method_settings()}
    lines += [f"{key} = {SET.get(key, EMPTY)} # {text}" for key, text in helps.items()]
    return "\n".join(lines) + "\n"


def _method_settings() -> dict[str, str]:
    """Key -> help of the methods that have it, named before it unless all of them do."""
    owners: dict[str, dict[str, list[str]]] = {}
    for name in BUILT_IN:
        for key, text in _settings(config_class(name), "method."):
            owners.setdefault(key, {}).setdefault(text, []).append(name)
    found = {}
    for key, texts in owners.items():
        parts = (
            text if len(names) == len(BUILT_IN) else f"{', '.join(names)}: {text}"
            for text, names in texts.items()
        )
        found[key] = "; ".join(parts)
    return found


def _settings(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        key = f"{prefix}{field.alias or name}"
        if key == "method":
            continue
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _settings(kind, f"{key}.")
        else:
            yield key, field.description or ""


if __name__ == "__main__":
    print(app_config(), end="")
