"""`blend site ledger`: what has left a site, round by round."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blend_core.errors import ConfigError, RunError
from deploy.options import Debug

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from client.ledger import Entry

# Digits of a SHA-256 that are shown.
DIGITS = 12


def ledger(
    state_dir: Annotated[
        Path, typer.Argument(help="The site's state-dir, or any folder above or below it.")
    ],
    federation: Annotated[str | None, typer.Option(help="Of this federation alone.")] = None,
    client: Annotated[str | None, typer.Option(help="Of this client alone.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Show what has left a site: every answer, its size and hash; changes nothing.

    Ends with 0, 1 (a round was answered again with other contents), 2 (there is no ledger) or 3
    (one cannot be read).
    """
    from rich.console import Console

    from client.ledger import LEDGER, disagreements, read_ledger

    entries, problems = [], []
    for path in sorted(state_dir.rglob(LEDGER)):
        found, damaged = read_ledger(path)
        entries += found
        problems += damaged
    wanted = [
        entry
        for entry in entries
        if federation in (None, entry.federation) and client in (None, entry.client)
    ]
    if not wanted and not problems:
        chosen = "" if federation is None and client is None else " of that federation and client"
        raise ConfigError(f"{state_dir}: no {LEDGER} with an answer{chosen} is below it")
    differing = disagreements(wanted)
    if as_json:
        whole = {
            "entries": [entry.model_dump() for entry in wanted],
            "left_out": problems,
            "disagreements": differing,
        }
        print(json.dumps(whole, indent=2))
    else:
        console = Console(highlight=False)
        _print_tables(wanted, console)
        for line in problems:
            console.print(f"warning: {line}", markup=False, soft_wrap=True)
    if differing:
        raise RunError("; ".join(differing))


def _print_tables(entries: Sequence[Entry], console: Console) -> None:
    """One table per federation and client, and below it names, keys, errors and totals."""
    sites: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        sites[entry.federation, entry.client].append(entry)
    for (federation, client), found in sites.items():
        methods = ", ".join(dict.fromkeys(entry.method for entry in found))
        console.print(f"\n{client} in {federation}, {methods}", markup=False, soft_wrap=True)
        console.print(_table(found))
        names = dict.fromkeys(entry.tensors for entry in found if entry.tensors)
        errors = {(e.round, e.kind, e.error): None for e in found if e.error is not None}
        lines = [
            *(f"tensors: {_shortened(several)}" for several in names),
            "statistics: " + ", ".join(sorted({key for e in found for key in e.statistics})),
            *(f"error in {kind} of round {round}: {error}" for round, kind, error in errors),
            f"answers: {len(found)}, from {found[0].time} to {found[-1].time}",
            f"bytes: {sum(e.tensor_bytes for e in found):,} of tensors, "
            f"{sum(e.header_bytes for e in found):,} of everything else",
        ]
        for line in lines:
            console.print(line, markup=False, soft_wrap=True)


def _table(entries: Sequence[Entry]) -> Table:
    """Answers that are alike share a row, in the order of their first times."""
    from rich.table import Table

    table = Table()
    for heading in ("round", "kind", "times", "tensors", "bytes", "other bytes"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    table.add_column("SHA-256", no_wrap=True)
    alike: dict[tuple[int, str, str, bool], list[Entry]] = defaultdict(list)
    contents: dict[tuple[int, str], set[str]] = defaultdict(set)
    for entry in entries:
        alike[entry.round, entry.kind, entry.sha256, entry.error is not None].append(entry)
        if entry.error is None:
            contents[entry.round, entry.kind].add(entry.sha256)
    for (round, kind, sha256, failed), found in alike.items():
        tensors = found[0].tensors
        mark = " differs" if not failed and len(contents[round, kind]) > 1 else ""
        table.add_row(
            str(round),
            kind,
            str(len(found)),
            str(len(tensors)) if tensors else "-",
            f"{sum(entry.tensor_bytes for entry in found):,}" if tensors else "-",
            f"{sum(entry.header_bytes for entry in found):,}",
            "error" if failed else (sha256[:DIGITS] if tensors else "-") + mark,
        )
    return table


def _shortened(names: Sequence[str]) -> str:
    """Names with a star for the numbers of blocks, each with how many there are of it."""
    counts = Counter(re.sub(r"\b\d+\b", "*", name) for name in names)
    return ", ".join(f"{name} ({n})" if n > 1 else name for name, n in counts.items())
