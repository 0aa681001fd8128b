"""Rows side by side: zero-shot always among them, and a paired test against a baseline."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blend_core.errors import ConfigError, RunError
from blend_core.metrics import METRIC_NAMES, METRICS
from blend_core.report.labels import differing
from blend_core.report.rows import ZERO_SHOT, Row, group_rows, labelled
from blend_core.report.runs import Run
from blend_core.significance import SEEDS_FOR_A_CLAIM, PairedTest, holm, paired_test

NO_BASELINE = "no comparable baseline"


@dataclass(frozen=True)
class Line:
    """One row of the table and how it stands against its baseline.

    Attributes:
        row: the runs.
        baseline: label of the row it is tested against; None: it is the baseline, or there is
            none of the same setup.
        test: differences row - baseline of the tested metric; None for a baseline.
        holm: p adjusted over all tests of the table.
    """

    row: Row
    baseline: str | None
    test: PairedTest | None
    holm: float | None


@dataclass(frozen=True)
class Comparison:
    """Everything a table shows.

    Attributes:
        metric: the tested metric, one of `METRICS`.
        lines: setup by setup, zero-shot first, then the rows in the order of their runs.
        note: what the runs themselves say about their benchmark; "" if nothing.
        caution: why the tests support no claim; "" if nothing.
        notes: what a reader must know, one sentence each.
        warnings: what makes rows incomparable, one sentence each.
    """

    metric: str
    lines: tuple[Line, ...]
    note: str
    caution: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Costs:
    """What a row costs, on average over its runs; None: not recorded.

    Attributes:
        bytes_up: payload that one client uploads in one round.
        private_bytes: size of the tensors that never leave a client, 4 bytes a value.
        seconds: wall time of a round, with its evaluation.
    """

    bytes_up: float | None
    private_bytes: int | None
    seconds: float | None


def compare(runs: Sequence[Run], baseline: str | None = None, metric: str = "hmean") -> Comparison:
    """Group runs into rows, add zero-shot, and test every row against the baseline.

    Rows are tested only within the same setup (`Row.setup`).

    Args:
        runs: at least one.
        baseline: label of a row, or name of a method with one row per setup; None: zero-shot.
        metric: one of `METRICS`.

    Raises:
        ConfigError: unknown metric; no row or several rows of a setup are the baseline.
        RunError: no runs, or two runs of the same row and seed differ.
    """
    if metric not in METRICS:
        raise ConfigError(f"--metric {metric}: unknown; known: {', '.join(METRICS)}")
    if not runs:
        raise RunError("no finished run is left to compare")
    trained = group_rows(runs)
    zero_shot, warnings = _zero_shot_rows(trained)
    rows = labelled(
        [
            row
            for first in zero_shot
            for row in (first, *(r for r in trained if r.method != ZERO_SHOT))
            if row.setup == first.setup
        ]
    )
    baselines = _baselines(rows, ZERO_SHOT if baseline is None else baseline)
    tests: list[PairedTest | None] = []
    for row in rows:
        reference = baselines.get(_setup(row))
        if reference is None:
            tests.append(PairedTest(0, None, reason=NO_BASELINE))
        elif reference is row:
            tests.append(None)
        else:
            tests.append(paired_test(row.values(metric), reference.values(metric)))
    adjusted = holm([test.p if test else None for test in tests])
    lines = []
    for row, test, p in zip(rows, tests, adjusted, strict=True):
        reference = baselines.get(_setup(row)) if test else None
        lines.append(Line(row, reference.label if reference else None, test, p))
    if keys := differing([row.setup for row in rows]):
        warnings.insert(
            0,
            f"not comparable: rows differ in {', '.join(keys)}; each is tested only against a "
            "baseline that agrees with it in these",
        )
    versions = Counter(str(run.results.get("version", "unknown")) for run in runs)
    if len(versions) > 1:
        counts = ", ".join(f"{name} ({n})" for name, n in sorted(versions.items()))
        warnings.insert(0, f"the runs come from different package versions: {counts}")
    recorded = {run.results.get("note") for run in runs}
    note = "; ".join(sorted(text for text in recorded if text))
    notes = _notes(metric, lines) + _facts(trained)
    return Comparison(metric, tuple(lines), note, _caution(lines), tuple(notes), tuple(warnings))


def costs(row: Row) -> Costs:
    """What the runs of a row sent, keep and took."""
    if row.method == ZERO_SHOT:
        return Costs(0, 0, None)
    rounds = [entry for run in row.runs.values() for entry in run.results["rounds"]]
    sent = [
        client["bytes_up"]
        for entry in rounds
        for client in entry["clients"]
        if client.get("bytes_up") is not None
    ]
    private = [
        4 * run.results["parameters"]["private"]
        for run in row.runs.values()
        if run.results.get("parameters")
    ]
    return Costs(
        statistics.fmean(sent) if sent else None,
        private[0] if private else None,
        statistics.fmean(entry["seconds"] for entry in rounds) if rounds else None,
    )


def _zero_shot_rows(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """One row per setup, of what every run measured before it trained; and who disagrees."""
    found: dict[str, dict[int, Run]] = {}
    configs: dict[str, dict[str, Any]] = {}
    warnings = []
    for row in rows:
        key = _setup(row)
        configs[key] = {"method.name": ZERO_SHOT, **row.setup}
        for seed, run in row.runs.items():
            first = found.setdefault(key, {}).setdefault(seed, run)
            if first.results["zero_shot"]["counts"] != run.results["zero_shot"]["counts"]:
                warnings.append(
                    f"zero-shot of seed {seed} differs between {first.folder} and {run.folder}: "
                    "not the same images or backbone; the first is shown"
                )
            elif first.results.get("manifest_sha256") != run.results.get("manifest_sha256"):
                warnings.append(
                    f"the partition of seed {seed} differs between {first.folder} and "
                    f"{run.folder}: what differs between them is not the method alone"
                )
    zero_shot = []
    for key, runs in found.items():
        measured = {
            seed: Run(run.folder, {**run.results, "final": run.results["zero_shot"]})
            for seed, run in sorted(runs.items())
        }
        zero_shot.append(Row(ZERO_SHOT, configs[key], measured))
    return zero_shot, warnings


def _baselines(rows: Sequence[Row], name: str) -> dict[str, Row]:
    """Setup -> the row that the others of that setup are tested against."""
    chosen = [row for row in rows if row.label == name]
    chosen = chosen or [row for row in rows if row.method == name]
    labels = ", ".join(f"'{row.label}'" for row in chosen or rows)
    if not chosen:
        raise ConfigError(f"--baseline '{name}': no such row; rows: {labels}")
    baselines: dict[str, Row] = {}
    for row in chosen:
        if baselines.setdefault(_setup(row), row) is not row:
            raise ConfigError(f"--baseline '{name}': several rows, name one: {labels}")
    return baselines


def _setup(row: Row) -> str:
    return json.dumps(row.setup, sort_keys=True)


def _caution(lines: Sequence[Line]) -> str:
    """Why the tests support no claim; "" if nothing."""
    pairs = [line.test.n for line in lines if line.test and line.baseline]
    if not pairs or min(pairs) >= SEEDS_FOR_A_CLAIM:
        return ""
    return "fewer than five seeds: no basis for a claim of significance"


def _notes(metric: str, lines: Sequence[Line]) -> list[str]:
    """How to read the numbers."""
    notes = [
        "percent, mean over seeds ± sample standard deviation; H-Mean and HM are taken of the "
        "client means of each seed, then averaged over seeds",
        "zero-shot: CLIP as it is, measured by these runs before training; its Per. is over the "
        "classes of each client, its Base over the whole base test set, which is what BLEND's "
        "paper prints as Per. of zero-shot",
    ]
    tests = [line.test for line in lines if line.test and line.baseline]
    if tests:
        named = sorted({line.baseline for line in lines if line.baseline})
        # A label begins with the method's name, and several baselines are of one method.
        against = named[0] if len(named) == 1 else f"{named[0].split()[0]} of the same setup"
        family = sum(test.p is not None for test in tests)
        notes.append(
            f"difference: {METRIC_NAMES[metric]} minus that of {against} at equal seeds, in "
            "points; two-sided paired t-test"
            + (f", Holm over {family} row{'' if family == 1 else 's'}" if family else "")
        )
    said = list(dict.fromkeys(_what_seeds_vary(line.row.config) for line in lines))
    # The seeds are part of the labels where they differ.
    notes += [f"in some rows {text}" for text in said] if len(said) > 1 else said
    return notes


def _what_seeds_vary(config: Mapping[str, Any]) -> str:
    if config.get("data.kind") == "folders":
        return "seeds vary the training only: images and clients are the sites' own"
    if config.get("data.manifest") is not None:
        return "the partition and the few-shot draw are fixed (data.manifest)"
    fixed = {
        name: config.get(f"data.{key}_seed")
        for key, name in (("partition", "partition"), ("fewshot", "few-shot draw"))
    }
    varied = [name for name, seed in fixed.items() if seed is None]
    parts = [
        f"the {name} is fixed (seed {seed})" for name, seed in fixed.items() if seed is not None
    ]
    if varied:
        parts.insert(0, f"seeds vary the {' and the '.join(varied)}")
    if fixed["partition"] is not None:
        parts.append("a test speaks about that one partition only")
    return "; ".join(parts)


def _facts(rows: Sequence[Row]) -> list[str]:
    """What happened in single runs that the means do not show."""
    facts = []
    for row in rows:
        for run in row.repeats:
            facts.append(f"{run.folder}: the same as {row.runs[run.seed].folder}, used once")
        for run in row.runs.values():
            if missing := run.results.get("clients_not_evaluated"):
                facts.append(f"{run.folder}: not in its means: {', '.join(missing)}")
            replies = [c for entry in run.results["rounds"] for c in entry["clients"]]
            if lost := sum(reply["status"] != "accepted" for reply in replies):
                facts.append(f"{run.folder}: {lost} of {len(replies)} replies did not count")
    return facts
