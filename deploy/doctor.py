"""`blend doctor`: would a run work here, and if not, what has to be done?"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blend_core.errors import BlendError, RunError, printable
from deploy.options import Debug, Overrides, split_address
from deploy.site_start import CA, read_settings
from server.journal import JOURNAL

if TYPE_CHECKING:
    from rich.console import Console

    from deploy.checks import Check

COLOURS = {"ok": "green", "warning": "yellow", "failure": "red"}


def doctor(
    config: Annotated[str | None, typer.Argument()] = None,
    settings: Overrides = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="A site's folder of private state.")
    ] = None,
    superlink: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The SuperLink to join.")
    ] = None,
    root_certificates: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CA of the SuperLink's certificate; none: without TLS."),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of keys and certificates.")
    ] = None,
    site: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A site's folder: all of these as it says, and images."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, max=3600.0, help="Seconds that all checks may take.")
    ] = 28.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    debug: Debug = False,
) -> None:
    """Check what a run or a site needs, and say how to mend it; changes nothing.

    CONFIG is the name of a preset or a YAML file; without it: quickstart.

    Ends with 0 (all well, or warnings), 2 (configuration, packages, keys), 3 (data, state, disk)
    or 4 (the SuperLink cannot be reached); of several the first of these.
    """
    from rich.console import Console

    from deploy.checks import Settings
    from deploy.checks.runner import examine, exit_code

    if site is not None:
        values = read_settings(site)
        keys = keys or site
        state_dir = state_dir or _path(values.get("state-dir"))
        superlink = superlink or str(values.get("superlink", "")) or None
    if root_certificates is None and keys is not None and (keys / CA).is_file():
        root_certificates = keys / CA
    if superlink is not None:
        split_address("--superlink", superlink)
    folders = (state_dir, superlink, root_certificates, keys, site and site.absolute())
    given = Settings(
        config, tuple(settings or ()), *(None if v is None else str(v) for v in folders)
    )
    console = Console(highlight=False, markup=False)
    waiting = console.status("checking", spinner="line") if console.is_terminal else None
    if waiting is not None and not as_json:
        with waiting:
            checks = examine(given, timeout, lambda text: waiting.update(f"{printable(text)} ..."))
    else:
        checks = examine(given, timeout)
    code = exit_code(checks)
    if as_json:
        rows = [{k: v for k, v in asdict(c).items() if k != "done"} for c in checks]
        print(json.dumps({"exit_code": code, "checks": rows}, indent=2, ensure_ascii=False))
    else:
        _show(checks, console)
    raise typer.Exit(code)


def _path(value: object) -> Path | None:
    return Path(value) if isinstance(value, str) else None


@contextmanager
def pointing_to_doctor(
    config: str | None, overrides: Sequence[str] = (), out: Path | None = None
) -> Iterator[None]:
    """Let an error of a run that `blend doctor` could have found say so.

    Those are wrong settings, unusable data or state, a federation that does not form, and a run
    whose server never said a word; what happens later has other causes.

    Args:
        config: what the doctor has to be given: a preset or a file.
        overrides: of its settings.
        out: the run's folder, with the server's journal; None: nothing has been started.
    """
    try:
        yield
    except BlendError as error:
        silent = out is not None and not (out / JOURNAL).exists()
        if silent or not isinstance(error, RunError):
            given = [config] if config else []
            options = [text for override in overrides for text in ("--set", override)]
            command = shlex.join(["blend", "doctor", *given, *options])
            error.args = (f"{error}; {command} says more",)
        raise


def _show(checks: Sequence[Check], console: Console) -> None:
    """The table, and what to do about it below it."""
    from rich.table import Table

    table = Table(show_lines=False)
    table.add_column("check", overflow="fold", max_width=24)
    table.add_column("result", no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    for check in checks:
        text = printable(check.found)
        if check.advice:
            text += f"\n-> {printable(check.advice)}"
        table.add_row(printable(check.name), check.level, text, style=COLOURS[check.level])
    console.print(table)
    counts = [(level, sum(check.level == level for check in checks)) for level in COLOURS]
    told = (f"{n} {level}{'s' * (n > 1 and level != 'ok')}" for level, n in counts if n)
    console.print(", ".join(told))
