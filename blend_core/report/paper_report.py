"""The report of a reproduction: settings, numbers, marks and notes; as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from blend_core import __version__
from blend_core.metrics import DASH, METRIC_NAMES
from blend_core.report.reproduced import MEAN, STD, Entry, Outcome
from blend_core.report.reproductions import SHAPES, SOURCES, Choices, PaperTable, Plan, Settings
from blend_core.state import make_folder, write_bytes_atomic, write_json_atomic

CSV_COLUMNS = (
    *("table", "dataset", "row", "metric", "paper", "ours", "difference", "n", "spread"),
    *("comparable", "reasons", "missing"),
)


@dataclass(frozen=True)
class Report:
    """All that is said about a table.

    Attributes:
        plan: the table and the runs that were asked for.
        outcomes: what became of each of its rows on the datasets.
        entries: the numbers (`join`).
    """

    plan: Plan
    outcomes: Sequence[Outcome]
    entries: Sequence[Entry]


def write_report(report: Report, papers: Mapping[str, Any], out: Path) -> list[Path]:
    """Write report.md, report.csv and report.json into `out` and return their paths.

    Raises:
        StateError: a file cannot be written.
    """
    make_folder(out)
    write_json_atomic(out / "report.json", as_json(report))
    write_bytes_atomic(out / "report.csv", as_csv(report).encode())
    write_bytes_atomic(out / "report.md", as_markdown(report, papers).encode())
    return [out / f"report.{ending}" for ending in ("md", "csv", "json")]


def settings_lines(plan: Plan) -> list[str]:
    """Which settings the runs have, and where each comes from."""
    table, on_shapes = plan.table, plan.on_shapes
    lines = ["preset quickstart"] if on_shapes else []
    scopes = [("", table.protocol.common)]
    if not on_shapes:
        scopes += [(f"{name}: ", table.datasets[name]) for name in plan.datasets]
    methods = table.protocol.methods
    scopes += [(f"{name}: ", methods.get(name, Choices())) for name in table.methods]
    for prefix, scope in scopes:
        for source, settings in scope.by_source(on_shapes):
            lines.append(f"{prefix}{listed(settings)} ({SOURCES[source]})")
    if any(work.row.set for work in plan.planned):
        lines.append("a row's own settings come last")
    if plan.given:
        lines.append(f"{listed(plan.given)} (--set)")
    fixed = plan.planned[0].settings.get("data.partition_seed")
    varied = (
        "images, order and initial values"
        if fixed is not None
        else "images, shares, order and initial values"
    )
    end = "" if fixed is None else f"; the partition is that of data.partition_seed {fixed} for all"
    lines.append(f"seeds {', '.join(map(str, plan.seeds))}: they vary {varied}{end}")
    return lines


def legend(on_shapes: bool) -> str:
    """How to read the numbers. On the built-in benchmark nothing is compared with the papers'."""
    barred = "paper and ours are" if on_shapes else "(in brackets):"
    return (
        "percent; ours: mean over n seeds, spread: their sample standard deviation; "
        f"{barred} not comparable, the last column says why"
    )


def listed(settings: Settings) -> str:
    """E.g. "rounds 50, train.lr 0.001"."""
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def notes(report: Report) -> list[str]:
    """What a reader of the numbers should know."""
    table = report.plan.table
    protocol = table.protocol
    said = [*table.notes, *(table.notes_on_shapes if report.plan.on_shapes else ())]
    for conflict in protocol.conflicts:
        here = "" if report.plan.on_shapes else f"; here: {conflict['here']}"
        said.append(
            f"{conflict['item']}: paper: {conflict['document']}; released code: "
            f"{conflict['code']}{here}"
        )
    weights = {
        str(run.results["config"]["backbone"]["weights"])
        for outcome in report.outcomes
        for run in outcome.runs.values()
    }
    said += [
        f"backbone.weights is the file {path}: the comparison holds if these are OpenAI's weights"
        for path in sorted(weights)
        if Path(path).is_absolute()
    ]
    return said


def marks(entries: Sequence[Entry]) -> dict[str, int]:
    """Numbers of all reasons and missing runs, in order of appearance."""
    texts = dict.fromkeys(text for entry in entries for text in (*entry.reasons, *entry.missing))
    return {text: number for number, text in enumerate(texts, 1)}


def by_dataset(entries: Sequence[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    """The entries of each dataset, then those over datasets."""
    for name, found in groupby(entries, key=lambda entry: entry.dataset):
        yield name, list(found)


def dataset_title(name: str, table: PaperTable, papers: Mapping[str, Any]) -> str:
    """Name of a dataset as the papers print it, or what stands in its place."""
    if name == MEAN:
        return "mean over datasets"
    if name == STD:
        return "standard deviation over datasets (population)"
    if name == SHAPES:
        means = "; the paper's numbers are its means over datasets" if table.mean else ""
        return f"built-in shapes{means}"
    known = papers["blend"]["main_table"]["datasets"].get(name)
    return str(known["label"]) if known else name


def headings(on_shapes: bool) -> tuple[str, ...]:
    """Of the columns: two of texts, numbers, and one of marks."""
    return ("", "", "paper", "ours", *(() if on_shapes else ("diff.",)), "n", "spread", "")


def cells(entry: Entry, numbers: Mapping[str, int], on_shapes: bool) -> tuple[str, ...]:
    """A line of the report under the `headings`; two decimals, as in the papers."""
    difference = DASH if entry.difference is None else f"{entry.difference:+.2f}"
    if entry.reasons and entry.difference is not None:
        difference = f"({difference})"
    ours = "missing" if entry.ours is None and entry.missing else _percent(entry.ours)
    return (
        entry.row.label,
        METRIC_NAMES[entry.metric],
        _percent(entry.paper),
        ours,
        *(() if on_shapes else (difference,)),
        str(entry.n),
        _percent(entry.spread),
        ",".join(str(numbers[text]) for text in (*entry.reasons, *entry.missing)),
    )


def as_markdown(report: Report, papers: Mapping[str, Any]) -> str:
    """Settings, a table per dataset and over datasets, the marks, and the notes."""
    numbers = marks(report.entries)
    table, on_shapes = report.plan.table, report.plan.on_shapes
    columns = headings(on_shapes)
    rule = f"|---|---|{'---:|' * (len(columns) - 3)}---|"
    lines = [f"# {table.title}", "", f"`{table.name}`", "", "## Settings", ""]
    lines += [f"- {line}" for line in settings_lines(report.plan)]
    lines += ["", "## Numbers", "", legend(on_shapes), ""]
    for name, entries in by_dataset(report.entries):
        lines += [f"### {dataset_title(name, table, papers)}", "", _markdown_row(columns), rule]
        lines += [_markdown_row(cells(entry, numbers, on_shapes)) for entry in entries]
        lines.append("")
    lines += [f"{number}: {text}  " for text, number in numbers.items()]
    lines += ["", "## Notes", "", *(f"- {note}" for note in notes(report)), ""]
    return "\n".join(lines)


def as_csv(report: Report) -> str:
    """One line per number; an empty field where there is none."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for entry in report.entries:
        values = (entry.ours, entry.difference, entry.n, entry.spread)
        writer.writerow(
            [
                report.plan.table.name,
                entry.dataset,
                entry.row.label,
                entry.metric,
                entry.paper,
                *(f"{v:.2f}" if isinstance(v, float) else v for v in values),
                _comparable(entry),
                "; ".join(entry.reasons),
                "; ".join(entry.missing),
            ]
        )
    return text.getvalue()


def as_json(report: Report) -> dict[str, Any]:
    """Every number unrounded, per seed, with the settings and folders of the runs."""
    plan = report.plan
    return {
        "table": plan.table.name,
        "title": plan.table.title,
        "version": __version__,
        "on": "shapes" if plan.on_shapes else None,
        "seeds": list(plan.seeds),
        "settings": settings_lines(plan),
        "notes": notes(report),
        "entries": [
            {
                "dataset": entry.dataset,
                "row": entry.row.name,
                "label": entry.row.label,
                "metric": entry.metric,
                "paper": entry.paper,
                "ours": entry.ours,
                "difference": entry.difference,
                "n": entry.n,
                "spread": entry.spread,
                "values": {str(seed): value for seed, value in entry.values.items()},
                "comparable": _comparable(entry),
                "reasons": list(entry.reasons),
                "missing": list(entry.missing),
            }
            for entry in report.entries
        ],
        "runs": [
            {
                "dataset": work.dataset,
                "row": work.row.name,
                "settings": dict(work.settings),
                "folders": {str(seed): str(run.folder) for seed, run in outcome.runs.items()},
                "failed": {str(seed): reason for seed, reason in outcome.failed.items()},
            }
            for work, outcome in zip(plan.planned, report.outcomes, strict=True)
        ],
    }


def _comparable(entry: Entry) -> bool:
    return entry.difference is not None and not entry.reasons


def _percent(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


def _markdown_row(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"
