"""A run's checkpoints: all that the server needs to go on after any of its rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blend_core.config import Experiment, parse_experiment
from blend_core.errors import ConfigError
from blend_core.messages import Tensors
from blend_core.settings import flat
from blend_core.state import Generations, StateError

FOLDER = "checkpoints"
# What may change when a run is resumed: how long to wait, what to keep, and more rounds.
FREE = {
    "rounds",
    "server.formation_timeout",
    "server.round_timeout",
    "server.keep_checkpoints",
    "server.require_keys",
    "state.on_missing",
}
# In front of the names of clients' uploads, in the file.
_UPLOADS = "uploads/"


@dataclass
class Checkpoint:
    """The server after a round; round 0 is before the first.

    Sampling needs no state of its own: it is a function of seed and round.

    Attributes:
        round: the last round that was averaged.
        federation: names the federation whose private states the sites keep.
        engine: name of the engine, for the results.
        version: of the package that wrote it.
        experiment: the resolved experiment, as JSON data.
        shared: the shared tensors by name.
        uploads: client -> its newest accepted upload, where the method or settings keep them.
        upload_images: client -> training images behind its upload, if stale ones are averaged.
        last_round: client -> newest round of which its reply entered a mean.
        record: what the results are made of so far, as JSON data.
        members: names of the clients; empty before they have joined.
    """

    round: int
    federation: str
    engine: str
    version: str
    experiment: dict[str, Any]
    shared: Tensors
    uploads: dict[str, Tensors] = field(default_factory=dict)
    upload_images: dict[str, int] = field(default_factory=dict)
    last_round: dict[str, int] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    members: list[str] = field(default_factory=list)


class Checkpoints:
    """Checkpoints of one run, one file per round, the newest `keep` of them.

    Args:
        out: the run's folder.
        keep: how many to keep, from 1.
    """

    def __init__(self, out: Path, keep: int = 3) -> None:
        self.generations = Generations(out / FOLDER, keep)

    def exist(self) -> bool:
        """Whether there is any, damaged or not."""
        return bool(self.generations.rounds())

    def newest_round(self) -> int:
        """The newest round that has one, damaged or not; 0 if there is none yet."""
        return max(self.generations.rounds(), default=0)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write one durably. Raises `StateError`; older ones are untouched."""
        facts = {k: v for k, v in vars(checkpoint).items() if k not in ("shared", "uploads")}
        uploads = {
            f"{_UPLOADS}{client}/{name}": value
            for client, upload in checkpoint.uploads.items()
            for name, value in upload.items()
        }
        self.generations.save(checkpoint.round, {**checkpoint.shared, **uploads}, facts)

    def newest(self, on_damage: Callable[[str], None] = lambda text: None) -> Checkpoint | None:
        """The newest intact checkpoint; None if the run has none at all.

        Args:
            on_damage: told about every damaged one that is newer, in one line.

        Raises:
            StateError: there are some, but none is intact.
        """
        damaged = ""
        for round in reversed(self.generations.rounds()):
            try:
                return self.load(round)
            except StateError as error:
                damaged = str(error)
                on_damage(damaged)
        if damaged:
            raise StateError(f"{damaged}; no checkpoint is intact: restore one from a backup")
        return None

    def load(self, round: int) -> Checkpoint:
        """Read and check one. Raises `StateError`."""
        tensors, facts = self.generations.load(round)
        shared: Tensors = {}
        uploads: dict[str, Tensors] = {}
        for name, value in tensors.items():
            if not name.startswith(_UPLOADS):
                shared[name] = value
                continue
            client, _, tensor = name.removeprefix(_UPLOADS).partition("/")
            uploads.setdefault(client, {})[tensor] = value
        try:
            return Checkpoint(**facts, shared=shared, uploads=uploads)
        except TypeError:
            path = self.generations.path(round)
            raise StateError(f"{path}: was written by another version of this package") from None


def require_same(experiment: Experiment, before: Checkpoint) -> None:
    """Refuse to go on with another experiment than the run began with.

    Raises:
        ConfigError: lists what differs. Rounds may be extended and what is in `FREE` changed.
    """
    try:
        # A setting that an earlier version did not have stands at its default.
        begun = parse_experiment(before.experiment).to_json()
    except ConfigError:
        begun = before.experiment  # What it says that is unknown here shows as a difference.
    old, new = flat(begun), flat(experiment.to_json())
    wrong = [
        f"{key} was {old.get(key)!r}, is {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if key not in FREE and old.get(key) != new.get(key)
    ]
    rounds = int(before.experiment["rounds"])
    if experiment.rounds < rounds:
        wrong.append(f"rounds was {rounds}, is {experiment.rounds} (may only be extended)")
    elif experiment.rounds > rounds and experiment.train.schedule != "constant":
        # The learning rates of the rounds that are done would have been others.
        wrong.append(f"rounds was {rounds} and train.schedule depends on it")
    if wrong:
        raise ConfigError(f"a resumed run must be the same experiment: {'; '.join(wrong)}")
