"""`blend site`: start a site's SuperNode, and see what has left the site."""

from __future__ import annotations

import typer

from deploy.site_ledger import ledger
from deploy.site_start import start

site = typer.Typer(
    name="site", help="Start a site, and see what has left it.", no_args_is_help=True
)
for command in (start, ledger):
    site.command()(command)
