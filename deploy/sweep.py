"""`blend sweep`: the runs of a grid, several at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from deploy.grid import Cell, Sweep, labels, narrowed, read_grid, resolve
from deploy.options import Debug, Engine, parse_seeds
from deploy.signals import Interrupted, uninterrupted
from deploy.sweep_runner import DAY, CellResult, run_sweep


def sweep(
    grid: str,
    seeds: Annotated[
        str | None, typer.Option(metavar="0,1,2", help="Instead of the grid's seeds.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="METHOD", help="Only the runs of this method; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for all runs, new or of the same sweep; none: runs/sweep-NAME."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Runs at a time; none: as many as cores allow, with a GPU one by one."
        ),
    ] = None,
    engine: Annotated[Engine, typer.Option(help="As of a run.")] = Engine.LOOP,
    cell_timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which a run is ended as failed.")
    ] = DAY,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print the runs; start nothing.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Run a grid of methods, settings and seeds; again: what has not finished.

    GRID is a YAML file, or the name of a grid that comes along, such as example.

    A run whose settings or package version have changed is repeated, and its folder replaced.
    """
    with uninterrupted():  # A signal in the middle of an import may be swallowed by it.
        numbers = None if seeds is None else parse_seeds(seeds)
        plan = narrowed(read_grid(grid), numbers, only or [])
        if dry_run:
            resolve(plan)
    console = Console(highlight=False)
    if dry_run:
        _print_plan(plan, console)
        return
    out = (out or Path("runs") / f"sweep-{Path(grid).stem}").expanduser().absolute()
    try:
        results = run_sweep(plan, out, jobs, console, engine, cell_timeout)
    except Interrupted:
        console.print("the same command continues this sweep")
        raise
    print_summary(results, out, console)
    if any(result.status == "failed" for result in results.values()):
        raise typer.Exit(1)


def print_summary(results: Mapping[Cell, CellResult], out: Path, console: Console) -> None:
    """Print how many runs came to what, why some failed, and what to do next."""
    counts = Counter(result.status for result in results.values())
    _say(console, f"{counts['done']} done, {counts['reused']} reused, {counts['failed']} failed")
    names = labels(list(results))
    for cell, result in results.items():
        if result.status == "failed":
            _say(
                console,
                f"failed: {names[cell]}, seed {cell.seed}: {result.reason}; log: {result.log}",
            )
    if counts["failed"] < len(results):
        _say(console, f"to compare: blend compare {out}")


def _print_plan(sweep: Sweep, console: Console) -> None:
    """Print the settings of every cell over the base once, with its seeds."""
    seeds: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for cell in sweep.cells:
        seeds.setdefault(cell.settings, []).append(cell.seed)
    for cell, name in labels(sweep.cells).items():
        if cell.settings in seeds:
            listed = ", ".join(map(str, seeds.pop(cell.settings)))
            _say(console, f"{name}, seeds {listed}")
            for setting in cell.overrides[:-1]:
                _say(console, f"  {setting}")
    runs = f"{len(sweep.cells)} run{'' if len(sweep.cells) == 1 else 's'}"
    _say(console, f"{runs} over base {sweep.base}; nothing was started")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
