"""A comparison as JSON, CSV, Markdown and LaTeX, all from the same cells."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blend_core.errors import printable
from blend_core.metrics import DASH, HARMONIC, METRIC_NAMES, METRICS, harmonic_mean
from blend_core.report.comparison import Comparison, Line, costs
from blend_core.state import write_bytes_atomic, write_json_atomic

FILE_DIGITS = 2


@dataclass(frozen=True)
class Columns:
    """Columns that belong together; every row has one cell per heading."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def write_tables(comparison: Comparison, out: Path) -> list[Path]:
    """Write compare.json, .csv, .md and .tex into an existing folder and return their paths.

    Raises:
        StateError: a file cannot be written.
    """
    texts = {"csv": as_csv(comparison), "md": as_markdown(comparison), "tex": as_latex(comparison)}
    write_json_atomic(out / "compare.json", as_json(comparison))
    for ending, text in texts.items():
        write_bytes_atomic(out / f"compare.{ending}", text.encode())
    return [out / f"compare.{ending}" for ending in ("json", *texts)]


def columns(comparison: Comparison, digits: int = FILE_DIGITS) -> list[Columns]:
    """The table's columns in three groups: metrics, costs, test. No cell is empty.

    Args:
        comparison: what to show.
        digits: decimals of percentages; p-values get two more.
    """
    lines = comparison.lines
    tested = METRIC_NAMES[comparison.metric]
    metrics = tuple(
        (str(line.row.n), *(_spread(line, metric, digits) for metric in METRICS)) for line in lines
    )
    test = ("pairs", "difference", "95 % interval", "t", "p", "p Holm")
    return [
        Columns("percent, mean ± std over n seeds", ("n", *METRIC_NAMES.values()), metrics),
        Columns(
            "costs",
            ("bytes up/client/round", "private bytes", "s/round"),
            tuple(_cost_cells(line) for line in lines),
        ),
        Columns(
            f"{tested} against the baseline", test, tuple(_test_cells(x, digits) for x in lines)
        ),
    ]


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Every number unrounded, per row and per seed."""
    return {
        "metric": comparison.metric,
        "note": comparison.note,
        "caution": comparison.caution,
        "notes": list(comparison.notes),
        "warnings": list(comparison.warnings),
        "rows": [_json_row(line) for line in comparison.lines],
    }


def as_csv(comparison: Comparison) -> str:
    """One line per row with a heading; an empty field where there is no value."""
    rows = []
    for line in comparison.lines:
        full, test = _json_row(line), line.test
        low, high = (test.interval if test else None) or (None, None)
        row: dict[str, Any] = {
            "label": _csv(line.row.label),
            "method": _csv(line.row.method),
            "n": line.row.n,
            "seeds": " ".join(map(str, line.row.runs)),
        }
        for name, value in full["metrics"].items():
            row |= {name: _rounded(value["mean"]), f"{name}_std": _rounded(value["std"])}
        row |= {
            "hmean_of_means": _rounded(full["hmean_of_means"]),
            "bytes_up": _whole(full["bytes_up"]),
            "private_bytes": full["private_bytes"],
            "seconds_per_round": _rounded(full["seconds_per_round"]),
            "baseline": line.baseline and _csv(line.baseline),
            "tested_metric": comparison.metric,
            "pairs": test.n if test else None,
            "difference": _rounded(test.mean if test else None),
            "difference_low": _rounded(low),
            "difference_high": _rounded(high),
            "t": _rounded(test.t if test else None),
            "p": _significant(test.p if test else None),
            "p_holm": _significant(line.holm),
            "reason": test.reason if test else None,
            "note": _csv(comparison.note),
        }
        rows.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_markdown(comparison: Comparison) -> str:
    """One table with all columns, then warnings and notes."""
    parts = columns(comparison)
    headings = ["", *(heading for part in parts for heading in part.headings)]
    table = [headings, ["---", *("---:" for _ in headings[1:])]]
    for number, line in enumerate(comparison.lines):
        table.append(
            [_markdown(line.row.label), *(cell for part in parts for cell in part.rows[number])]
        )
    rows = [f"| {' | '.join(row)} |" for row in table]
    notes = [f"- {_markdown(text)}" for text in remarks(comparison)]
    return "\n".join([*rows, "", *notes, ""])


def as_latex(comparison: Comparison) -> str:
    r"""One plain `tabular` per group of columns, then warnings and notes; no package is needed.

    Meant for `\input`. Cells are set as they are in Markdown.
    """
    text = []
    for part in columns(comparison):
        text.append(f"\\begin{{tabular}}{{l{'r' * len(part.headings)}}}\n\\hline")
        text.append(_latex_row(["", *part.headings]) + "\n\\hline")
        for line, cells in zip(comparison.lines, part.rows, strict=True):
            text.append(_latex_row([line.row.label, *cells]))
        text.append("\\hline\n\\end{tabular}\n\n\\medskip")
    text += [f"{{\\footnotesize {_latex(note)}\\par}}" for note in remarks(comparison)]
    return "\n".join([*text, ""])


def remarks(comparison: Comparison) -> list[str]:
    """Everything that is said under the tables, of which the test is last; that first."""
    first = [text for text in (comparison.caution, comparison.note) if text]
    warnings = (f"warning: {text}" for text in comparison.warnings)
    # Names of folders and notes of runs may hold anything.
    return [printable(text) for text in (*first, *warnings, *comparison.notes)]


def _json_row(line: Line) -> dict[str, Any]:
    row, test, spent = line.row, line.test, costs(line.row)
    return {
        "label": row.label,
        "method": row.method,
        "config": dict(row.config),
        "n": row.n,
        "metrics": {
            name: {"mean": row.mean(name), "std": row.std(name), "n": len(row.values(name))}
            for name in METRICS
        },
        "hmean_of_means": harmonic_mean([row.mean(part) for part in HARMONIC["hmean"]]),
        "bytes_up": spent.bytes_up,
        "private_bytes": spent.private_bytes,
        "seconds_per_round": spent.seconds,
        "baseline": line.baseline,
        "test": test
        and {
            "pairs": test.n,
            "difference": test.mean,
            "interval": list(test.interval) if test.interval else None,
            "t": test.t,
            "p": test.p,
            "p_holm": line.holm,
            "reason": test.reason,
        },
        "seeds": [
            {
                "seed": seed,
                "folder": str(run.folder),
                **{name: run.results["final"].get(name) for name in METRICS},
            }
            for seed, run in row.runs.items()
        ],
    }


def _spread(line: Line, metric: str, digits: int) -> str:
    mean, std = line.row.mean(metric), line.row.std(metric)
    if mean is None:
        return DASH
    return f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def _cost_cells(line: Line) -> tuple[str, ...]:
    spent = costs(line.row)
    sizes = (spent.bytes_up, spent.private_bytes)
    seconds = DASH if spent.seconds is None else f"{spent.seconds:.1f}"
    return (*(DASH if size is None else f"{size:,.0f}" for size in sizes), seconds)


def _test_cells(line: Line, digits: int) -> tuple[str, ...]:
    test = line.test
    if test is None:
        return (DASH, "baseline", DASH, DASH, DASH, DASH)
    difference = DASH if test.mean is None else f"{test.mean:+.{digits}f}"
    if test.interval is None:
        return (str(test.n), difference, str(test.reason), DASH, DASH, DASH)
    interval = " to ".join(f"{end:.{digits}f}" for end in test.interval)
    p_values = (_p(test.p, digits + 2), _p(line.holm, digits + 2))
    return (str(test.n), difference, interval, f"{test.t:.{digits}f}", *p_values)


def _p(value: float | None, digits: int) -> str:
    if value is None:
        return DASH
    least = 10.0**-digits
    return f"<{least:.{digits}f}" if value < least else f"{value:.{digits}f}"


def _rounded(value: float | None) -> str | None:
    return None if value is None else f"{value:.{FILE_DIGITS}f}"


def _significant(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _csv(text: str) -> str:
    """A text that no spreadsheet takes for a formula."""
    text = printable(text)
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) else text


def _markdown(text: str) -> str:
    """A text that is shown as it is; an underscore within a word is no markup."""
    return re.sub(r"[\\`*\[\]<>|~&$#]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", text)


def _latex_row(cells: Sequence[str]) -> str:
    row = " & ".join(map(_latex, cells)) + r" \\"
    # After the end of the row before, these would be arguments of it.
    return f"{{}}{row}" if row.startswith(("[", "*")) else row


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    # In text these are other characters, or need a package.
    **{character: f"${character}$" for character in "<>|"},
    "±": r"$\pm$",
}


def _latex(text: str) -> str:
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"(?<![\w.])-(?=\d)", "$-$", escaped)  # A minus, not a hyphen.
