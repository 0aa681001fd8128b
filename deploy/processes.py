"""Engine `processes`: a SuperLink and one SuperNode per client, as real processes on this machine.

The federation is what an operator would run on many machines, on 127.0.0.1 and without TLS.
"""

from __future__ import annotations

import time
from pathlib import Path

from blend_core.config import Experiment
from blend_core.data import client_names
from blend_core.errors import ConfigError, RunError
from client.site import Scalar, local_site
from deploy.children import Child, Family
from deploy.engine import HOST, Workspace, free_ports, script
from deploy.events import OnEvent
from deploy.node_config import node_config
from deploy.watch import LOOK_SECONDS, Watch, warning

# Somebody may take a port between our look and the process that wants it.
PORT_ATTEMPTS = 5
# How often a SuperNode may end within so many seconds before the run gives it up.
ENDS = 5
MEMORY_SECONDS = 600.0
# Before the second start within that time, doubled before each further one: what ended it may pass.
PAUSE_SECONDS = 1.0
PORT_TAKEN = "address already in use"
READY = "Uvicorn running on"
# The ServerApp has written everything when it says so; this is for its last lines of log.
FAREWELL_SECONDS = 1.0


def run_processes(
    experiment: Experiment,
    out: Path,
    federation: str,
    on_event: OnEvent = lambda event: None,
    started: float | None = None,
    start_timeout: float = 120.0,
    resume: bool = False,
) -> None:
    """Run the experiment with one SuperNode per client; results are written to `out`.

    Args:
        experiment: the resolved experiment.
        out: the run's folder.
        federation: unique id of this run's federation, of a resumed one that of its checkpoint.
        on_event: called with every event of the journal, and with warnings.
        started: unix time at which the user started the run, seconds; unset: now.
        start_timeout: seconds that the SuperLink and the ServerApp each may take to start.
        resume: go on after the newest checkpoint in `out`.

    Raises:
        ConfigError: the clients or their folders cannot be given to Flower.
        BlendError: the run failed. No process is left either way.
    """
    out = out.resolve()
    nodes = node_configs(experiment, out)
    workspace = Workspace(out, federation)
    workspace.write_app()
    workspace.write_run_config(experiment, "processes", started or time.time(), resume)
    with Family(workspace.environment(len(nodes)), workspace.logs) as family:
        superlink, port = start_superlink(family, workspace, start_timeout, nodes=nodes)
        submission = family.start("run", workspace.submit_command())
        keeper = _Nodes(family, port, nodes, on_event)
        Watch(
            out,
            superlink,
            submission,
            experiment.server,
            start_timeout,
            on_event,
            keeper.check,
            resume,
        ).until_end()
        wait_for(submission, FAREWELL_SECONDS)


def node_configs(experiment: Experiment, out: Path) -> dict[str, str]:
    """The `--node-config` of every client, by name.

    Raises:
        ConfigError: there are no site folders, or a path cannot be quoted for Flower.
    """
    names = client_names(experiment)
    if names is None:
        raise ConfigError("data.kind = 'folders' needs data.root to run all sites on this machine")
    configs = {}
    for index, name in enumerate(names):
        site = local_site(experiment, name, index, out)
        values: dict[str, Scalar] = {
            "client-name": name,
            "partition-id": index,
            "num-partitions": len(names),
            "state-dir": str(site.state_dir),
            "verbose-errors": True,
        }
        if site.data_dir is not None:
            values["data-dir"] = str(site.data_dir)
        configs[name] = node_config(values)
    return configs


def start_superlink(
    family: Family,
    workspace: Workspace,
    timeout: float,
    options: tuple[str, ...] = (),
    nodes: dict[str, str] | None = None,
) -> tuple[Child, int]:
    """Start the SuperLink, and the SuperNodes beside it, which try until it answers.

    Returns:
        The SuperLink's process and its port.

    Raises:
        RunError: it ended or did not become ready in time.
    """
    for _ in range(PORT_ATTEMPTS):
        (port,) = free_ports(1)
        workspace.write_connection(port)
        address = ("--host", HOST, "--port", str(port))
        superlink = family.start(
            "superlink", [script("flower-superlink"), "--insecure", *address, *options]
        )
        for name, config in (nodes or {}).items():
            start_supernode(family, name, config, port)
        deadline = time.monotonic() + timeout
        while superlink.running:
            # Its own word, not an open port: another SuperLink may have taken the port.
            if f"{READY} http://{HOST}:{port}" in superlink.output():
                return superlink, port
            if time.monotonic() > deadline:
                raise RunError(
                    f"the SuperLink was not ready within {timeout:.0f} s; see {superlink.log}"
                )
            time.sleep(LOOK_SECONDS)
        ending = superlink.ending()
        if PORT_TAKEN not in superlink.output().lower():
            break
        family.stop()
    raise RunError(f"the SuperLink ended {ending}")


def start_supernode(family: Family, name: str, config: str, superlink_port: int) -> Child:
    """Start one client's SuperNode on a free port."""
    (port,) = free_ports(1)
    return family.start(
        child_name(name),
        [
            script("flower-supernode"),
            "--insecure",
            *("--superlink", f"{HOST}:{superlink_port}"),
            *("--host", HOST, "--port", str(port)),
            *("--node-config", config),
        ],
    )


def child_name(client: str) -> str:
    """Name of a client's SuperNode among our processes and logs; no client can be "superlink"."""
    return f"site-{client}"


def wait_for(child: Child, seconds: float) -> None:
    """Wait until a process ends, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while child.running and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)


class _Nodes:
    """Looks after the SuperNodes: one that ends is started again, unless it ends again and again.

    Its client does the round again, with the same result; see `server.transport`.
    """

    def __init__(
        self, family: Family, superlink_port: int, configs: dict[str, str], on_event: OnEvent
    ) -> None:
        self.family = family
        self.port = superlink_port
        self.configs = configs
        self.on_event = on_event
        # When the SuperNodes have ended lately, and when those that are down are started again.
        self._ends: dict[str, list[float]] = {name: [] for name in configs}
        self._due: dict[str, float] = {}

    def check(self) -> None:
        """Start again who has ended. Raises `RunError` when one ends again and again."""
        # The newest process of each name counts.
        current = {child.name: child for child in self.family.children}
        now = time.monotonic()
        for name, config in self.configs.items():
            child = current[child_name(name)]
            if child.running:
                continue
            if name not in self._due:
                self._due[name] = now + self._pause(name, child, now)
            if now >= self._due[name]:
                del self._due[name]
                start_supernode(self.family, name, config, self.port)

    def _pause(self, name: str, child: Child, now: float) -> float:
        """Note that a SuperNode has ended; seconds until it is started again."""
        ends = [end for end in self._ends[name] if now - end < MEMORY_SECONDS] + [now]
        self._ends[name] = ends
        if len(ends) >= ENDS:
            raise RunError(
                f"{name}: its SuperNode ended {ENDS} times within {MEMORY_SECONDS:.0f} s, "
                f"{child.ending()}"
            )
        if PORT_TAKEN not in child.output().lower():
            told = f"{name}: its SuperNode ended {child.ending()}; it is restarted"
            self.on_event(warning(told))
        return 0.0 if len(ends) == 1 else PAUSE_SECONDS * 2.0 ** (len(ends) - 2)
