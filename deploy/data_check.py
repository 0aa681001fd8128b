"""`blend data check`: are folders of images fit to join a federation?"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blend_core.errors import ConfigError, printable
from deploy.options import Debug
from deploy.signals import uninterrupted

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.table import Table

    from blend_core.backbone import Backbone
    from blend_core.data.findings import Finding
    from blend_core.data.folders import Examination, FolderOptions

# So many findings that say the same are shown: a manifest of a wrong kind has one on every line.
SHOWN = 3
# What findings that say the same differ in: the place before the colon, names and numbers.
_VARYING = re.compile(r'^.*?: |"(?:[^"\\]|\\.)*"|\d+')
# Columns of a line of text.
WIDTH = 80
# Progress is shown for more images than this.
MANY = 500


def check(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...")],
    classes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The federation's class names, one a line: all of the folder's must be among "
            "them. None: the folder's own names compete.",
        ),
    ] = None,
    holdout: Annotated[
        float,
        typer.Option(help="Share for tests, from 0, below 1, if there are no test images."),
    ] = 0.0,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Unreadable images are left out, and no error.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Images both in train and in test are an error.")
    ] = False,
    template: Annotated[
        str, typer.Option(help="The prompt; {} is the class name.")
    ] = "a photo of a {}.",
    backbone: Annotated[
        str, typer.Option(help="open_clip model into whose context prompts must fit.")
    ] = "ViT-B-16-quickgelu",
    debug: Debug = False,
) -> None:
    """Check sites' images before they join; nothing is written or sent.

    FOLDER is a site's data-dir; of several all are checked, whatever is wrong with the first.

    Ends with 0 (fit to join), 1 (one or more are not) or 2 (wrong usage).
    """
    with uninterrupted():
        from rich.console import Console

        from blend_core.backbone import Backbone
        from blend_core.config import BackboneConfig
        from blend_core.data.folders import FolderOptions

    if not 0 <= holdout < 1:
        raise ConfigError(f"--holdout {holdout}: must be a share from 0, below 1, e.g. 0.2")
    described = Backbone.describe(BackboneConfig(name=backbone))
    console = Console(highlight=False, markup=False, soft_wrap=True)
    names = () if classes is None else _listed(classes)
    space = "node" if classes is None else "federation"
    options = FolderOptions(space, names, template, holdout, None, skip_bad, strict)
    unfit = [folder for folder in folders if not _check_one(folder, options, described, console)]
    if len(folders) > 1:
        _say(f"{len(folders) - len(unfit)} of {len(folders)} sites are fit to join", console)
    if unfit:
        raise typer.Exit(1)
    _say(f"prompts were checked for {backbone} (--backbone)", console)


def _check_one(folder: Path, options: FolderOptions, backbone: Backbone, console: Console) -> bool:
    """Show what one site has and what is wrong with it; whether it is fit to join."""
    from blend_core.data.folders import examine

    with _progress(console) as progress:
        found = examine(folder, options, progress)
    findings = [*found.findings, *_too_long(found, options.template, backbone)]
    _say(f"{folder}:", console)
    if found.train or found.test or found.novel:
        console.print(_table(found))
    if found.listed:
        names = ", ".join(found.listed)
        _say(f"in classes.txt without images, but competing: {names}", console)
    if found.domains:
        counts = ", ".join(f"{name} {count:,}" for name, count in sorted(found.domains.items()))
        _say(f"domains: {counts}", console)
    _print_findings(findings, console)
    errors = sum(finding.level == "error" for finding in findings)
    if errors:
        _say(f"not fit: {errors} error{'' if errors == 1 else 's'}", console)
        return False
    _say("fit to join" + _limits(found), console)
    if not found.novel:
        _say("no images in novel/<class>/: Gen. is not measured", console)
    return True


def _say(text: str, console: Console) -> None:
    """Print a text in lines of at most `WIDTH` columns, longer words apart."""
    lines = textwrap.wrap(
        printable(text),
        WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    console.print("\n".join(lines))


def _listed(file: Path) -> tuple[str, ...]:
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"--classes {file}: {reason}; name a file of class names") from None
    names = tuple(n for line in lines if (n := line.strip()) and not n.startswith("#"))
    if len(names) < 2:
        raise ConfigError(f"--classes {file}: needs at least two names, one a line")
    return names


def _too_long(found: Examination, template: str, backbone: Backbone) -> Iterator[Finding]:
    """E11, which only the model's own tokens decide; weights are not needed."""
    from blend_core.data.findings import error

    if template.count("{}") != 1:  # E12 says so.
        return
    for name in [*found.base_names, *sorted(found.novel)]:
        try:
            backbone.tokenize([printable(name)], template)
        except ConfigError as failure:
            yield error("E11", str(failure))


def _table(found: Examination) -> Table:
    """Usable images by class; the last rows are the classes of novel/ and the sums."""
    from rich.table import Table

    table = Table()
    table.add_column("class", overflow="fold", max_width=44)
    parts = [("train", found.train), ("test", found.test), ("novel", found.novel)]
    if not found.novel:
        parts.pop()
    for heading, _ in parts:
        table.add_column(heading, justify="right", no_wrap=True)
    base = found.train.keys() | found.test.keys() | set(found.listed)
    for name in [*sorted(base), *sorted(found.novel)]:
        table.add_row(printable(name), *(f"{counts[name]:,}" for _, counts in parts))
    table.add_section()
    table.add_row("all", *(f"{counts.total():,}" for _, counts in parts))
    return table


def _print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Errors first, then warnings; of those that say the same only the first few."""
    for level in ("error", "warning"):
        kinds: dict[str, list[Finding]] = {}
        for finding in findings:
            if finding.level == level:
                kind = f"{finding.code} {_VARYING.sub('', finding.message)}"
                kinds.setdefault(kind, []).append(finding)
        for alike in kinds.values():
            for finding in alike[:SHOWN]:
                _say(f"{level}: {finding}", console)
            if len(alike) > SHOWN:
                more = f"{len(alike) - SHOWN:,} more like this"
                _say(f"{level}: {alike[0].code} ... and {more}", console)


def _limits(found: Examination) -> str:
    """What a site that may join cannot do."""
    if not found.train:
        return ", only to evaluate: there are no training images"
    if not found.test:
        return "; without test images (see --holdout) its results are left out of means"
    return ""


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar for many images, on a terminal only."""
    from rich.progress import Progress

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("images", visible=False)

        def show(done: int, total: int) -> None:
            if total > MANY and (done % 50 == 0 or done == total):
                bar.update(task, completed=done, total=total, visible=True)

        yield show
