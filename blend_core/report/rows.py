"""The rows of a table: runs that differ in nothing but their seed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blend_core.errors import RunError
from blend_core.report.runs import Run

ZERO_SHOT = "zero-shot"

# Settings that decide where, how fast and how often, or when a run gives up, not what is computed.
_WITHOUT_EFFECT = {
    "seed",
    "backbone.text_chunk",
    "train.threads",
    "train.device",
    "evaluation.every",
    "evaluation.batch_size",
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
        config: dotted setting -> value, without seed and settings that change no number.
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
        """The settings that must be equal for two rows to be comparable: all but the method's."""
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
    """Put runs that differ in nothing but the seed into one row.

    A row's label is the method's name and `key=value` for the settings of method and training in
    which rows of that method differ, and for all others in which any two rows differ.

    Returns:
        Rows in the order of their first run.

    Raises:
        RunError: two runs of the same settings and seed have different results.
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
                    f"{first.folder} and {run.folder} are both {run.method} with seed {run.seed} "
                    "and the same settings, but their results differ: leave one out"
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
        short = [key.rpartition(".")[2] for key in keys]
        shown = [s if short.count(s) == 1 else k for k, s in zip(keys, short, strict=True)]
        values = (f"{s}={_value(row.config[k])}" for k, s in zip(keys, shown, strict=True))
        label = " ".join((row.method, *values))
        # Values that were cut may look alike.
        alike = sum(other.partition(" (")[0] == label for other in labels)
        labels.append(f"{label} ({alike + 1})" if alike else label)
    return [replace(row, label=label) for label, row in zip(labels, rows, strict=True)]


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that are not equal in all of these; a missing one differs from any value."""
    keys = sorted({key for config in configs for key in config})
    return [
        k for k in keys if len({json.dumps(c.get(k, "\0"), sort_keys=True) for c in configs}) > 1
    ]


def _config(run: Run) -> dict[str, Any]:
    """What must be equal in the runs of one row, by dotted name."""
    flat = {k: v for k, v in _flat(run.results["config"], "") if k not in _WITHOUT_EFFECT}
    if run.method == ZERO_SHOT:  # Nothing is trained.
        flat = {k: v for k, v in flat.items() if not k.startswith("train.")}
    return flat


def _flat(settings: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _fingerprint(run: Run) -> Any:
    results = run.results
    private = {client["name"]: client.get("private_sha256") for client in results["clients"]}
    return results.get("shared_sha256"), private, results["final"]["counts"]


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text if len(text) <= _LONGEST_VALUE else f"...{text[-_LONGEST_VALUE + 3 :]}"
