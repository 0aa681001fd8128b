"""`blend reproduce`: one table of the papers: its runs, and its numbers beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from blend_core.errors import ConfigError, RunError
from deploy.options import Debug, Overrides, parse_names, parse_seeds
from deploy.signals import uninterrupted
from deploy.table import WIDTH

if TYPE_CHECKING:
    from blend_core.report.paper_report import Report
    from blend_core.report.reproduced import Outcome
    from blend_core.report.reproductions import PaperTable, Plan
    from deploy.grid import Cell, Sweep
    from deploy.sweep_runner import CellResult

# What the runs' settings lie over.
PAPER_PRESET, SHAPES_PRESET = "blend-paper", "quickstart"
SEEDS = "0,1,2"
NO_DATA = (
    "needs the papers' datasets: --set data.root=DIR, the folder that holds them (docs/data.md); "
    "--on shapes runs the same rows on the built-in benchmark"
)


class On(StrEnum):
    """Where a table may be made instead of the papers' datasets."""

    SHAPES = "shapes"


def reproduce(
    table: Annotated[str | None, typer.Argument()] = None,
    on: Annotated[
        On | None,
        typer.Option(help="The same rows on the built-in benchmark, in minutes."),
    ] = None,
    datasets: Annotated[
        str | None, typer.Option(metavar="A,B", help="Some of the datasets; none: all.")
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="0,1,2", help="Seeds of every run.")] = SEEDS,
    settings: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print settings and runs, and stop.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for runs and report; finished runs in it are not repeated."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; none: as many as the cores allow.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Make a table of the papers again: run its sweep, put paper and ours side by side.

    TABLE is a name of the list that the command prints without it.
    """
    with uninterrupted():  # A signal in the middle of an import may be swallowed by it.
        from blend_core.report.paper_report import Report, write_report
        from blend_core.report.papers import read_paper_tables
        from blend_core.report.reproduced import join
        from blend_core.report.reproductions import plan, read_reproductions
        from blend_core.settings import parse_overrides
        from deploy.sweep_runner import run_sweep

    console = Console(highlight=False)
    known = read_reproductions()
    if table is None:
        _list(known, console)
        return
    if table not in known:
        raise ConfigError(f"{table}: unknown table; known: {', '.join(known)}")
    names = None if datasets is None else parse_names("--datasets", datasets)
    given = parse_overrides(settings or [])
    planned = plan(known[table], names, parse_seeds(seeds), on is not None, given)
    sweep, cells = expand(planned)
    if dry_run:
        _print_plan(planned, sweep, console)
        return
    _require_root(planned)
    folder = out or Path("runs") / f"reproduce-{table}{f'-on-{on}' if on else ''}"
    try:
        results = run_sweep(sweep, folder, jobs, console)
    except ConfigError as error:
        raise ConfigError(_refusal(error)) from None
    outcomes = _outcomes(cells, results)
    papers = read_paper_tables()
    report = Report(planned, outcomes, join(planned, papers, outcomes))
    print_report(report, papers, console)
    for path in write_report(report, papers, folder):
        console.print(f"written: {path}", markup=False, soft_wrap=True)
    if lost := sum(result.status == "failed" for result in results.values()):
        raise RunError(f"{lost} of {len(results)} runs failed; the same command runs them again")


def expand(plan: Plan) -> tuple[Sweep, list[dict[int, Cell]]]:
    """The sweep of a plan; rows with equal settings share their runs.

    Returns:
        The sweep, and for every planned row its cells by seed.
    """
    from deploy.grid import Cell, Sweep

    cells = [
        {seed: Cell(tuple(sorted(work.settings.items())), seed) for seed in plan.seeds}
        for work in plan.planned
    ]
    different = dict.fromkeys(cell for by_seed in cells for cell in by_seed.values())
    return Sweep(SHAPES_PRESET if plan.on_shapes else PAPER_PRESET, tuple(different)), cells


def print_report(report: Report, papers: Mapping[str, Any], console: Console) -> None:
    """Print settings, numbers and notes, at most 80 columns wide; grey: not comparable."""
    from blend_core.report import paper_report as texts

    width = min(WIDTH, console.width)
    table, on_shapes = report.plan.table, report.plan.on_shapes
    lines = texts.settings_lines(report.plan)
    _print_lines([table.title, *(f"- {line}" for line in lines)], console)
    numbers = texts.marks(report.entries)
    for name, entries in texts.by_dataset(report.entries):
        title = texts.dataset_title(name, table, papers)
        grid = Table(title=title, title_justify="left", title_style="")
        headings = texts.headings(on_shapes)
        for heading in headings[:2]:
            grid.add_column(heading, overflow="fold")
        for heading in headings[2:]:
            grid.add_column(heading, justify="right", no_wrap=heading != "")
        before = None
        for entry in entries:
            label, *cells = texts.cells(entry, numbers, on_shapes)
            if before not in (None, entry.row):
                grid.add_section()
            style = "dim" if entry.reasons and not on_shapes else ""
            grid.add_row("" if entry.row is before else label, *cells, style=style)
            before = entry.row
        console.print(grid, width=width)
    found = [f"{number}: {text}" for text, number in numbers.items()]
    said = [f"- {note}" for note in texts.notes(report)]
    _print_lines([texts.legend(on_shapes), *found, *said], console)


def _print_plan(plan: Plan, sweep: Sweep, console: Console) -> None:
    """What forbids the runs, settings with their sources, datasets, rows, and how many runs."""
    from blend_core.report.paper_report import listed, settings_lines
    from deploy.grid import resolve

    try:
        _require_root(plan)
        resolve(sweep)
    except ConfigError as error:  # First: whoever has no data needs nothing else of the plan yet.
        _print_lines([f"cannot run: {_refusal(error)}"], console)
    table, datasets = plan.table, plan.datasets
    _print_lines([table.title, *(f"- {line}" for line in settings_lines(plan))], console)
    _print_lines([f"datasets: {', '.join(datasets)}", "rows:"], console)
    for work in plan.planned:
        if work.dataset == datasets[0]:  # A row's own settings are the same on all datasets.
            own = {"method.name": work.row.method} | {k: work.settings[k] for k in work.row.set}
            end = ", before training" if work.row.measured == "zero_shot" else ""
            _print_lines([f"- {work.row.label}: {listed(own)}{end}"], console)
    sizes = {"row": len(table.rows), "dataset": len(datasets), "seed": len(plan.seeds)}
    counts = " x ".join(_count(number, noun) for noun, number in sizes.items())
    _print_lines([f"{counts}, equal runs once: {_count(len(sweep.cells), 'run')}"], console)


def _list(known: Mapping[str, PaperTable], console: Console) -> None:
    """Names, titles, and how many runs each table takes with the default seeds."""
    from blend_core.report.reproductions import plan

    seeds = parse_seeds(SEEDS)
    for name, table in known.items():
        shapes, papers = (
            len(expand(plan(table, None, seeds, on_shapes, {}))[0].cells)
            for on_shapes in (True, False)
        )
        runs = f"{_count(shapes, 'run')} on shapes, {papers} on the papers' datasets"
        _print_lines([f"{name}: {table.title}", f"  {len(seeds)} seeds: {runs}"], console)


def _print_lines(lines: Sequence[str], console: Console) -> None:
    for line in lines:
        console.print(line, markup=False, width=min(WIDTH, console.width))


def _outcomes(
    cells: Sequence[Mapping[int, Cell]], results: Mapping[Cell, CellResult]
) -> list[Outcome]:
    """The runs of every planned row, read from their folders."""
    from blend_core.report.reproduced import Outcome
    from blend_core.report.runs import load_runs

    outcomes = []
    for by_seed in cells:
        found = {seed: results[cell] for seed, cell in by_seed.items()}
        failed = {s: str(result.reason) for s, result in found.items() if result.status == "failed"}
        runs = {s: load_runs([found[s].folder])[0] for s in found if s not in failed}
        outcomes.append(Outcome(runs, failed))
    return outcomes


def _require_root(plan: Plan) -> None:
    """Refuse to look for the papers' datasets where nobody said where they are."""
    if not plan.on_shapes and "data.root" not in plan.given:
        raise ConfigError(f"{plan.table.name}: {NO_DATA}")


def _refusal(error: ConfigError) -> str:
    """The first mistake of a sweep, which has a line for each."""
    return str(error).splitlines()[0]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
