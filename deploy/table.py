"""The table at the end of a run: zero-shot against the method, per client and on average."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
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
        console.print(results["note"], markup=False, highlight=False)
    summaries = {"zero-shot": results["zero_shot"]}
    if method != "zero-shot":
        summaries[method] = {**results["final"], "best_on_test": results.get("best_on_test")}
    console.print(metrics_table(summaries))
    told = (_left_out, _remarks, _noise, _refused, _interrupted)
    for line in [line for say in told for line in say(results)]:
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
    taken of the means, as in the papers. Below it stand other ways to sum up, where there are
    any: every image counting alike, the mean and deviation of each domain's clients, zero-shot as
    it is published, the last five evaluations, and the round that is best on the test images.

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
        for label, metrics, style in _other_rows(summary):
            table.add_row(f"  {escape(label)}", *_cells(metrics, style))
    return table


def _other_rows(summary: Results) -> Iterator[tuple[str, Mapping[str, float | None], str]]:
    """What stands below the mean: label, metrics, format of a number."""
    yield "image-weighted", summary["weighted"], ".1f"
    for domain, found in sorted(summary.get("domains", {}).items()):
        yield domain, found, ".1f"
        yield "  std", found["std"], ".1f"
    if (published := summary.get("as_published")) is not None:
        yield "as published", published, ".1f"
    last = summary.get("mean_last_five")
    if last is not None and last["reason"] is None:
        yield "mean of last 5", last, ".1f"
    best = summary.get("best_on_test")
    if best is not None and best["model_after_round"] is not None:
        yield "best on test", best, ".1f"
        yield "  above last", best["optimism"], "+.1f"


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


def _cells(metrics: Mapping[str, float | None], style: str = ".1f") -> list[str]:
    values = (metrics.get(key) for key in METRIC_NAMES)
    return [DASH if value is None else format(value, style) for value in values]


def _remarks(results: Results) -> list[str]:
    """How to read the rows that are no means over clients."""
    lines = []
    if "as_published" in results["zero_shot"]:
        lines.append("as published: over all test images, as papers print zero-shot's Per.")
    best = results.get("best_on_test")
    if best is not None and best["model_after_round"] is None:
        lines.append("best on test: no evaluation covered all clients")
    elif best is not None:
        lines.append(
            f"best on test: round {best['model_after_round']} of {best['chosen_from']} evaluated, "
            "chosen on test images: no result"
        )
    return lines


def _noise(results: Results) -> list[str]:
    """What differential privacy cost; nothing is said of it where there is no noise."""
    spent = results.get("privacy")
    if spent is None:
        return []
    sampling = spent["sampling"]
    norm = f"clipping norm {spent['clipping_norm']:.3g} ({spent['clipping']})"
    lines = [
        f"{spent['kind']} differential privacy: epsilon {spent['epsilon']:.3g} at delta "
        f"{spent['delta']:g} ({spent['epsilon_per_round']:.3g} a round), {norm}, noise multiplier "
        f"{spent['noise_multiplier']:g}, sampling fraction {sampling['fraction']:g}, at most "
        f"{sampling['most_rounds_of_a_client']} rounds of a client",
        f"epsilon covers {spent['covers']}",
    ]
    if spent["noise_from"] == "seed":
        lines.append("the noise follows from the run's seed (privacy.noise_from): nobody is safe")
    if spent["stopped"]:
        done, of = len(results["rounds"]), results["config"]["rounds"]
        lines.append(f"stopped after {done} of {of} rounds: {spent['stopped']}")
    return lines


def _refused(results: Results) -> list[str]:
    """Whose replies did not count, and the rule that the others went through."""
    lines = []
    if (rule := results.get("aggregation", "mean")) != "mean":
        lines.append(f"aggregation: {rule}, every client alike")
    for client, found in sorted(results.get("refusals", {}).items()):
        parts = [
            f"{status} in {len(found[status])} of {len(results['rounds'])} rounds "
            f"({_listed(found[status])})"
            for status in ("refused", "absent")
            if found[status]
        ]
        often = max(found["reasons"].items(), key=lambda item: item[1])[0]
        lines.append(f"{client}: {', '.join(parts)}: {often}")
    nodes = results.get("refused_nodes", ())
    lines += [f"not let in: {node['client']}: {node['reason']}" for node in nodes]
    return lines


def _interrupted(results: Results) -> list[str]:
    """Where the run was stopped and went on, and who had lost private state."""
    lines = []
    if after := results.get("resumed_after_rounds"):
        lines.append(f"resumed after round {_listed(after)}")
    lines += [
        f"cold start: {cold['client']} had lost its private state of round {cold['lost']} in round "
        f"{cold['round']} and went on from "
        + (f"that of round {cold['used']}" if cold["used"] else "the initial values")
        for cold in results.get("cold_starts", ())
    ]
    return lines


def _listed(rounds: list[int]) -> str:
    """At most five rounds by number."""
    return ", ".join(map(str, rounds[:5])) + (", ..." if len(rounds) > 5 else "")


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
    elif (some := sum(count["novel"][1] > 0 for count in counts)) < len(counts):
        lines.append(
            f"Gen. and Novel: means over {some} of {len(counts)} clients, those with images of new "
            "classes"
        )
    if reasons := results.get("clients_not_evaluated"):
        lines += [f"not evaluated: {name}: {why}" for name, why in sorted(reasons.items())]
    return lines
