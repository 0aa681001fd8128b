"""BLEND against zero-shot CLIP on the built-in benchmark, over seeds."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from blend_core.metrics import METRICS
from blend_core.settings import load_experiment

SIZE = ["clients=10", "rounds=20"]


def measure(seeds: int, settings: list[str], out: Path | None) -> dict[str, Any]:
    """Run seeds 0, 1, ... of the quickstart's settings with 10 clients and 20 rounds.

    Args:
        seeds: how many.
        settings: further overrides.
        out: folder for the runs; unset: temporary.

    Returns:
        The differences that the product promises: of H-Mean and Gen. to zero-shot, in points,
        averaged over seeds.
    """
    folder = Path(out) if out else Path(tempfile.mkdtemp(prefix="blend-shapes-"))
    console = Console()
    found: dict[int, dict[str, Any]] = {}
    workers = min(seeds, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {
            pool.submit(_run, [*SIZE, *settings, f"seed={seed}"], folder / f"seed-{seed}"): seed
            for seed in range(seeds)
        }
        for job in as_completed(jobs):
            found[jobs[job]] = job.result()
            console.print(f"seed {jobs[job]} done", highlight=False)
    table = Table("seed", "", *(name for name in METRICS))
    for seed in sorted(found):
        for label in ("zero_shot", "final"):
            cells = (f"{found[seed][label][name]:.1f}" for name in METRICS)
            table.add_row(str(seed), label.replace("_", "-"), *cells, end_section=label == "final")
    gains = {
        name: [found[s]["final"][name] - found[s]["zero_shot"][name] for s in sorted(found)]
        for name in ("hmean", "gen")
    }
    console.print(table)
    for name, values in gains.items():
        listed = ", ".join(f"{value:+.1f}" for value in values)
        console.print(f"{name}: {statistics.mean(values):+.1f} points over zero-shot ({listed})")
    console.print(f"runs: {folder}", highlight=False, soft_wrap=True)
    return {name: statistics.mean(values) for name, values in gains.items()}


def _run(settings: list[str], out: Path) -> dict[str, Any]:
    from deploy.loop import run_loop

    run_loop(load_experiment("quickstart", settings), out, "bench")
    results: dict[str, Any] = json.loads((out / "results.json").read_text(encoding="utf-8"))
    return results
