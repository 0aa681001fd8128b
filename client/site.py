"""One site: its name, where its data and state lie, and how its worker behaves.

A site is known by its client name, never by Flower's node id, which may be new after a restart.
Imports neither torch nor Flower: the ClientApp loads it in every message's process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blend_core.errors import BlendError, ConfigError, RunError, SiteError, described
from blend_core.names import checked_name, client_name

if TYPE_CHECKING:
    from blend_core.config import Experiment
    from blend_core.data.folders import FolderOptions

Scalar = str | int | float | bool

KEYS = (
    "client-name",
    "data-dir",
    "state-dir",
    "partition-id",
    "num-partitions",
    "label-space",
    "prompt-template",
    "holdout",
    "skip-bad",
    "strict",
    "image-memory",
    "worker-idle",
    "verbose-errors",
    "policy",
)
LABEL_SPACES = ("node", "federation")
MAX_IDLE = 604_800.0
# Of partitions. Flower carries no number of more than 64 bits.
MAX_WHOLE = 1_000_000
MAX_MEMORY = 100_000.0


@dataclass(frozen=True)
class Site:
    """A site as its operator describes it in the SuperNode's `--node-config`.

    Attributes:
        name: the client name, 1 to 64 letters, digits, dots, hyphens and underscores.
        state_dir: absolute folder under which private state is kept.
        data_dir: absolute folder of the site's images; None for the built-in benchmark.
        partition: number of the site's part of a partitioned data set, from 0.
        label_space: "node" or "federation"; None: as the experiment says.
        prompt_template: the prompt, with exactly one {}; None: as the experiment says.
        holdout: share of the training images of each class that becomes the test part of a site
            that has none, from 0, below 1; None: as the experiment says.
        skip_bad: leave unreadable images out instead of refusing to join; None: as the experiment
            says.
        strict: refuse to join with images that are both in train and in test.
        image_memory: GiB of decoded images that are kept in memory; None: as the experiment says.
        worker_idle: seconds without a message after which the worker ends, up to a week.
        verbose_errors: tell the server class names and paths in error messages. Right only where
            server and sites are one machine and one person's.
        policy: absolute file that says what a server may ask of this site; None: anything.
    """

    name: str
    state_dir: Path
    data_dir: Path | None = None
    partition: int | None = None
    label_space: str | None = None
    worker_idle: float = 600.0
    verbose_errors: bool = False
    prompt_template: str | None = None
    holdout: float | None = None
    skip_bad: bool | None = None
    strict: bool = False
    image_memory: float | None = None
    policy: Path | None = None

    def for_outside(self, error: Exception) -> BlendError:
        """What a server may know of this site's trouble; the rest is for the site's own log.

        Errors of the site's data, state and machine speak of its class names and folders, those
        of the server's settings and of the run do not.
        """
        if isinstance(error, ConfigError | RunError):
            return error
        if self.verbose_errors:
            return error if isinstance(error, BlendError) else RunError(described(error))
        code = re.match(r"[EW]\d\d\b", str(error))
        if isinstance(error, SiteError) and code:
            what = f"its data is unusable ({code.group()})"
        elif isinstance(error, SiteError):
            what = "its data or state is unusable"
        else:
            what = f"it failed ({type(error).__name__})"
        kind = SiteError if isinstance(error, SiteError) else RunError
        return kind(f"{what}; its log says why")

    def folder(self, federation: str) -> Path:
        """Where this site keeps its private state of one federation.

        Raises:
            ConfigError: `federation`, which a server chose, is not a plain name.
        """
        return self.state_dir / checked_name("federation", federation) / self.name

    def folder_options(self, experiment: Experiment) -> FolderOptions:
        """How this site's folder is read: its own choices, else the experiment's.

        Which images are held out is remembered for all federations: none may train on them.
        """
        from blend_core.data.folders import FolderOptions  # Loads torch.

        data = experiment.data
        return FolderOptions(
            label_space=self.label_space or data.label_space,
            federation_classes=tuple(data.classes),
            template=self.prompt_template or data.template,
            holdout=data.holdout if self.holdout is None else self.holdout,
            holdout_file=self.state_dir / "holdout" / f"{self.name}.json",
            skip_bad=data.skip_bad if self.skip_bad is None else self.skip_bad,
            strict=self.strict,
        )

    @classmethod
    def from_node_config(cls, node_config: Mapping[str, Scalar]) -> Site:
        """Read the node config of a SuperNode.

        Args:
            node_config: Flower's `context.node_config`. Relative paths count from the current
                folder, which a ClientApp shares with its SuperNode.

        Raises:
            ConfigError: unknown key, wrong type or value, no name or no `state-dir`.
        """
        for key in node_config:
            if key not in KEYS:
                raise ConfigError(f"node config {key}: unknown key; known are {', '.join(KEYS)}")
        partition = _whole(node_config, "partition-id", 0)
        partitions = _whole(node_config, "num-partitions", 1)
        if partition is not None and partitions is not None and partition >= partitions:
            raise ConfigError(
                f"node config partition-id = {partition}: must be less than "
                f"num-partitions = {partitions}"
            )
        label_space = _text(node_config, "label-space")
        if label_space not in (None, *LABEL_SPACES):
            raise ConfigError(
                f"node config label-space = {label_space!r}: must be {' or '.join(LABEL_SPACES)}"
            )
        template = _text(node_config, "prompt-template")
        if template is not None and template.count("{}") != 1:
            raise ConfigError(
                f"node config prompt-template = {template!r}: must contain {{}} exactly once"
            )
        name = _text(node_config, "client-name")
        if name is None and partition is not None:
            name = client_name(partition, partitions)
        state_dir = _path(node_config, "state-dir")
        if state_dir is None:
            raise ConfigError(
                "node config state-dir: missing; name a folder that survives restarts, "
                'e.g. state-dir="/var/lib/blend"'
            )
        return cls(
            name=checked_name("node config client-name", name),
            state_dir=_absolute(state_dir),
            data_dir=_path(node_config, "data-dir"),
            partition=partition,
            label_space=label_space,
            worker_idle=_idle(node_config),
            verbose_errors=_flag(node_config, "verbose-errors") or False,
            prompt_template=template,
            holdout=_holdout(node_config),
            skip_bad=_flag(node_config, "skip-bad"),
            strict=_flag(node_config, "strict") or False,
            image_memory=_memory(node_config),
            policy=_path(node_config, "policy"),
        )

    def to_json(self) -> dict[str, Any]:
        """The site as plain JSON data, for another process on the same machine."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in vars(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Site:
        """Inverse of `to_json`."""
        fields = dict(data)
        for key in ("state_dir", "data_dir", "policy"):
            if fields.get(key) is not None:
                fields[key] = Path(fields[key])
        return cls(**fields)


def local_site(experiment: Experiment, name: str, index: int, out: Path) -> Site:
    """A client of a run on one machine: its state lies in the run's folder.

    Args:
        experiment: the resolved experiment.
        name: the client's name.
        index: its place in the list of client names.
        out: the run's folder.
    """
    root = experiment.data.root if experiment.data.kind == "folders" else None
    return Site(
        name=name,
        state_dir=_absolute(out) / "state" / name,
        data_dir=None if root is None else _absolute(root) / name,
        partition=index,
        verbose_errors=True,
    )


def _text(config: Mapping[str, Scalar], key: str) -> str | None:
    value = config.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f'node config {key} = {value!r}: must be text in quotes, e.g. {key}="x"')
    return value


def _path(config: Mapping[str, Scalar], key: str) -> Path | None:
    text = _text(config, key)
    return None if text is None else _absolute(text)


def _absolute(path: str | Path) -> Path:
    # The worker has a current folder of its own, so a relative path would change its meaning.
    return Path(os.path.expanduser(path)).absolute()


def _whole(config: Mapping[str, Scalar], key: str, least: int) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_WHOLE:
        raise ConfigError(
            f"node config {key} = {value!r}: must be a whole number from {least} to {MAX_WHOLE}"
        )
    return value


def _flag(config: Mapping[str, Scalar], key: str) -> bool | None:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"node config {key} = {value!r}: must be true or false")
    return value


def _number(
    config: Mapping[str, Scalar], key: str, fits: Callable[[float], bool], expected: str
) -> float | None:
    value = config.get(key)
    if value is None:
        return None
    # NaN fits no comparison; true would pass for 1.
    if isinstance(value, (str, bool)) or not fits(value):
        raise ConfigError(f"node config {key} = {value!r}: must be {expected}")
    return float(value)


def _holdout(config: Mapping[str, Scalar]) -> float | None:
    expected = "a share from 0, below 1, e.g. holdout=0.2"
    return _number(config, "holdout", lambda share: 0 <= share < 1, expected)


def _memory(config: Mapping[str, Scalar]) -> float | None:
    expected = f"GiB, from 0 to {MAX_MEMORY:.0f}"
    return _number(config, "image-memory", lambda size: 0 <= size <= MAX_MEMORY, expected)


def _idle(config: Mapping[str, Scalar]) -> float:
    expected = f"seconds, more than 0, at most {MAX_IDLE:.0f}"
    found = _number(config, "worker-idle", lambda idle: 0 < idle <= MAX_IDLE, expected)
    return Site.worker_idle if found is None else found
