"""`blend data`: is a folder fit to join, who would get which images, missing splits."""

from __future__ import annotations

import typer

from deploy.data_check import check
from deploy.data_make_split import make_split
from deploy.data_partition import partition

data = typer.Typer(
    name="data", help="Check images, look at partitions, make splits.", no_args_is_help=True
)
for command in (check, partition, make_split):
    data.command()(command)
