"""The typed experiment: every choice of a run, with help, unit and range.

One schema serves YAML files, `--set a.b=value`, Flower's run-config and the results. Precedence
is defaults < file < `--set`. An unknown key, a wrong type or a value out of range is one line
that names the key, the value and what is allowed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, ValidationError, model_validator

from blend_core.errors import ConfigError, one_line


class Section(BaseModel):
    """A group of settings: immutable, no unknown keys, no silent casts such as "3" to 3."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class MethodConfig(Section):
    """What every method has. A method's own fields are declared beside its equations."""

    name: str = Field(description="name of the method, e.g. blend or zero-shot")


class BackboneConfig(Section):
    """Which frozen CLIP."""

    name: str = Field(
        "blend-tiny",
        description="open_clip model name, or a path to an open_clip model description (.json)",
    )
    weights: str = Field(
        "builtin",
        description="builtin (blend-tiny only), an open_clip tag such as openai, or a local file "
        "(.safetensors, state-dict .pt, OpenAI TorchScript .pt)",
    )
    quick_gelu: bool | None = Field(
        None,
        description="force QuickGELU on or off; unset: as the model's description says, and "
        "OpenAI weights without it are refused",
    )


class DataConfig(Section):
    """Which images, which classes, and how they are dealt to clients."""

    kind: Literal["shapes", "folders"] = Field(
        "shapes", description="shapes: the built-in benchmark; folders: one folder per client"
    )
    root: str | None = Field(
        None, description="folders only: the folder that holds one folder per client"
    )
    template: str = Field(
        "a photo of a {}.", description="prompt; {} is the class name, exactly once"
    )
    label_space: Literal["node", "federation"] = Field(
        "node",
        description="folders only: node keeps every site's class names at the site; federation "
        "uses data.classes everywhere",
    )
    classes: list[str] = Field(
        default_factory=list, description="folders with label_space federation: the class names"
    )
    shots: int = Field(
        16, ge=1, le=1000, description="shapes only: training images per base class, federation"
    )
    test_per_class: int = Field(
        10, ge=1, le=1000, description="shapes only: test images per class and client"
    )
    split: Literal["benchmark", "development"] = Field(
        "benchmark",
        description="shapes only: benchmark, or the development classes, on which "
        "hyper-parameters may be chosen",
    )
    style_spread: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="shapes only: how far clients' styles lie apart (0: all alike)",
    )
    alpha: float = Field(
        0.01,
        gt=0.0,
        le=1000.0,
        description="shapes only: Dirichlet concentration of a class over clients",
    )
    boost: float = Field(
        1.0, ge=0.0, le=1000.0, description="shapes only: added for a class's preferred client"
    )
    fewshot_seed: int | None = Field(
        None, ge=0, description="which images are drawn; unset: the run's seed"
    )
    partition_seed: int | None = Field(
        None, ge=0, description="who gets which image; unset: the run's seed"
    )

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if self.template.count("{}") != 1:
            raise ValueError(f"template {self.template!r} must contain {{}} exactly once")
        if self.kind == "folders" and self.label_space == "federation" and not self.classes:
            raise ValueError("label_space federation needs data.classes, the list of class names")
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("classes must not repeat a name")
        return self


class TrainConfig(Section):
    """One local update."""

    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="fresh in every local update")
    lr: float = Field(0.0015, gt=0.0, le=10.0, description="learning rate, constant")
    weight_decay: float = Field(5e-4, ge=0.0, le=1.0, description="weight decay")
    momentum: float = Field(0.9, ge=0.0, lt=1.0, description="sgd only")
    batch_size: int = Field(16, ge=1, le=65536, description="images per step; last batch is kept")
    local_epochs: int = Field(1, ge=1, le=1000, description="passes over the client's images")
    crop_scale: float = Field(
        0.08,
        gt=0.0,
        le=1.0,
        description="random resized crop: smallest share of the image's area (1: no crop)",
    )
    flip: float = Field(0.5, ge=0.0, le=1.0, description="probability of a horizontal flip")
    threads: int = Field(
        1, ge=1, le=256, description="torch threads of one client; changes the order of sums"
    )
    device: str = Field(
        "cpu", pattern=r"^(cpu|auto|cuda(:\d+)?)$", description="cpu, cuda, cuda:N or auto"
    )


class EvaluationConfig(Section):
    """When and how clients are evaluated."""

    every: int = Field(1, ge=0, description="rounds between evaluations; 0: only at the end")
    batch_size: int = Field(100, ge=1, le=65536, description="test images per forward pass")


class ServerConfig(Section):
    """How the server samples and waits."""

    fraction: float = Field(1.0, gt=0.0, le=1.0, description="share of clients in a round")
    min_replies: int = Field(1, ge=1, description="accepted replies a round needs")
    formation_timeout: float = Field(
        300.0, gt=0.0, le=604800.0, description="seconds to wait for all clients to join"
    )
    round_timeout: float = Field(
        3600.0, gt=0.0, le=604800.0, description="seconds to wait for the replies of a round"
    )
    max_images: int = Field(
        10_000_000, ge=1, description="largest number of training images believed of a client"
    )
    max_change: float = Field(
        10.0,
        gt=0.0,
        le=1e6,
        description="largest change believed of a client: L2 norm relative to what it was sent",
    )
    keep_checkpoints: int = Field(3, ge=1, description="newest round checkpoints to keep")


class Experiment(Section):
    """One run, whole: the same experiment and seed give the same bytes in every engine."""

    seed: int = Field(0, ge=0, lt=2**53, description="seed of the run; 0 is a seed")
    rounds: int = Field(20, ge=1, le=100_000, description="rounds of training")
    clients: int = Field(10, ge=1, le=100_000, description="clients that must join")
    method: SerializeAsAny[MethodConfig] = Field(
        default_factory=lambda: _default_method(), description="the method and its fields"
    )
    backbone: BackboneConfig = Field(default_factory=lambda: BackboneConfig())
    data: DataConfig = Field(default_factory=lambda: DataConfig())
    train: TrainConfig = Field(default_factory=lambda: TrainConfig())
    evaluation: EvaluationConfig = Field(default_factory=lambda: EvaluationConfig())
    server: ServerConfig = Field(default_factory=lambda: ServerConfig())

    @model_validator(mode="before")
    @classmethod
    def _typed_method(cls, data: Any) -> Any:
        """Replace the plain `method` mapping by the configuration class of that method."""
        if not isinstance(data, Mapping) or "method" not in data:
            return data
        method = data["method"]
        if isinstance(method, MethodConfig):
            return data
        if not isinstance(method, Mapping):
            raise ValueError("method must be a mapping with a name")
        from blend_core.methods import config_class

        named = {"name": "blend", **method}
        if not all(isinstance(key, str) for key in named) or not isinstance(named["name"], str):
            raise ValueError("method must be a mapping of settings with a name")
        try:
            return {**data, "method": config_class(named["name"])(**named)}
        except ValidationError as error:
            raise ConfigError(_one_line(error, "method.")) from None

    @model_validator(mode="after")
    def _check(self) -> Experiment:
        asked = clients_per_round(self.server.fraction, self.clients)
        if self.server.min_replies > asked:
            raise ValueError(
                f"server.min_replies ({self.server.min_replies}) exceeds the {asked} clients of a "
                f"round (clients {self.clients}, server.fraction {self.server.fraction})"
            )
        return self

    @property
    def fewshot_seed(self) -> int:
        """Seed of the few-shot draw."""
        return self.seed if self.data.fewshot_seed is None else self.data.fewshot_seed

    @property
    def partition_seed(self) -> int:
        """Seed of the partition."""
        return self.seed if self.data.partition_seed is None else self.data.partition_seed

    def to_json(self) -> dict[str, Any]:
        """The resolved experiment as plain JSON data."""
        return self.model_dump(mode="json")


def clients_per_round(fraction: float, clients: int) -> int:
    """max(floor(fraction N), 1); 0.29 x 100 is a little less than 29 in floating point."""
    return max(math.floor(fraction * clients + 1e-9), 1)


def _default_method() -> MethodConfig:
    from blend_core.methods import config_class

    return config_class("blend")(name="blend")


def parse_experiment(data: Mapping[str, Any]) -> Experiment:
    """Validate plain data. Raises `ConfigError` with one line that names the key."""
    try:
        return Experiment.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from None
    except RecursionError:
        raise ConfigError("the settings contain themselves (a YAML alias)") from None


# Keys of the run-config that are not settings of the experiment.
CARRIER_KEYS = ("experiment", "preset", "out", "federation", "engine", "started")


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
        given[key] = _yaml_value(value, key) if listed else value
    preset = settings.get("preset")
    return parse_experiment(_override(_read_yaml(str(preset)) if preset else {}, given))


def preset_names() -> list[str]:
    """Names of the experiments that come with the package."""
    folder = resources.files("blend_core") / "configs"
    return sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml"))


def load_experiment(source: str | None, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment from a preset name or a YAML file and apply `key=value` overrides.

    Args:
        source: name of a preset (`preset_names`), path of a YAML file, or None for quickstart.
        overrides: e.g. ["rounds=3", "method.gamma=0.3"]; values are YAML.

    Raises:
        ConfigError: no such file, not YAML, unknown key, wrong type or value.
    """
    settings: dict[str, Any] = {}
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"--set {text}: expected key=value, e.g. --set rounds=3")
        settings[key.strip()] = _yaml_value(value, f"--set {text}")
    return _with_full_paths(
        parse_experiment(_override(_read_yaml(source or "quickstart"), settings))
    )


def _with_full_paths(experiment: Experiment) -> Experiment:
    """Paths count from where the user is, not from where a worker runs."""

    def full(path: str) -> str:
        expanded = Path(path).expanduser()
        return str(expanded.absolute()) if expanded.exists() else path

    backbone, data = experiment.backbone, experiment.data
    weights = {"name": full(backbone.name), "weights": full(backbone.weights)}
    if not backbone.name.endswith(".json"):
        del weights["name"]
    changes: dict[str, Any] = {"backbone": backbone.model_copy(update=weights)}
    if data.root is not None:
        changes["data"] = data.model_copy(update={"root": full(data.root)})
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


def _read_yaml(source: str) -> dict[str, Any]:
    preset = resources.files("blend_core") / "configs" / f"{source}.yaml"
    if source in preset_names():
        text = preset.read_text(encoding="utf-8")
    else:
        path = Path(source)
        if not path.is_file():
            names = ", ".join(preset_names())
            raise ConfigError(f"{source}: no such file, and not a preset ({names})")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: cannot be read: {error}") from None
    data = _yaml_value(text, source)
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


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _yaml_value(text: str, where: str) -> Any:
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


def _known_keys(prefix: str) -> list[str]:
    """Dotted names of all settings; those of a method only where its fields are read."""
    found: list[str] = []

    def walk(model: type[BaseModel], path: str) -> None:
        for name, field in model.model_fields.items():
            kind = field.annotation
            key = f"{path}{field.alias or name}"
            if isinstance(kind, type) and issubclass(kind, Section) and not prefix:
                walk(kind, f"{key}.")
            found.append(key)

    if prefix:
        from blend_core.methods import config_class

        walk(config_class("blend"), prefix)
    else:
        walk(Experiment, "")
    return found


def _one_line(error: ValidationError, prefix: str = "") -> str:
    parts = []
    for item in error.errors(include_url=False):
        key = prefix + ".".join(str(part) for part in item["loc"]) or "experiment"
        if item["type"] == "extra_forbidden":
            near = get_close_matches(key, _known_keys(prefix), 1)
            parts.append(f"{key}: unknown key" + (f"; did you mean {near[0]}?" if near else ""))
            continue
        text = item["msg"].removeprefix("Value error, ")
        shown = item.get("input")
        value = (
            "" if isinstance(shown, (dict, BaseModel)) else f" = {json.dumps(shown, default=str)}"
        )
        parts.append(f"{key}{value}: {text[:1].lower()}{text[1:]}")
    return one_line("; ".join(parts))
