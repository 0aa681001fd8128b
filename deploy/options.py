"""What several commands are given in the same way."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Engine(StrEnum):
    """How the clients of a run are computed; the numbers are the same."""

    LOOP = "loop"
    SIMULATION = "simulation"
    PROCESSES = "processes"


Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; may be repeated."),
]
# `deploy.cli.main` looks for it itself, since an error may come before a command has begun.
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]
