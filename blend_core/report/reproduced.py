"""The paper's numbers beside ours: paper, ours, difference, seeds and spread (PROTOCOL 4, 5)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blend_core.metrics import HARMONIC, harmonic_mean
from blend_core.report.papers import Printed, printed
from blend_core.report.reproductions import Choices, PaperTable, Plan, Planned, TableRow
from blend_core.report.runs import Run

NOT_THE_BENCHMARK = "rendered shapes, tiny model"

# What stands in the place of a dataset for the numbers over all of them.
MEAN = "mean"
STD = "std_datasets_pop"


@dataclass(frozen=True)
class Outcome:
    """What became of the runs of one row on one dataset.

    Attributes:
        runs: seed -> finished run.
        failed: seed -> why there is none, one line.
    """

    runs: Mapping[int, Run]
    failed: Mapping[int, str]


@dataclass(frozen=True)
class Entry:
    """One number of the paper beside ours.

    Attributes:
        dataset: its name, or `MEAN`: mean over datasets, or `STD`: their population standard
            deviation (ddof 0), as the papers compute both.
        row: the line of the table.
        metric: e.g. "hmean".
        paper: printed value in percent; None: not printed.
        values: seed -> our value in percent.
        ours: mean over the seeds (`MEAN`, `STD`: over the datasets' means); None: nothing ran.
        spread: sample standard deviation (ddof 1) over the seeds; None below two.
        difference: ours - paper in points; None if there is none or it would mean nothing.
        reasons: why the two are not comparable; empty: they are.
        missing: which runs are missing, and why.
    """

    dataset: str
    row: TableRow
    metric: str
    paper: float | None
    values: Mapping[int, float]
    ours: float | None
    spread: float | None
    difference: float | None
    reasons: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def n(self) -> int:
        """Number of seeds."""
        return len(self.values)


def join(plan: Plan, papers: Mapping[str, Any], outcomes: Sequence[Outcome]) -> list[Entry]:
    """Put ours beside the paper's, dataset by dataset, row by row, metric by metric.

    H-Mean and HM of a dataset are the mean over seeds of each seed's own; over datasets it is the
    mean of the datasets' values, not the harmonic mean of means. On the built-in benchmark the
    paper's means over datasets stand beside, and nothing is compared.

    Args:
        plan: the table and its rows on datasets.
        papers: the papers' numbers (`read_paper_tables`).
        outcomes: what became of each of `plan.planned`.
    """
    table, on_shapes = plan.table, plan.on_shapes
    entries = []
    for work, outcome in zip(plan.planned, outcomes, strict=True):
        path = _path(table.mean if on_shapes else table.cells, work.dataset, work.row)
        for metric in table.metrics:
            found = (
                (seed, _measured(work.row, run.results[work.row.measured], metric))
                for seed, run in sorted(outcome.runs.items())
            )
            values = {seed: value for seed, value in found if value is not None}
            reasons = list(dict.fromkeys(_differing(work, outcome.runs.values())))
            reasons = [NOT_THE_BENCHMARK] if on_shapes else reasons
            missing = tuple(f"no seed {s}: {why}" for s, why in sorted(outcome.failed.items()))
            ours = statistics.fmean(values.values()) if values else None
            paper = printed(papers, path, metric)
            entries.append(
                _entry(table, work.dataset, work.row, metric, paper, values, ours, reasons, missing)
            )
    if on_shapes:
        return entries
    over = [_over_datasets(table, papers, entries, name) for name in (MEAN, STD)]
    return [*entries, *over[0], *over[1]]


def _over_datasets(
    table: PaperTable, papers: Mapping[str, Any], cells: Sequence[Entry], name: str
) -> Iterator[Entry]:
    """The entries over the datasets; `name` is `MEAN` or `STD`."""
    statistic = statistics.fmean if name == MEAN else statistics.pstdev
    template = table.mean if name == MEAN else table.std
    for row in table.rows:
        for metric in table.metrics:
            here = [cell for cell in cells if cell.row is row and cell.metric == metric]
            known = [cell for cell in here if cell.ours is not None]
            enough = len(known) >= (1 if name == MEAN else 2)
            seeds = set.intersection(*(set(c.values) for c in known)) if enough else set()
            values = {s: statistic([c.values[s] for c in known]) for s in sorted(seeds)}
            ours = statistic([c.ours for c in known if c.ours is not None]) if enough else None
            reasons = list(dict.fromkeys(reason for cell in here for reason in cell.reasons))
            if known and len(known) < len(table.datasets):
                reasons.append(f"{len(known)} of the paper's {len(table.datasets)} datasets")
            missing = tuple(f"no {cell.dataset}" for cell in here if cell.ours is None)
            paper = printed(papers, _path(template, "", row), metric)
            yield _entry(table, name, row, metric, paper, values, ours, reasons, missing)


def _entry(
    table: PaperTable,
    dataset: str,
    row: TableRow,
    metric: str,
    paper: Printed,
    values: Mapping[int, float],
    ours: float | None,
    reasons: Sequence[str],
    missing: tuple[str, ...],
) -> Entry:
    never = paper.barred is not None or NOT_THE_BENCHMARK in reasons
    difference = None
    if ours is not None and paper.value is not None and not never:
        difference = ours - paper.value
    said = list(reasons)
    if paper.value is not None:
        said += [*table.protocol.methods.get(row.method, Choices()).remarks, *row.remarks]
    if paper.barred is not None:
        said.append(paper.barred)
    return Entry(
        dataset=dataset,
        row=row,
        metric=metric,
        paper=paper.value,
        values=values,
        ours=ours,
        spread=statistics.stdev(values.values()) if len(values) > 1 else None,
        difference=difference,
        reasons=tuple(dict.fromkeys(said)),
        missing=missing,
    )


def _measured(row: TableRow, summary: Mapping[str, Any], metric: str) -> float | None:
    """Our value of a printed metric, in percent."""
    if metric in HARMONIC:
        return harmonic_mean([_measured(row, summary, part) for part in HARMONIC[metric]])
    value: float | None = summary.get(row.measured_as.get(metric, metric))
    return value


def _differing(work: Planned, runs: Iterable[Run]) -> Iterator[str]:
    """What of finished runs is not the paper's; a file of weights cannot be judged."""
    for run in runs:
        if run.results.get("comparable") is False:
            yield str(run.results.get("note") or "not the paper's data")
        for key, wanted in work.binding.items():
            value: Any = run.results["config"]
            for name in key.split("."):
                value = value.get(name) if isinstance(value, Mapping) else None
            if key == "backbone.weights" and Path(str(value)).is_absolute():
                continue
            if value != wanted:
                yield f"{key} {value} (paper: {wanted})"


def _path(template: str | None, dataset: str, row: TableRow) -> str | None:
    return template.format(dataset=dataset, row=row.name) if template and row.paper else None
