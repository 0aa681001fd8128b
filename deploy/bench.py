"""`blend bench`: measurements of the product on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.options import Overrides

bench = typer.Typer(name="bench", help="Measure the product on this machine.", no_args_is_help=True)


@bench.command()
def messages(
    count: Annotated[int, typer.Option(min=2, help="Messages to send.")] = 12,
) -> None:
    """Cost of a message that does no work, in the processes engine."""
    from benchmarks.messages import measure

    measure(count)


@bench.command()
def engines(
    config: Annotated[str, typer.Argument(help="Preset or YAML file.")] = "quickstart",
    settings: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs; none: temporary.")] = None,
) -> None:
    """All engines give the same bytes: run an experiment in each and compare."""
    from benchmarks.engines import compare

    compare(config, settings or [], out)


@bench.command()
def shapes(
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0, 1, ...")] = 3,
    settings: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs; none: temporary.")] = None,
) -> None:
    """BLEND against zero-shot CLIP on the built-in benchmark: 10 clients, 20 rounds."""
    from benchmarks.shapes import measure

    measure(seeds, settings or [], out)


@bench.command()
def step(
    model: Annotated[str, typer.Option(help="open_clip model name.")] = "ViT-B-16-quickgelu",
    batch: Annotated[int, typer.Option(min=1, help="Images per step.")] = 16,
    classes: Annotated[int, typer.Option(min=1, help="Class prompts.")] = 19,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps of each kind.")] = 3,
) -> None:
    """One training step of BLEND against the same step over open_clip's own blocks."""
    from benchmarks.step import measure

    measure(model, batch, classes, repeats)


@bench.command()
def data(
    images: Annotated[int, typer.Option(min=1, help="Photos to make.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Timed passes of each kind.")] = 5,
) -> None:
    """From files to batches: decode once, memory and file, batches ahead, crops one by one."""
    from benchmarks.data import measure

    measure(images, repeats)
