"""The typed experiment: every choice of a run, with help, unit and range.

One schema serves YAML files, `--set a.b=value`, Flower's run-config and the results; `settings`
reads them. An unknown key, a wrong type or a value out of range is one line that names the key,
the value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from itertools import count
from typing import Any, Literal, get_args

from pydantic import Field, SerializeAsAny, ValidationError, model_validator

from blend_core.errors import ConfigError
from blend_core.names import reading
from blend_core.schema import Section, validation_line

Precision = Literal["fp32", "bf16", "fp16"]
# A template that stands for the data set's own.
COOP = "coop"


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


# The data sets of `data/datasets.yaml`, in its order (a test compares).
DatasetKind = Literal[
    "caltech101",
    "oxford_pets",
    "stanford_cars",
    "oxford_flowers",
    "food101",
    "fgvc_aircraft",
    "sun397",
    "dtd",
    "eurosat",
    "ucf101",
    "imagenet",
    "cifar10",
    "cifar100",
    "domainnet10",
    "domainnet345",
    "office_caltech10",
    "pacs",
    "office_home",
    "office31",
]
DATASET_KINDS: tuple[str, ...] = get_args(DatasetKind)
Rule = Literal[
    "dirichlet-preferred",
    "disjoint",
    "dirichlet",
    "pachinko",
    "uniform-classes",
    "coarse-label",
    "domain-dirichlet",
    "iid",
    "iid-overlapping",
]


# Which kinds of data read which settings; those not named here are for all.
_READ_BY: dict[tuple[str, ...], tuple[str, ...]] = {
    ("folders",): ("label_space", "classes", "holdout", "skip_bad"),
    ("shapes",): ("test_per_class", "split", "style_spread"),
    ("data sets",): ("subset", "max_test_per_class", "manifest", "blocks", "classes_per_client"),
    ("folders", "data sets"): ("root",),
    ("shapes", "data sets"): ("shots", "partition", "alpha", "boost"),
}


class DataConfig(Section):
    """Which images, which classes, and how they are dealt to clients."""

    kind: Literal["shapes", "folders", DatasetKind] = Field(
        "shapes",
        description="shapes: the built-in benchmark; folders: one folder per client; or a data "
        "set of the papers, e.g. oxford_pets",
    )
    root: str | None = Field(
        None,
        description="folders: the folder that holds one folder per client; data sets: the folder "
        "that holds the data sets",
    )
    template: str = Field(
        "a photo of a {}.",
        description="prompt; {} is the class name, exactly once; coop: the data set's own, as "
        "written by the authors of CoOp",
    )
    label_space: Literal["node", "federation"] = Field(
        "node",
        description="folders only: node keeps every site's class names at the site; federation "
        "uses data.classes everywhere",
    )
    classes: list[str] = Field(
        default_factory=list, description="folders with label_space federation: the class names"
    )
    holdout: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="folders only: share of the training images of every class with at least 5 "
        "that sites without test images set aside as such",
    )
    skip_bad: bool = Field(
        False, description="folders only: leave unreadable images out instead of refusing the site"
    )
    image_memory: float = Field(
        2.0,
        ge=0.0,
        le=100_000.0,
        description="GiB of decoded images that a process keeps in memory; further ones lie in a "
        "temporary file",
    )
    shots: int | None = Field(
        None,
        ge=0,
        le=1000,
        description="training images per class in the whole federation, 0: all; unset: 16 for "
        "shapes and the data sets with base and new classes, all for CIFAR and domain sets",
    )
    subset: Literal["base", "all"] | None = Field(
        None,
        description="data sets: train on the first half of the classes and keep the others new "
        "(base), or on all; unset: base, but all for CIFAR and domain sets",
    )
    test_per_class: int = Field(
        10, ge=1, le=1000, description="shapes only: test images per class and client"
    )
    max_test_per_class: int | None = Field(
        None,
        ge=1,
        description="data sets: test images per class that are used, for quick trials; marks the "
        "result as not comparable",
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
    partition: Rule | None = Field(
        None,
        description="how images are dealt to clients; unset: dirichlet-preferred, but dirichlet "
        "for CIFAR and domain-dirichlet for domain sets",
    )
    manifest: str | None = Field(
        None,
        description="data sets: file with a partition (blend data partition --out); shots, rule, "
        "its settings and seeds are the file's",
    )
    alpha: float | None = Field(
        None,
        gt=0.0,
        le=1000.0,
        description="Dirichlet concentration, the papers' alpha or beta; unset: 0.01 for "
        "dirichlet-preferred, 0.3 for dirichlet and pachinko, 0.5 for domain-dirichlet",
    )
    boost: float = Field(
        1.0,
        ge=0.0,
        le=1000.0,
        description="dirichlet-preferred: added to alpha for a class's preferred client",
    )
    blocks: Literal["balanced", "round"] = Field(
        "balanced",
        description="disjoint: equal numbers of classes, or round(classes / clients) and the rest "
        "to the last client, as in the released code",
    )
    classes_per_client: int | None = Field(
        None,
        ge=1,
        description="uniform-classes: classes a client gets; unset: a fifth of all on ten "
        "classes, a tenth on more, as in the released code",
    )
    cifar_stats: bool = Field(
        False,
        description="CIFAR, paper mode: normalise with CIFAR's own mean and deviation, then "
        "enlarge bilinearly, without augmentation",
    )
    fewshot_seed: int | None = Field(
        None, ge=0, description="which images are drawn; unset: the run's seed"
    )
    partition_seed: int | None = Field(
        None, ge=0, description="who gets which image; unset: the run's seed"
    )

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if self.template != COOP and self.template.count("{}") != 1:
            raise ValueError(f"template {self.template!r} must contain {{}} exactly once")
        if self.template == COOP and self.kind not in DATASET_KINDS:
            raise ValueError(f"template coop is for data sets of the papers, not {self.kind}")
        if self.kind == "folders" and self.label_space == "federation" and not self.classes:
            raise ValueError("label_space federation needs data.classes, the list of class names")
        if len(self.classes) == 1:
            raise ValueError("classes needs at least two names, or there is nothing to learn")
        read = [reading(name) for name in self.classes]
        if "" in read or len(set(read)) != len(read):
            raise ValueError("classes holds a name that is empty, or two that read the same")
        if self.kind == "shapes":
            if self.shots == 0:
                raise ValueError("shots 0 is for data sets: shapes are drawn as many as asked")
            if self.partition not in (None, "dirichlet-preferred"):
                raise ValueError(
                    f"partition {self.partition} is for data sets; shapes has dirichlet-preferred"
                )
        if self.cifar_stats and self.kind not in ("cifar10", "cifar100"):
            raise ValueError(f"cifar_stats is for cifar10 and cifar100, not {self.kind}")
        kind = self.kind if self.kind in ("shapes", "folders") else "data sets"
        for readers, names in _READ_BY.items():
            for name in names if kind not in readers else ():
                unset = type(self).model_fields[name].get_default(call_default_factory=True)
                if (value := getattr(self, name)) != unset:
                    raise ValueError(
                        f"{name} {value} is for {' and '.join(readers)}, not {self.kind}; "
                        "leave it out"
                    )
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
    batch_size: int = Field(16, ge=1, le=65536, description="images per step")
    drop_last: Literal["never", "if-larger"] = Field(
        "never",
        description="if-larger, paper mode: drop an epoch's last, smaller batch if there is a "
        "full one",
    )
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
    select: Literal["last", "best-local-test"] = Field(
        "last",
        description="best-local-test, paper mode: show the round with the best mean Local beside "
        "the last, marked as chosen on test images",
    )


Aggregation = Literal["mean", "median", "trimmed-mean", "krum", "multi-krum"]
# Which rules read which settings.
_RULE_READS = {
    ("trimmed-mean",): ("trim",),
    ("krum", "multi-krum"): ("malicious",),
    ("multi-krum",): ("krum_keep",),
}


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
        description="largest change believed of a client: L2 norm relative to that of what it was "
        "sent, or to 1 where that is smaller",
    )
    require_keys: bool = Field(
        False,
        description="take only SuperNodes whose key was registered with the SuperLink by name; "
        "for federations over several machines",
    )
    max_change_ratio: float | None = Field(
        None,
        ge=1.0,
        le=1e6,
        description="largest change believed of a client: L2 norm relative to the median of the "
        "round's accepted changes (3 at least); unset: any",
    )
    aggregation: Aggregation = Field(
        "mean",
        description="mean: weighted by training images; the others withstand hostile clients and "
        "count every client alike: a number of images is a claim",
    )
    trim: float = Field(
        0.2,
        gt=0.0,
        lt=0.5,
        description="trimmed-mean: share of the replies left out at either end of every value",
    )
    malicious: int = Field(
        1, ge=1, description="krum, multi-krum: hostile clients in a round to withstand"
    )
    krum_keep: int | None = Field(
        None,
        ge=1,
        description="multi-krum: replies that are averaged; unset: all but server.malicious",
    )
    keep_checkpoints: int = Field(3, ge=1, description="newest round checkpoints to keep")

    @property
    def needed_replies(self) -> int:
        """Accepted replies without which a round fails: the rule means nothing with fewer."""
        rule = 1
        if self.aggregation == "median":
            rule = 3
        elif self.aggregation == "trimmed-mean":
            # Flower leaves out int(trim n) at either end: with fewer replies, none.
            rule = next(n for n in count(3) if int(self.trim * n) >= 1)
        elif self.aggregation in ("krum", "multi-krum"):
            rule = 2 * self.malicious + 3  # Blanchard et al. 2017, proposition 4.2
        if self.aggregation == "multi-krum":
            rule = max(rule, (self.krum_keep or 0) + self.malicious)
        return max(self.min_replies, rule)

    @model_validator(mode="after")
    def _check(self) -> ServerConfig:
        for readers, names in _RULE_READS.items():
            if self.aggregation not in readers:
                _refuse_unread(self, names, f"aggregation {' or '.join(readers)}")
        if self.aggregate_stale and self.aggregation != "mean":
            raise ValueError(
                f"aggregate_stale with aggregation {self.aggregation}: old uploads look hostile to "
                "the rule; use one or the other"
            )
        return self


class StateConfig(Section):
    """What happens to a site's private state."""

    on_missing: Literal["fail", "cold-start"] = Field(
        "fail",
        description="when a site has lost the private state of a round that counted: fail ends "
        "the run (exit code 3); cold-start goes on from what is left, marked in the results",
    )


class PrivacyConfig(Section):
    """Differential privacy of the shared tensors, for a client as a whole (docs/privacy.md)."""

    kind: Literal["none", "central", "local"] = Field(
        "none",
        description="central: a trusted server clips and adds noise to the mean; local: every "
        "site does, before anything leaves it",
    )
    clipping: Literal["fixed", "adaptive"] = Field(
        "fixed", description="central: adaptive follows a quantile of the changes' norms"
    )
    clipping_norm: float = Field(
        1.0,
        gt=0.0,
        le=1e6,
        description="largest L2 norm of a client's change, larger ones are scaled down; with "
        "clipping adaptive the first round's",
    )
    clipping_quantile: float = Field(
        0.5, gt=0.0, lt=1.0, description="adaptive: share of the changes that stay unclipped"
    )
    clipping_lr: float = Field(
        0.2, gt=0.0, le=1.0, description="adaptive: how fast the norm follows, in log units"
    )
    noise_multiplier: float = Field(
        1.0,
        gt=0.0,
        le=1e6,
        description="deviation of the noise relative to the most that one client can change: "
        "clipping_norm in the sum (central), twice that in its upload (local)",
    )
    delta: float = Field(
        1e-5,
        ge=1e-10,
        lt=1.0,
        description="of (epsilon, delta); below 1 / clients",
    )
    target_epsilon: float | None = Field(
        None, gt=0.0, le=1e6, description="training stops before it is exceeded; unset: never"
    )
    noise_from: Literal["secret", "seed"] = Field(
        "secret",
        description="secret: a key drawn once and kept beside the checkpoints or the site's "
        "state; seed: the run's seed, which everybody knows: for experiments, protects nobody",
    )

    @model_validator(mode="after")
    def _check(self) -> PrivacyConfig:
        if self.clipping == "adaptive" and self.kind == "local":
            raise ValueError("clipping adaptive is for kind central: sites see no other's norm")
        if self.clipping != "adaptive" or self.kind == "none":
            _refuse_unread(self, ("clipping_quantile", "clipping_lr"), "clipping adaptive")
        if self.kind == "none":
            _refuse_unread(self, set(type(self).model_fields) - {"kind"}, "kind central or local")
        return self


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
    state: StateConfig = Field(default_factory=lambda: StateConfig())
    privacy: PrivacyConfig = Field(default_factory=lambda: PrivacyConfig())

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
            raise ConfigError(validation_line(error, kind, "method.")) from None

    @model_validator(mode="after")
    def _check(self) -> Experiment:
        asked = clients_per_round(self.server.fraction, self.clients)
        if self.server.min_replies > asked:
            raise ValueError(
                f"server.min_replies ({self.server.min_replies}) exceeds the {asked} clients of a "
                f"round (clients {self.clients}, server.fraction {self.server.fraction})"
            )
        if self.server.needed_replies > asked:
            raise ValueError(
                f"server.aggregation {self.server.aggregation} needs {self.server.needed_replies} "
                f"replies, a round has {asked} clients (clients {self.clients}, server.fraction "
                f"{self.server.fraction}); more clients, or another rule"
            )
        self._check_privacy()
        every = self.evaluation.every > 0 and asked == self.clients
        if self.evaluation.select == "best-local-test" and not every:
            raise ValueError(
                "evaluation.select best-local-test needs evaluation.every of 1 or more and "
                "server.fraction 1, or there is no round to choose from"
            )
        return self

    def _check_privacy(self) -> None:
        """Refuse what would make the printed epsilon untrue."""
        if self.privacy.kind == "none":
            return
        from blend_core.accounting import epsilon
        from blend_core.methods import method_class

        target, noise = self.privacy.target_epsilon, self.privacy.noise_multiplier
        if self.privacy.delta * self.clients >= 1.0:
            raise ValueError(
                f"privacy.delta {self.privacy.delta:g} must be below 1 / clients = "
                f"{1 / self.clients:g}, or it allows to give one client away"
            )
        if target is not None and (one := epsilon(noise, 1, self.privacy.delta)) > target:
            raise ValueError(
                f"privacy.target_epsilon {target:g}: one round alone spends {one:.3g}; raise "
                f"privacy.noise_multiplier ({noise:g}) or the target"
            )
        if self.privacy.kind != "central":
            return
        why = None
        if self.server.aggregation != "mean":
            why = f"server.aggregation {self.server.aggregation}: its noise is that of a mean"
        elif self.server.aggregate_stale:
            why = "server.aggregate_stale: an old upload would be spent again in every round"
        elif self.server.max_change_ratio is not None:
            why = "server.max_change_ratio: one client's change would decide about others'"
        elif method_class(self.method.name).keeps_uploads:
            why = f"method {self.method.name}: it sends clients' uploads to others without noise"
        if why is not None:
            raise ValueError(f"privacy.kind central does not go with {why}; use local, or leave it")

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


def _refuse_unread(section: Section, names: Collection[str], reader: str) -> None:
    """Refuse settings that nothing reads. Raises ValueError, in one line."""
    for name in sorted(names):
        if (value := getattr(section, name)) != type(section).model_fields[name].default:
            raise ValueError(f"{name} {value} is for {reader}; leave it out")


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
        raise ConfigError(validation_line(error, Experiment)) from None
    except RecursionError:
        raise ConfigError("the settings contain themselves (a YAML alias)") from None
