"""`blend data partition`: who would get which images, before anything is trained."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blend_core.errors import ConfigError
from blend_core.metrics import DASH
from deploy.options import MANIFEST, Debug, Overrides
from deploy.signals import uninterrupted
from deploy.table import WIDTH

if TYPE_CHECKING:
    from rich.console import Console

    from blend_core.data.manifest import Manifest
    from blend_core.data.records import Dataset

PICTURE = "partition.png"
# Of more clients the table shows the first ones; the manifest and the picture have all.
SHOWN = 40


def partition(
    config: Annotated[str | None, typer.Argument()] = None,
    settings: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help=f"New or existing folder for {MANIFEST} and {PICTURE}."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Show who would get which images; with --out, write it as a manifest and a picture.

    CONFIG is the name of a preset or a YAML file; without it: quickstart.
    """
    with uninterrupted():
        from rich.console import Console

        from blend_core.data import dealt_data
        from blend_core.data.manifest import write_manifest
        from blend_core.settings import load_experiment

    experiment = load_experiment(config, settings or [])
    if out is not None:
        _require_unused(out)
    console = Console(highlight=False)
    dataset, manifest = dealt_data(experiment)
    _print(dataset, manifest, console)
    if experiment.data.root is not None:
        _warn(dataset, Path(experiment.data.root), console)
    if out is None:
        return
    _make(out)
    write_manifest(out / MANIFEST, manifest)
    _draw(out / PICTURE, dataset, manifest)
    console.print(f"{out / MANIFEST}, {out / PICTURE}", markup=False, soft_wrap=True)


def _require_unused(out: Path) -> None:
    """Refuse a folder that has a partition, before one is dealt for it."""
    if os.path.lexists(out) and not os.path.isdir(out):
        raise ConfigError(f"--out {out}: is no folder; name another one")
    for name in (MANIFEST, PICTURE):
        if os.path.lexists(out / name):
            raise ConfigError(f"--out {out}: has a {name} already; name another folder")


def _make(out: Path) -> None:
    """Only once there is something to put into it: a refused command leaves nothing behind."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; name a folder you may write") from None


def _print(dataset: Dataset, manifest: Manifest, console: Console) -> None:
    """A row per client, what they have in common, and how uneven it is."""
    from rich.table import Table

    from blend_core.data.manifest import test_items
    from blend_core.names import client_name

    width = min(WIDTH, console.width)
    console.print(manifest.sentence(), markup=False, width=width)
    table = Table()
    domains = any(part.domain for part in manifest.clients)
    for heading in ("client", *(["domain"] if domains else [])):
        table.add_column(heading, overflow="fold")
    for heading in ("train images", "classes", "test images"):
        table.add_column(heading, justify="right")
    count = len(manifest.clients)
    for part in manifest.clients[:SHOWN]:
        tested = len(test_items(dataset, part))
        numbers = (len(part.train), len(part.classes), tested)
        table.add_row(
            client_name(part.id, count),
            *([part.domain or DASH] if domains else []),
            *(f"{number:,}" for number in numbers),
        )
    console.print(table)
    if count > SHOWN:
        console.print(f"and {count - SHOWN} more clients")
    sizes = [len(part.train) for part in manifest.clients]
    classes = [len(part.classes) for part in manifest.clients]
    clients = "1 client" if count == 1 else f"{count} clients"
    median = f"{statistics.median(sizes):,.1f}".removesuffix(".0")
    console.print(f"{clients}, {sum(sizes):,} training images")
    console.print(
        f"a client: {_extent(sizes)} training images, median {median}; {_extent(classes)} classes",
        width=width,
    )
    console.print(f"manifest {manifest.sha256()}", soft_wrap=True)


def _warn(dataset: Dataset, root: Path, console: Console) -> None:
    """Say what makes the scores no fair ones; images that are not there cannot be compared."""
    from blend_core.data.benchmark import shared_images
    from blend_core.data.records import OWN_SPLIT

    if not dataset.published:
        console.print(
            f"warning: {OWN_SPLIT}: not comparable with the papers' numbers",
            markup=False,
            soft_wrap=True,
        )
    if pairs := shared_images(dataset, root):
        trained, tested = pairs[0]
        count = (
            "1 test image is a training image"
            if len(pairs) == 1
            else (f"{len(pairs):,} test images are training images")
        )
        console.print(
            f"warning: {count}, too, e.g. {tested.path} is {trained.path}; scores are too high",
            markup=False,
            soft_wrap=True,
        )


def _extent(numbers: Sequence[int]) -> str:
    """From the smallest to the largest, e.g. "17 to 39"; one number if all are equal."""
    return " to ".join(f"{number:,}" for number in sorted({min(numbers), max(numbers)}))


def _draw(path: Path, dataset: Dataset, manifest: Manifest) -> None:
    from blend_core.data.manifest import class_counts
    from blend_core.names import client_name
    from blend_core.report.partition_picture import write_partition_picture

    counts = class_counts(manifest, dataset)
    seen = sorted({label for part in manifest.clients for label in part.classes})
    clients = [client_name(part.id, len(manifest.clients)) for part in manifest.clients]
    if any(part.domain for part in manifest.clients):
        pairs = zip(clients, manifest.clients, strict=True)
        clients = [f"{name} {part.domain or ''}".strip() for name, part in pairs]
    names = [manifest.class_names[label] for label in seen]
    write_partition_picture(path, counts[:, seen], clients, names, manifest.sentence())
