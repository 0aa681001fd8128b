"""The `blend` command."""

from __future__ import annotations

import json
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from blend_core import __version__
from blend_core.errors import FULL, BlendError, ConfigError, RunError, SiteError
from deploy.bench import bench
from deploy.compare import compare
from deploy.data import data
from deploy.doctor import doctor, pointing_to_doctor
from deploy.keys import keys
from deploy.options import MANIFEST, Debug, Engine, Overrides
from deploy.reproduce import reproduce
from deploy.signals import Interrupted, interruptible, uninterrupted
from deploy.site import site
from deploy.sweep import sweep

if TYPE_CHECKING:
    from deploy.progress import Progress

# Heavy modules (torch, Flower, pydantic) are imported where they are used: --help must be quick.

app = typer.Typer(
    name="blend",
    help="Personalised, federated CLIP.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

STARTED = time.time()


def main() -> None:
    """Entry point of the `blend` command; ends the process with the command's exit code."""
    debug = "--debug" in sys.argv[1:]
    try:
        with interruptible():
            app()
    except Interrupted as stop:
        _report(str(stop), *notes_of(stop))
        sys.exit(stop.exit_code)
    except BlendError as error:
        if debug:
            traceback.print_exc()
        _report(f"error: {error}", *notes_of(error))
        sys.exit(error.exit_code)
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, OSError) and error.errno in FULL:
            where = error.filename or "a file"
            why = f"cannot be written: {error.strerror}; make room, then start again"
            _report(f"error: {where}: {why}")
            sys.exit(SiteError.exit_code)
        hint = "" if debug else "; --debug shows where"
        _report(f"error: {type(error).__name__}: {error}{hint}")
        sys.exit(RunError.exit_code)


@app.callback(invoke_without_command=True)
def blend(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Personalised, federated CLIP."""
    if version:
        print(f"blend {__version__}")
        raise typer.Exit


@app.command()
def run(
    context: typer.Context,
    config: Annotated[str | None, typer.Argument()] = None,
    engine: Annotated[
        Engine | None,
        typer.Option(
            help="processes: a SuperLink and one SuperNode per client on this machine; "
            "simulation: Ray; loop: this process. All give the same numbers. None: processes, or "
            "that of the run that is resumed.",
        ),
    ] = None,
    settings: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="New or empty folder for everything; none: runs/METHOD-DATE-TIME."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Folder of a run that was stopped: go on after its last whole round."),
    ] = None,
    actors: Annotated[
        int | None,
        typer.Option(min=1, help="simulation: clients computed at a time; none: one per core."),
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds that SuperLink and ServerApp may take to start.")
    ] = 120.0,
    debug: Debug = False,
) -> None:
    """Run an experiment and print its table.

    CONFIG is the name of a preset or a YAML file; without it: quickstart.
    """
    # A signal in the middle of an import may be swallowed by it.
    with uninterrupted():
        from blend_core.data import dealt_data
        from blend_core.data.manifest import write_manifest
        from blend_core.settings import load_experiment
        from blend_core.state import lock_folder
        from deploy.check import check
        from deploy.folder import (
            CONFIG,
            compact_yaml,
            finished,
            prepare_folder,
            reopen_folder,
            resumable,
            store_config,
        )
        from deploy.loop import run_loop
        from deploy.processes import run_processes
        from deploy.progress import Progress
        from deploy.simulation import run_simulation

        before = None
        if resume is not None:
            if config is not None or out is not None:
                raise ConfigError(
                    "--resume DIR: a run goes on as it was; leave CONFIG and --out out"
                )
            folder, experiment, before = reopen_folder(resume, settings or [])
        else:
            experiment = load_experiment(config, settings or [])
        engine = engine or (Engine.PROCESSES if before is None else Engine(before.engine))
        if actors is not None and engine is not Engine.SIMULATION:
            raise ConfigError(f"--actors {actors}: only --engine simulation has actors")
        given = config if resume is None else str(folder / CONFIG)
        with pointing_to_doctor(given, settings or []):
            check(experiment)
        if resume is None:
            folder = prepare_folder(out, experiment)
        # Two commands that go on with one run would share its processes' files.
        context.with_resource(lock_folder(folder))
        if resume is not None:
            store_config(folder, experiment)
        random = f"{experiment.method.name}-{secrets.token_hex(6)}"
        federation = random if before is None else before.federation
        dealt = ""
        if experiment.data.kind != "folders":
            manifest = dealt_data(experiment)[1]
            write_manifest(folder / MANIFEST, manifest)
            dealt = f"# data: {manifest.sentence()}"
    console = Console(highlight=False)
    console.print(compact_yaml(experiment), markup=False, soft_wrap=True)
    if dealt:
        console.print(dealt, markup=False, soft_wrap=True)
    console.print(f"engine {engine}, out {folder}", markup=False, soft_wrap=True)
    if experiment.data.kind == "shapes" and experiment.backbone.name != "blend-tiny":
        console.print(
            "note: data.kind = shapes trains on rendered shapes; for your own images give "
            "data.kind=folders and data.root",
            soft_wrap=True,
        )
    again = resume is not None
    if again and finished(folder, experiment):
        console.print("the run has finished before; --set rounds=N extends it", soft_wrap=True)
        show(folder, console)
        return
    with (
        resumable(folder),
        pointing_to_doctor(str(folder / CONFIG), out=folder),
        Progress(console, experiment.rounds, experiment.clients, STARTED) as progress,
    ):
        if engine is Engine.LOOP:
            with _followed(folder, progress, again):
                run_loop(experiment, folder, federation, STARTED, again)
        elif engine is Engine.SIMULATION:
            run_simulation(
                experiment, folder, federation, progress, STARTED, start_timeout, actors, again
            )
        else:
            run_processes(experiment, folder, federation, progress, STARTED, start_timeout, again)
    show(folder, console)


for command in (sweep, compare, reproduce, doctor):
    app.command()(command)
app.add_typer(bench)
app.add_typer(data)
app.add_typer(keys)
app.add_typer(site)


def show(folder: Path, console: Console) -> None:
    """Print the table of a run that has finished.

    Raises:
        RunError: there are no results.
    """
    from blend_core.report.runs import RESULTS
    from deploy.table import print_results

    path = folder / RESULTS
    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"the run finished without readable results: {error}") from None
    print_results(results, path, console)


@contextmanager
def _followed(folder: Path, progress: Progress, resume: bool) -> Iterator[None]:
    """Show the journal while this thread writes it."""
    from deploy.events import EventTail

    tail = EventTail(folder, resume)
    done = threading.Event()

    def follow() -> None:
        while not done.wait(0.1):
            for event in tail.read():
                progress(event)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        for event in tail.read():
            progress(event)


def notes_of(error: BaseException) -> list[str]:
    """What was added to an error on its way: lines below the first, which is the cause."""
    return list(getattr(error, "__notes__", ()))


def _report(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
