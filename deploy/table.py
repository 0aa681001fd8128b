"""The table at the end of a run: zero-shot against the method, per client and on average."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from blend_core.metrics import DASH, METRIC_NAMES, client_metrics

# Columns of a terminal that every table fits.
WIDTH = 80

Results = Mapping[str, Any]


def print_results(results: Results, path: Path, console: Console) -> None:
    """Print what `results.json` holds, in tables of at most 80 columns.

    Args:
        results: the parsed file.
        path: where it lies.
        console: where to print.
    """
    method = str(results["method"])
    console.print(f"\n{method}, {len(results['clients'])} clients, seed {results['seed']}")
    if results.get("note"):
        console.print(results["note"], highlight=False)
    summaries = {"zero-shot": results["zero_shot"]}
    if method != "zero-shot":
        summaries[method] = results["final"]
    console.print(metrics_table(summaries))
    for line in _left_out(results):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(costs_table(results))
    seconds = results["seconds"]
    shares = [name for name in seconds if name != "total"]
    parts = ", ".join(f"{name.replace('_', '-')} {seconds[name]:.0f} s" for name in shares)
    console.print(f"{seconds['total']:.0f} s in all: {parts}", highlight=False, soft_wrap=True)
    console.print(f"results: {path}", markup=False, highlight=False, soft_wrap=True)


def metrics_table(summaries: Mapping[str, Results]) -> Table:
    """One row per client and a mean, for every summary; percent, a dash where there is none.

    The mean of a metric is that of the clients that have it; the harmonic means in its row are
    taken of the means, as in the papers.

    Args:
        summaries: name -> a summary of results.json, with "counts" by client and the means.
    """
    table = Table()
    table.add_column("", overflow="fold", min_width=9, max_width=18)
    for heading in METRIC_NAMES.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for name, summary in summaries.items():
        table.add_section()
        table.add_row(f"[bold]{name}")
        for client, counts in sorted(summary["counts"].items()):
            table.add_row(f"  {client}", *_cells(client_metrics(counts)))
        table.add_row("  [bold]mean", *(f"[bold]{cell}" for cell in _cells(summary)))
    return table


def costs_table(results: Results) -> Table:
    """What every client put in: training images, bytes up and down in a round."""
    table = Table()
    table.add_column("client", overflow="fold", max_width=24)
    for heading in ("train images", "bytes up/round", "bytes down/round"):
        table.add_column(heading, justify="right", no_wrap=True)
    traffic = results["bytes_per_round"]
    for client in results["clients"]:
        name = client["name"]
        sent = (traffic[way].get(name) for way in ("up", "down"))
        numbers = (client["train_images"], *sent)
        table.add_row(name, *(DASH if n is None else f"{n:,}" for n in numbers))
    return table


def _cells(metrics: Mapping[str, float | None]) -> list[str]:
    return [DASH if (value := metrics.get(key)) is None else f"{value:.1f}" for key in METRIC_NAMES]


def _left_out(results: Results) -> list[str]:
    """Which clients are missing from which means."""
    lines = []
    if names := results.get("clients_without_test"):
        lines.append(f"without base test images, left out of means: {', '.join(names)}")
    counts = results["final"]["counts"].values()
    if counts and not any(count[g][1] for count in counts for g in count):
        lines.append("no client has test images: nothing was measured")
    elif counts and not any(count["novel"][1] for count in counts):
        lines.append("no images of new classes: Gen., H-Mean, Novel and HM are not measured")
    if reasons := results.get("clients_not_evaluated"):
        lines += [f"not evaluated: {name}: {why}" for name, why in sorted(reasons.items())]
    return lines
