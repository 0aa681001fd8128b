"""The Flower ServerApp: takes the run's configuration, runs the coordinator over Flower."""

from __future__ import annotations

import functools
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from blend_core.errors import ConfigError
from blend_core.report.runs import RESULTS
from blend_core.settings import experiment_from_run_config
from server.checkpoints import Checkpoints
from server.identity import Identities
from server.strategy import Coordinator
from server.transport import FlowerTransport

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one experiment; its outcome is in the journal and the results of its folder."""
    settings = context.run_config
    experiment = experiment_from_run_config(settings)
    federation = str(settings.get("federation") or f"run-{context.run_id}")
    out = Path(str(settings.get("out") or Path.cwd() / "runs" / federation))
    started = float(settings.get("started") or 0.0) or None
    # Set by the `blend` command; `flwr run .` may be anything that Flower runs.
    engine = str(settings.get("engine") or "flower")
    resume = settings.get("resume") or False
    if not isinstance(resume, bool):
        raise ConfigError(f"resume = {resume!r}: must be true or false, without quotes")
    if resume and not settings.get("out"):
        raise ConfigError("resume = true: needs out, the folder of the run that is to go on")
    if not resume and ((out / RESULTS).exists() or Checkpoints(out).exist()):
        raise ConfigError(f"out = {out}: holds another run; name a new folder, or resume=true")
    transport = FlowerTransport(grid, Identities(out, experiment.server.require_keys))
    # Flower shows what a ServerApp prints to whoever streams the run's log.
    echo = functools.partial(print, flush=True)
    coordinator = Coordinator(experiment, transport, out, federation, engine, started, echo, resume)
    transport.unfit = coordinator.unfit
    transport.on_refused = coordinator.note_refused
    transport.on_warning = coordinator.warn
    coordinator.run()
