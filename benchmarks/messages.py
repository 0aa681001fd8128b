"""What a message costs that does no work, in real processes."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.serverapp import ServerApp
from rich.console import Console

from blend_core.errors import RunError
from blend_core.settings import experiment_from_run_config, load_experiment
from deploy.children import Family
from deploy.engine import COMPONENTS, Workspace, script
from deploy.processes import node_configs, start_superlink, wait_for

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid

TIMES = "times.json"
DEADLINE = 600.0

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Send the same client many evaluations at once; note when each reply comes."""
    from blend_core.messages import Request
    from server.transport import FlowerTransport

    settings = context.run_config
    experiment = experiment_from_run_config(settings)
    transport = FlowerTransport(grid)
    joining = Request("join", str(settings["federation"]), 0, experiment.to_json())
    joined = next(transport.join(joining, DEADLINE))
    if joined.error is not None:
        raise RunError(joined.error)
    times: list[float] = []
    work: list[float] = []
    # All lie in the queue at once, so the SuperNode's idle poll of 3 s does not count.
    requests = {str(number): joining for number in range(experiment.rounds)}
    transport.nodes |= dict.fromkeys(requests, transport.nodes[joined.client])
    for _, reply in transport.ask(requests, DEADLINE):
        if reply.error is not None:
            raise RunError(reply.error)
        start, end = reply.statistics["evaluate_span"]
        times.append(time.time())
        work.append(end - start)
    Path(str(settings["out"]), TIMES).write_text(json.dumps([times, work]), encoding="utf-8")


def measure(count: int) -> None:
    """Print seconds a message, without the evaluation in it, and Flower's own share."""
    out = Path(tempfile.mkdtemp(prefix="blend-messages-"))
    experiment = load_experiment(
        "quickstart",
        ["clients=1", f"rounds={count}", "data.shots=1", "data.test_per_class=1"],
    )
    workspace = Workspace(out, "bench")
    workspace.write_app({**COMPONENTS, "serverapp": "benchmarks.messages:app"})
    workspace.write_run_config(experiment, "processes", time.time())
    nodes = node_configs(experiment, out)
    with Family(workspace.environment(2), workspace.logs) as family:
        start_superlink(family, workspace, 120.0, nodes=nodes)
        wait_for(family.start("run", workspace.submit_command()), DEADLINE)
    times, work = json.loads((out / TIMES).read_text(encoding="utf-8"))
    shutil.rmtree(out)
    cost = (times[-1] - times[0] - sum(work[1:])) / (len(times) - 1)
    start = _process_start()
    console = Console(highlight=False)
    console.print(f"{count} messages to one client, one after the other")
    console.print(f"a message that does no work   {cost:.2f} s")
    console.print(f"start of a bare flwr-clientapp {start:.2f} s (ratio {cost / start:.2f})")


def _process_start() -> float:
    """Median seconds from start to end of Flower's ClientApp process with nothing to do."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([script("flwr-clientapp"), "--help"], capture_output=True, check=True)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
