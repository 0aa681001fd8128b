"""The typed experiment: every choice of a run, with help, unit and range.

One schema serves YAML files, `--set a.b=value`, Flower's run-config and the results; `settings`
reads them. An unknown key, a wrong type or a value out of range is one line that names the key,
the value and what is allowed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, ValidationError, model_validator

from blend_core.errors import ConfigError, one_line

Precision = Literal["fp32", "bf16", "fp16"]


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
    text_chunk: int = Field(
        256,
        ge=1,
        le=1_000_000,
        description="class prompts that pass through the text tower at a time; with more classes "
        "training computes their activations twice and needs no more memory",
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
        if len(self.classes) == 1:
            raise ValueError("classes needs at least two names, or there is nothing to learn")
        # As a prompt reads them: `_` is a space, and case does not count.
        read = [" ".join(name.replace("_", " ").split()).casefold() for name in self.classes]
        if "" in read or len(set(read)) != len(read):
            raise ValueError("classes holds a name that is empty, or two that read the same")
        return self


class TrainConfig(Section):
    """One local update."""

    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="fresh in every local update")
    lr: float = Field(0.0015, gt=0.0, le=10.0, description="learning rate")
    schedule: Literal["constant", "cosine"] = Field(
        "constant",
        description="cosine: from lr to 0 over all rounds, a function of round and step alone",
    )
    weight_decay: float = Field(5e-4, ge=0.0, le=1.0, description="weight decay")
    momentum: float = Field(0.9, ge=0.0, lt=1.0, description="sgd only")
    batch_size: int = Field(16, ge=1, le=65536, description="images per step; last batch is kept")
    local_epochs: int = Field(1, ge=1, le=1000, description="passes over the client's images")
    local_steps: int | None = Field(
        None, ge=1, le=1_000_000, description="steps of a local update, instead of local_epochs"
    )
    clip_norm: float | None = Field(
        None, gt=0.0, le=1e6, description="largest L2 norm of a step's gradient; unset: any"
    )
    precision: Precision = Field(
        "fp32",
        description="of matrix products, in training and evaluation; what is trained, its "
        "optimiser and the logits stay fp32",
    )
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
    full_first_round: bool | None = Field(
        None,
        description="ask all clients in round 1, whatever the fraction; unset: if the method has "
        "private tensors",
    )
    aggregate_stale: bool = Field(
        False,
        description="average over the newest upload of every client, not over the round's "
        "clients only",
    )
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
            raise ValueError(
                "method must be a mapping of settings with a name, "
                f"not method.name = {str(named['name'])[:80]}"
            )
        kind = config_class(named["name"])
        try:
            return {**data, "method": kind(**named)}
        except ValidationError as error:
            raise ConfigError(_one_line(error, kind, "method.")) from None

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
        raise ConfigError(_one_line(error, Experiment)) from None
    except RecursionError:
        raise ConfigError("the settings contain themselves (a YAML alias)") from None


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


def _one_line(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
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
