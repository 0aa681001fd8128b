"""The rows of a table: runs that differ in nothing but their seed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blend_core.config import DATASET_KINDS
from blend_core.errors import RunError, one_line
from blend_core.report.labels import differing, settings_label
from blend_core.report.runs import Run
from blend_core.settings import flat

ZERO_SHOT = "zero-shot"

# Settings that decide where, how fast and how often, or when a reply or a run is given up. They
# make no other experiment, but may change the rounding of sums, or which replies count: where two
# runs show it, `group_rows` says so.
_NO_OTHER_EXPERIMENT = {
    "seed",
    "backbone.text_chunk",
    "data.image_memory",
    "train.threads",
    "train.device",
    "evaluation.every",
    "evaluation.select",
    "server.min_replies",
    "server.formation_timeout",
    "server.round_timeout",
    "server.max_images",
    "server.max_change",
    "server.keep_checkpoints",
}
_LONGEST_VALUE = 24


@dataclass(frozen=True)
class Row:
    """Runs of one method and setting; their seeds are the repetitions.

    Attributes:
        label: name of the method and the settings that set it apart from other rows.
        config: dotted setting -> value, without the seed and settings that make no other
            experiment, such as the number of threads.
        runs: seed -> run, in rising order of seeds.
        repeats: runs left out because another of the same seed has the same result.
    """

    label: str
    config: Mapping[str, Any]
    runs: Mapping[int, Run]
    repeats: tuple[Run, ...] = ()

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.config["method.name"])

    @property
    def n(self) -> int:
        """Number of seeds."""
        return len(self.runs)

    @property
    def setup(self) -> dict[str, Any]:
        """The settings that must be equal for two rows to be comparable: not method and training.

        Batches of the evaluation are among them: FedOTP's scores depend on an image's batch.
        """
        return {k: v for k, v in self.config.items() if not k.startswith(("method.", "train."))}

    def values(self, metric: str) -> dict[int, float]:
        """Seed -> metric after the last round, in percent; without seeds that lack it."""
        found = {seed: run.results["final"].get(metric) for seed, run in self.runs.items()}
        return {seed: float(value) for seed, value in found.items() if value is not None}

    def mean(self, metric: str) -> float | None:
        """Mean over seeds, in percent; None without any."""
        values = self.values(metric).values()
        return statistics.fmean(values) if values else None

    def std(self, metric: str) -> float | None:
        """Sample standard deviation (ddof 1) over seeds, in points; None below two."""
        values = self.values(metric)
        return statistics.stdev(values.values()) if len(values) > 1 else None


def group_rows(runs: Iterable[Run]) -> list[Row]:
    """Put the runs of one experiment into one row: only seed, threads, device and the like differ.

    A row's label is the method's name and `key=value` for the settings of method and training in
    which rows of that method differ, and for all others in which any two rows differ.

    Returns:
        Rows in the order of their first run.

    Raises:
        RunError: two runs of a row and seed have different results; names their folders and the
            settings in which they differ.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps(_config(run), sort_keys=True)
        groups.setdefault(key, []).append(run)
    unlabelled = []
    for members in groups.values():
        seeds: dict[int, Run] = {}
        repeats = []
        for run in members:
            first = seeds.setdefault(run.seed, run)
            if first is run:
                continue
            if _fingerprint(first) != _fingerprint(run):
                raise RunError(
                    f"{first.folder} and {run.folder} are the same experiment with seed {run.seed} "
                    f"({run.method}), but their results differ; {_difference(first, run)}: "
                    "leave one out"
                )
            repeats.append(run)
        config = _config(members[0])
        unlabelled.append(Row("", config, dict(sorted(seeds.items())), tuple(repeats)))
    return labelled(unlabelled)


def labelled(rows: Sequence[Row]) -> list[Row]:
    """Give rows the labels, all different, that tell them apart in one table (`group_rows`)."""
    setup = differing([row.setup for row in rows])
    labels: list[str] = []
    for row in rows:
        same = [other.config for other in rows if other.method == row.method]
        own = [key for key in differing(same) if key.startswith(("method.", "train."))]
        keys = [key for key in (*own, *setup) if key in row.config]
        label = one_line(f"{row.method} {settings_label(row.config, keys, _value)}")
        # Values that were cut may look alike.
        alike = sum(other.partition(" (")[0] == label for other in labels)
        labels.append(f"{label} ({alike + 1})" if alike else label)
    return [replace(row, label=label) for label, row in zip(labels, rows, strict=True)]


def _config(run: Run) -> dict[str, Any]:
    """What must be equal in the runs of one row, by dotted name."""
    config = flat(run.results["config"])
    config = {k: v for k, v in config.items() if k not in _NO_OTHER_EXPERIMENT}
    if config.get("data.kind") in DATASET_KINDS:  # Its files were compared with the published ones.
        config.pop("data.root", None)
    if run.method == ZERO_SHOT:  # Nothing is trained.
        config = {k: v for k, v in config.items() if not k.startswith("train.")}
    return config


def _difference(first: Run, second: Run) -> str:
    """Where two runs of one experiment differ besides their results, as part of a sentence."""
    known = []
    for run in (first, second):
        facts = {name: run.results.get(name) for name in ("version", "engine")}
        known.append({**facts, **flat(run.results["config"])})
    keys = differing(known)
    values = (f"{key} ({', '.join(_value(facts.get(key)) for facts in known)})" for key in keys)
    return f"they differ in {', '.join(values)}" if keys else "no setting tells them apart"


def _fingerprint(run: Run) -> Any:
    results = run.results
    private = {client["name"]: client.get("private_sha256") for client in results["clients"]}
    return results.get("shared_sha256"), private, results["final"]["counts"]


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text if len(text) <= _LONGEST_VALUE else f"...{text[-_LONGEST_VALUE + 3 :]}"
