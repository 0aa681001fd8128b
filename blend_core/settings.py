"""Reads an experiment from where people and Flower write it: presets, YAML, `--set`, run-config.

Precedence is defaults < file < `--set`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from blend_core.config import Experiment, parse_experiment
from blend_core.errors import ConfigError
from blend_core.methods import method_names

# Keys of the run-config that are not settings of the experiment, and what they are for.
CARRIER_KEYS = {
    "experiment": "of the blend command: all settings at once",
    "preset": "preset or YAML file whose values hold where nothing else is given",
    "out": "new folder of the run, on the server",
    "federation": "name of the run's folder of private state at the sites; unset: run-NUMBER",
    "engine": "of the blend command",
    "started": "of the blend command",
    "resume": "true: go on with the run in out",
}


def experiment_from_run_config(settings: Mapping[str, Any]) -> Experiment:
    """The experiment that Flower's run-config carries.

    The `blend` command sends it whole, as JSON under `experiment`. `flwr run .` gives single
    keys over those of `preset`; an empty text means "not set".

    Raises:
        ConfigError: one line that names the key.
    """
    whole = settings.get("experiment")
    if whole:
        try:
            return parse_experiment(json.loads(str(whole)))
        except ValueError as error:
            raise ConfigError(f"run-config experiment: not valid JSON: {error}") from None
    given: dict[str, Any] = {}
    for key, value in settings.items():
        if key in CARRIER_KEYS or value == "":
            continue
        listed = isinstance(value, str) and value.startswith("[")
        given[key] = yaml_value(value, key) if listed else value
    preset = settings.get("preset")
    return parse_experiment(_override(read_yaml(str(preset)) if preset else {}, given))


def preset_names(kind: str = "configs") -> list[str]:
    """Names of the experiments that come with the package, or of its grids (kind "sweeps")."""
    folder = resources.files("blend_core") / kind
    return sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml"))


def load_experiment(source: str | None, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment from a preset name or a YAML file and apply `key=value` overrides.

    Args:
        source: name of a preset (`preset_names`), path of a YAML file, or None for quickstart.
        overrides: e.g. ["rounds=3", "method.gamma=0.3"]; values are YAML.

    Raises:
        ConfigError: no such file, not YAML, unknown key, wrong type or value.
    """
    settings = parse_overrides(overrides)
    return _with_full_paths(
        parse_experiment(_override(read_yaml(source or "quickstart"), settings))
    )


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Dotted keys and values of `key=value` texts; values are YAML, a later one wins.

    Raises:
        ConfigError: no `=`, no key, or not YAML.
    """
    settings: dict[str, Any] = {}
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"--set {text}: expected key=value, e.g. --set rounds=3")
        settings[key.strip()] = yaml_value(value, f"--set {text}")
    return settings


def _with_full_paths(experiment: Experiment) -> Experiment:
    """Paths count from where the user is, not from where a worker runs."""

    def full(path: str) -> str:
        expanded = Path(path).expanduser()
        # Path.exists() raises where a name is too long.
        return str(expanded.absolute()) if os.path.exists(expanded) else path

    backbone, data = experiment.backbone, experiment.data
    weights = {"name": full(backbone.name), "weights": full(backbone.weights)}
    if not backbone.name.endswith(".json"):
        del weights["name"]
    changes: dict[str, Any] = {"backbone": backbone.model_copy(update=weights)}
    paths = {key: getattr(data, key) for key in ("root", "manifest")}
    changes["data"] = data.model_copy(
        update={key: full(path) for key, path in paths.items() if path is not None}
    )
    return experiment.model_copy(update=changes)


def _override(data: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Put settings with dotted keys over the data of a file.

    Another method does not inherit the fields that the file sets for its own.
    """
    name = settings.get("method.name")
    method = data.get("method")
    if name is not None and isinstance(method, dict) and method.get("name", "blend") != name:
        data["method"] = {"name": name}
    for key, value in settings.items():
        _assign(data, key, value)
    return data


def read_yaml(source: str, kind: str = "configs") -> dict[str, Any]:
    """The mapping in a YAML file or in a preset.

    Args:
        source: name of a preset of this kind, or path of a file.
        kind: "configs" (experiments) or "sweeps" (grids).

    Raises:
        ConfigError: no such file, not YAML, or no mapping.
    """
    preset = resources.files("blend_core") / kind / f"{source}.yaml"
    names = preset_names(kind)
    if source in names:
        text = preset.read_text(encoding="utf-8")
    else:
        path = Path(source)
        if not path.is_file():
            if kind == "configs" and source in method_names():
                raise ConfigError(
                    f"{source} is a method without a preset: --set method.name={source}"
                )
            raise ConfigError(f"{source}: no such file, and not a preset ({', '.join(names)})")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: cannot be read: {error}") from None
    data = yaml_value(text, source)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected a mapping of settings at the top level")
    return data


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as in YAML 1.2, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; a repeated key would silently win over the first."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    """A number that everybody reads alike; in YAML 1.1 010 is 8, 1:30 is 90 and 1_0 is 10."""
    text = node.value
    if re.search(r"[_:xXbo]|^[-+]?0\d", text):
        raise yaml.constructor.ConstructorError(
            None,
            None,
            f"{text}: write numbers in plain digits, and texts in quotes",
            node.start_mark,
        )
    return int(text) if node.tag.endswith(":int") else loader.construct_yaml_float(node)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _number)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def yaml_value(text: str, where: str) -> Any:
    """The value that a YAML text means. Raises `ConfigError` that begins with `where`."""
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # The library lets errors of odd scalars through as they are.
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def _assign(data: dict[str, Any], key: str, value: Any) -> None:
    *groups, last = key.split(".")
    for group in groups:
        data = data.setdefault(group, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{key}: {group} is a value, not a group of settings")
    data[last] = value


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name, e.g. "train.lr": the way `--set` writes them."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
