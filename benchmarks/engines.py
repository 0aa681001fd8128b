"""The same experiment in every engine, and the hashes of what came out."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from blend_core.config import Experiment
from blend_core.errors import RunError
from blend_core.settings import load_experiment
from deploy.loop import run_loop
from deploy.processes import run_processes
from deploy.simulation import run_simulation

Engine = Callable[[Experiment, Path], None]

ENGINES: dict[str, Engine] = {
    "loop": lambda experiment, out: run_loop(experiment, out, "bench"),
    "simulation, 1 actor": lambda e, out: run_simulation(e, out, "bench", actors=1),
    "simulation, 2 actors": lambda e, out: run_simulation(e, out, "bench", actors=2),
    "processes": lambda experiment, out: run_processes(experiment, out, "bench"),
    "processes again": lambda experiment, out: run_processes(experiment, out, "bench"),
}


def compare(config: str, settings: list[str], out: Path | None) -> None:
    """Run `config` in every engine and print the hashes.

    Raises:
        RunError: two engines differ.
    """
    experiment = load_experiment(config, settings)
    folder = Path(out) if out else Path(tempfile.mkdtemp(prefix="blend-engines-"))
    console = Console()
    table = Table("engine", "seconds", "shared_sha256", "private_sha256 (all clients)")
    found = set()
    for name, run in ENGINES.items():
        console.print(f"{name} ...", highlight=False)
        place = folder / name.replace(" ", "-").replace(",", "")
        start = time.perf_counter()
        run(experiment, place)
        seconds = time.perf_counter() - start
        results = json.loads((place / "results.json").read_text(encoding="utf-8"))
        private = [client["private_sha256"] for client in results["clients"]]
        found.add((results["shared_sha256"], *private))
        shown = " ".join(sha[:6] for sha in private)
        table.add_row(name, f"{seconds:.0f}", results["shared_sha256"][:16], shown)
    console.print(table)
    if len(found) != 1:
        raise RunError(f"the engines differ; the runs are in {folder}")
    console.print("all the same")
