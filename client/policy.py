"""What a site's operator lets a server ask: the YAML file that node config `policy` names.

A refusal names the rule and the server's own setting, never a file, folder or number of the site.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from blend_core.config import DATASET_KINDS, DatasetKind, Experiment, Precision, PrivacyConfig
from blend_core.errors import ConfigError, SiteError
from blend_core.methods import method_names
from blend_core.schema import Section, validation_line
from blend_core.settings import yaml_value
from client.site import Site


def _known_method(name: str) -> str:
    if name not in method_names():
        raise ValueError(f"no such method; known are {', '.join(method_names())}")
    return name


def _absolute(path: str) -> str:
    if not os.path.isabs(path):
        raise ValueError("must be an absolute path, e.g. /data/photos")
    return path


MethodName = Annotated[str, AfterValidator(_known_method)]
AbsolutePath = Annotated[str, AfterValidator(_absolute)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Policy(Section):
    """Rules; one that is not given allows everything. Lists name all that is allowed."""

    methods: list[MethodName] | None = Field(None, min_length=1, description="method.name")
    max_rank: int | None = Field(
        None,
        ge=0,
        description="largest value of any setting of the method with rank in its name; full "
        "counts as larger than any, none as 0",
    )
    max_rounds: int | None = Field(None, ge=0, description="rounds of a federation")
    max_local_epochs: int | None = Field(
        None,
        ge=1,
        description="train.local_epochs; an experiment with local_steps then needs max_local_steps",
    )
    max_local_steps: int | None = Field(
        None,
        ge=1,
        description="train.local_steps; an experiment without them then needs max_local_epochs",
    )
    data_kinds: list[Literal["shapes", "folders"] | DatasetKind] | None = Field(
        None, min_length=1, description="data.kind"
    )
    data_roots: list[AbsolutePath] | None = Field(
        None,
        min_length=1,
        description="folders in or below which images and partition files may be read, whoever "
        "named them, symbolic links followed",
    )
    label_spaces: list[Literal["node", "federation"]] | None = Field(
        None,
        min_length=1,
        description="data.label_space of folders, unless node config says it; node alone: class "
        "names are the site's own, none are agreed upon with others",
    )
    min_train_images: int | None = Field(
        None, ge=1, description="with fewer training images the site takes no part"
    )
    backbones: list[str] | None = Field(None, min_length=1, description="backbone.name")
    weights: list[str] | None = Field(
        None,
        min_length=1,
        description="backbone.weights; without this rule a server may name any file to be tried",
    )
    backbone_sha256: list[Sha256] | None = Field(
        None,
        min_length=1,
        description="SHA-256 of the frozen weights; a refusal names that of the weights it met",
    )
    precisions: list[Precision] | None = Field(None, min_length=1, description="train.precision")
    devices: list[Literal["cpu", "cuda", "auto"]] | None = Field(
        None, min_length=1, description="train.device; cuda:N counts as cuda"
    )
    privacy_kinds: list[Literal["none", "central", "local"]] | None = Field(
        None,
        min_length=1,
        description="privacy.kind; without none in it, privacy.noise_from must be secret",
    )
    min_noise_multiplier: float | None = Field(
        None,
        gt=0.0,
        description="smallest privacy.noise_multiplier; demands noise, privacy.noise_from secret",
    )
    max_clipping_norm: float | None = Field(
        None,
        gt=0.0,
        description="largest privacy.clipping_norm; demands noise, privacy.noise_from secret, and "
        "clipping fixed, because an adaptive norm has no bound",
    )

    def require(self, experiment: Experiment, site: Site) -> None:
        """Refuse what can be refused before anything is opened that the experiment names.

        Raises:
            ConfigError: a rule does not allow the experiment.
        """
        for rule, key, value in self._named(experiment, site):
            allowed = getattr(self, rule)
            if allowed is not None and value not in allowed:
                raise _refusal(rule, allowed, f"{key} = {value!r}")
        for rule, key, number in self._bounded(experiment):
            bound = getattr(self, rule)
            if bound is not None and (number is None or _size(number) > bound):
                shown = key if number is None else f"{key} = {number}"
                raise _refusal(rule, bound, shown)
        self._require_noise(experiment.privacy)
        for key, path in _read_from(experiment, site):
            if self.data_roots is not None and not _inside(path, self.data_roots):
                raise _refusal("data_roots", None, key)

    def require_loaded(self, backbone_sha256: str, train_images: int) -> None:
        """Refuse what shows only when backbone and images are loaded.

        Args:
            backbone_sha256: of the frozen weights, `blend_core.weights.weights_sha256`.
            train_images: number of the site's training images.

        Raises:
            ConfigError: a rule does not allow them.
        """
        if self.backbone_sha256 is not None and backbone_sha256 not in self.backbone_sha256:
            what = f"weights with SHA-256 {backbone_sha256}"
            raise _refusal("backbone_sha256", None, what)
        if self.min_train_images is not None and train_images < self.min_train_images:
            raise _refusal("min_train_images", None, "to take part with so few training images")

    def _require_noise(self, privacy: PrivacyConfig) -> None:
        """Refuse noise that is missing, too small, or that everybody can compute."""
        least, most = self.min_noise_multiplier, self.max_clipping_norm
        bounds = [("min_noise_multiplier", least), ("max_clipping_norm", most)]
        demands: list[tuple[str, object]] = [
            (rule, bound) for rule, bound in bounds if bound is not None
        ]
        if privacy.kind == "none" and demands:
            raise _refusal(*demands[0], "privacy.kind = 'none'")
        if least is not None and privacy.noise_multiplier < least:
            what = f"privacy.noise_multiplier = {privacy.noise_multiplier}"
            raise _refusal("min_noise_multiplier", least, what)
        if most is not None and privacy.clipping == "adaptive":
            raise _refusal("max_clipping_norm", most, "privacy.clipping = 'adaptive'")
        if most is not None and privacy.clipping_norm > most:
            what = f"privacy.clipping_norm = {privacy.clipping_norm}"
            raise _refusal("max_clipping_norm", most, what)
        if self.privacy_kinds is not None and "none" not in self.privacy_kinds:
            demands.append(("privacy_kinds", self.privacy_kinds))
        if demands and privacy.noise_from != "secret":
            raise _refusal(*demands[0], f"privacy.noise_from = {privacy.noise_from!r}")

    def _named(self, experiment: Experiment, site: Site) -> Iterator[tuple[str, str, str]]:
        """(rule, setting, its value) of settings that a list must name."""
        yield "methods", "method.name", experiment.method.name
        yield "data_kinds", "data.kind", experiment.data.kind
        if experiment.data.kind == "folders":
            space = site.label_space or experiment.data.label_space
            yield "label_spaces", "data.label_space", space
        yield "backbones", "backbone.name", experiment.backbone.name
        yield "weights", "backbone.weights", experiment.backbone.weights
        yield "precisions", "train.precision", experiment.train.precision
        yield "devices", "train.device", experiment.train.device.partition(":")[0]
        yield "privacy_kinds", "privacy.kind", experiment.privacy.kind

    def _bounded(self, experiment: Experiment) -> Iterator[tuple[str, str, Any]]:
        """(rule, setting, its value) of settings with a bound; None: not to be bounded so."""
        yield "max_rounds", "rounds", experiment.rounds
        for key, value in experiment.method.model_dump(by_alias=True).items():
            if "rank" in key:
                yield "max_rank", f"method.{key}", value
        train = experiment.train
        if train.local_steps is None:
            yield "max_local_epochs", "train.local_epochs", train.local_epochs
            if self.max_local_epochs is None:
                yield "max_local_steps", "an experiment without train.local_steps", None
        else:
            yield "max_local_steps", "train.local_steps", train.local_steps
            if self.max_local_steps is None:
                yield "max_local_epochs", "train.local_steps", None


def site_policy(site: Site) -> Policy:
    """The policy of a site as its file says it now; without one everything is allowed.

    Read anew for every request: it is short, and its operator wants it to hold at once.

    Raises:
        SiteError: the file is missing, empty or wrong; names the key. Nothing is allowed then.
    """
    return Policy() if site.policy is None else read_policy(site.policy)


def read_policy(path: Path) -> Policy:
    """Read a policy file.

    Raises:
        SiteError: as `site_policy`.
    """
    where = f"policy {path}"
    try:
        values = yaml_value(path.read_text(encoding="utf-8"), where)
        if not isinstance(values, dict) or not values:
            # Also what a full disk leaves of a file.
            raise ConfigError(f"{where}: it must hold at least one line of `rule: value`")
        if empty := [str(rule) for rule, value in values.items() if value is None]:
            # Whoever wrote the rule's name did not mean to allow everything.
            raise ConfigError(f"{where}: {empty[0]} has no value; give one, or remove the line")
        return Policy.model_validate(values)
    except ValidationError as error:
        reason = f"{where}: {validation_line(error, Policy)}"
    except UnicodeDecodeError:
        reason = f"{where}: not UTF-8 text"
    except OSError as error:
        reason = f"{where}: {error.strerror or error}"
    except ConfigError as error:
        reason = str(error)
    raise SiteError(f"{reason}; the site refuses everything until it is mended")


def _refusal(rule: str, limit: object, what: str) -> ConfigError:
    """Limits are told where the server can keep to them."""
    if isinstance(limit, list):
        limit = ", ".join(limit)
    shown = rule if limit is None else f"{rule}: {limit}"
    return ConfigError(f"the site's policy refuses {what} ({shown})")


def _size(value: object) -> float:
    """A bounded setting as a number; of texts only "none" is small."""
    if isinstance(value, int | float):
        return value
    return 0 if value == "none" else float("inf")


def _read_from(experiment: Experiment, site: Site) -> Iterator[tuple[str, str]]:
    """(what names it, path) of the folders and files that the site would read images from."""
    data = experiment.data
    if site.data_dir is not None:
        yield "the site's data-dir", str(site.data_dir)
    if data.kind in DATASET_KINDS:
        if site.data_dir is None and data.root is not None:
            yield "data.root", data.root
        if data.manifest is not None:
            yield "data.manifest", data.manifest


def _inside(path: str, roots: Collection[str]) -> bool:
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(os.path.realpath(root)) for root in roots)
