"""Engine `simulation`: the same federation on Ray, through Flower's Simulation Runtime."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from blend_core.config import Experiment
from blend_core.errors import ConfigError
from deploy.children import Family
from deploy.engine import Workspace
from deploy.events import OnEvent
from deploy.processes import start_superlink, wait_for
from deploy.watch import Watch

# Ray takes some seconds to end its own processes in good order.
FAREWELL_SECONDS = 10.0


def run_simulation(
    experiment: Experiment,
    out: Path,
    federation: str,
    on_event: OnEvent = lambda event: None,
    started: float | None = None,
    start_timeout: float = 120.0,
    actors: int | None = None,
    resume: bool = False,
) -> None:
    """Run the experiment with Ray actors in the place of sites; results are written to `out`.

    Args:
        experiment: the resolved experiment.
        out: the run's folder.
        federation: unique id of this run's federation, of a resumed one that of its checkpoint.
        on_event: called with every event of the journal, and with warnings.
        started: unix time at which the user started the run, seconds; unset: now.
        start_timeout: seconds that the SuperLink and the ServerApp each may take to start.
        actors: how many clients are computed at the same time, from 1; unset: one per
            processor core, and no more than clients. Does not change any number.
        resume: go on after the newest checkpoint in `out`.

    Raises:
        BlendError: the run failed. No process is left either way.
    """
    actors = checked_actors(experiment, actors)
    out = out.resolve()
    workspace = Workspace(out, federation)
    workspace.write_app()
    workspace.write_run_config(experiment, "simulation", started or time.time(), resume)
    scratch = Path(tempfile.mkdtemp(prefix="blend-ray-", dir=_short_temporary_folder()))
    environment = ray_environment(workspace.environment(0), scratch)
    with Family(environment, workspace.logs, scratch) as family:
        superlink, _ = start_superlink(family, workspace, start_timeout, ("--simulation",))
        settings = federation_config(experiment, actors)
        command = workspace.submit_command("--federation-config", settings)
        submission = family.start("run", command)
        Watch(
            out,
            superlink,
            submission,
            experiment.server,
            start_timeout,
            on_event,
            resume=resume,
        ).until_end()
        wait_for(submission, FAREWELL_SECONDS)


def checked_actors(experiment: Experiment, actors: int | None) -> int:
    """How many actors to start. Raises `ConfigError` for less than one."""
    if actors is not None and actors < 1:
        raise ConfigError(f"--actors {actors}: must be at least 1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(actors or cores or 1, experiment.clients)


def federation_config(experiment: Experiment, actors: int) -> str:
    """Flower's settings of a simulated federation: every actor is one Ray CPU."""
    return (
        f"num-supernodes={experiment.clients} backend='ray' "
        f"client-resources-num-cpus=1 client-resources-num-gpus=0.0 "
        f"init-args-num-cpus={actors} init-args-log-to-driver=true"
    )


def ray_environment(environment: dict[str, str], scratch: Path) -> dict[str, str]:
    """Add what Ray needs to keep to itself.

    Args:
        environment: of the run's processes.
        scratch: folder for Ray's sessions, removed with the run.
    """
    # RAY_ADDRESS would send the run to somebody's cluster.
    clean = {key: value for key, value in environment.items() if not key.startswith("RAY_")}
    return clean | {
        "RAY_TMPDIR": str(scratch),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Actors ask Ray for no GPU, and `train.device` decides; Ray must not hide them.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def _short_temporary_folder() -> str:
    # Ray's sockets lie under it, and their paths may have 103 characters at most.
    return "/tmp" if Path("/tmp").is_dir() else tempfile.gettempdir()
