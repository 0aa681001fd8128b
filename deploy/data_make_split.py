"""`blend data make-split`: a split of one's own where the published one is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.options import Debug
from deploy.signals import uninterrupted


def make_split(
    kind: Annotated[str, typer.Argument()],
    root: Annotated[Path, typer.Option(help="The folder that holds the data sets.")],
    seed: Annotated[int, typer.Option(min=0, help="Of the draw.")] = 0,
    debug: Debug = False,
) -> None:
    """Make a missing split file by CoOp's rule; it is not the published one.

    KIND is the data set, e.g. dtd.
    """
    with uninterrupted():
        from blend_core.data.make_split import make_split as make

    path = make(kind, root, seed)
    print(f"{path}:")
    print(f"made with seed {seed}; numbers on it are not those of the published split")
