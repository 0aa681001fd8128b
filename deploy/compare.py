"""`blend compare`: finished runs side by side, with paired tests over their seeds."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from blend_core.errors import ConfigError
from deploy.options import Debug
from deploy.table import WIDTH

if TYPE_CHECKING:
    from blend_core.report.comparison import Comparison


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="LABEL",
            help="Row to test against: a method, or a label of the table printed for the same "
            "runs (labels depend on the runs; quote one with spaces); none: zero-shot.",
        ),
    ] = None,
    metric: Annotated[
        str, typer.Option(help="What is tested: per, gen, hmean, local, base, novel or hm.")
    ] = "hmean",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Also write compare.md, .csv, .json, .tex, .png and .svg into this folder."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Compare finished runs: means over seeds, costs, paired t-tests against a baseline.

    Each RUN is the folder of a run, or a folder that holds runs, such as that of a sweep.
    """
    from blend_core.report.comparison import compare as compare_runs
    from blend_core.report.runs import load_runs

    if out is not None:
        there = next(path for path in (out, *out.parents) if path.exists())
        if not there.is_dir():
            raise ConfigError(f"--out {out}: {there} is a file; name a folder")
    console = Console(highlight=False)

    def left_out(line: str) -> None:
        console.print(f"left out: {line}", markup=False, soft_wrap=True)

    comparison = compare_runs(load_runs(runs, left_out), baseline, metric)
    print_comparison(comparison, console)
    if out is not None:
        _write(comparison, out, console)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print metrics, costs and test in tables of at most 80 columns, then what must be known."""
    from blend_core.report.tables import columns, remarks

    width = min(WIDTH, console.width)
    for part in columns(comparison, digits=1):
        table = Table(title=part.title, title_justify="left", title_style="")
        table.add_column("", overflow="fold", min_width=13)
        for heading in part.headings:
            table.add_column(heading, justify="right")
        for line, cells in zip(comparison.lines, part.rows, strict=True):
            # The spread on a line of its own: seven metrics must fit side by side.
            label = Text(line.row.label)  # A list of layers is no markup.
            table.add_row(label, *(cell.replace(" ± ", "\n±") for cell in cells))
        console.print(table, width=width)
    for text in remarks(comparison):
        wrapped = textwrap.fill(
            f"- {text}",
            width,
            subsequent_indent="  ",
            break_long_words=False,  # A path stays whole.
            break_on_hyphens=False,
        )
        console.print(wrapped, markup=False, soft_wrap=True)


def _write(comparison: Comparison, out: Path, console: Console) -> None:
    from blend_core.report.picture import write_picture
    from blend_core.report.tables import write_tables
    from blend_core.state import make_folder

    make_folder(out)
    for path in (*write_tables(comparison, out), *write_picture(comparison, out)):
        console.print(f"written: {path}", markup=False, soft_wrap=True)
