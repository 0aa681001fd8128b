"""Starts, disturbs, resumes and compares runs of the processes engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from blend_core.report.runs import RESULTS
from blend_core.settings import load_experiment
from deploy.children import Child, Family
from deploy.engine import Workspace
from deploy.processes import READY, node_configs, start_superlink
from deploy.relatives import MARKER, is_running

ROUNDS = 3
CONFIG = f"""\
seed: 1
rounds: {ROUNDS}
clients: 2
method: {{name: blend, gamma: 0.43, vision_rank: 4, text_rank: 4, projection_rank: 8}}
data: {{shots: 2, test_per_class: 1}}
train: {{batch_size: 16}}
server: {{min_replies: 2, formation_timeout: 240, round_timeout: 240}}
"""
INJECT = Path(__file__).resolve().parent / "inject"
# Seconds after which a run is taken to hang. No case needs a tenth of it on a quiet machine.
DEADLINE = 600.0


@dataclass
class Attempt:
    """One `blend run`, from its start to its end.

    Attributes:
        code: exit code, negative for a signal.
        lines: what it wrote to stderr.
        seconds: from start to end.
    """

    code: int
    lines: list[str]
    seconds: float

    @property
    def cause(self) -> str:
        """The first line that a user sees."""
        return self.lines[0] if self.lines else ""


@dataclass
class Running:
    """A `blend run` that goes on.

    Attributes:
        out: the run's folder.
        process: the launcher.
        scratch: folder for markers and the like.
    """

    out: Path
    process: subprocess.Popen[str]
    scratch: Path
    started: float = field(default_factory=time.monotonic)

    def until(self, event: str, round: int | None = None) -> None:
        """Wait until the journal has an event. Raises `TimeoutError`."""
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            for found in journal(self.out):
                if found["event"] == event and round in (None, found.get("round")):
                    return
            if self.process.poll() is not None:
                raise TimeoutError(f"the run ended before {event} {round}")
            time.sleep(0.02)
        raise TimeoutError(f"no {event} {round}")

    def processes(self, word: str) -> list[int]:
        """Living processes of this run whose command line has a word."""
        return [pid for pid, command in family(self.out) if word in command]

    def kill(self, word: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to every process of this run whose command line has a word."""
        found = self.processes(word)
        assert found, f"no process with {word}"
        for pid in found:
            os.kill(pid, number)

    def end(self) -> Attempt:
        """Wait for the end."""
        try:
            _, errors = self.process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            _, errors = self.process.communicate(timeout=60)
            errors = f"hung for {DEADLINE:.0f} s\n{errors}"
        lines = [line for line in errors.splitlines() if line.strip()]
        return Attempt(self.process.returncode, lines, time.monotonic() - self.started)


def start(
    out: Path,
    scratch: Path,
    faults: list[dict[str, Any]],
    resume: bool,
    settings: Mapping[str, Any],
) -> Running:
    """Start a run, or go on with one, with faults in its processes."""
    scratch.mkdir(parents=True, exist_ok=True)
    config = scratch / "config.yaml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "deploy.cli", "run"]
    command += ["--resume", str(out)] if resume else [str(config), "--out", str(out)]
    command += [word for k, v in settings.items() for word in ("--set", f"{k}={v}")]
    path = os.pathsep.join(filter(None, [str(INJECT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "CHAOS": json.dumps(faults)}
    environment["CHAOS_CLOCK"] = str(scratch / "a-day-later")
    environment.pop(MARKER, None)
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return Running(out, process, scratch)


def journal(out: Path) -> list[dict[str, Any]]:
    """All whole events of a run."""
    try:
        lines = (out / "events.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("}")]


def family(out: Path) -> Iterator[tuple[int, str]]:
    """Process id and command line of every living process that belongs to a run's folder."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            )
            environment = (folder / "environ").read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        if str(out) in command or f"FLWR_HOME={out}/flower" in environment:
            yield int(folder.name), command


def hashes(out: Path) -> dict[str, str]:
    """What must be equal: SHA-256 of the shared and of every private tensor set."""
    results = json.loads((out / RESULTS).read_text())
    private = {client["name"]: client["private_sha256"] for client in results["clients"]}
    return {"shared": results["shared_sha256"], **private}


@lru_cache(maxsize=1)
def undisturbed(folder: Path) -> tuple[dict[str, str], float]:
    """Hashes and seconds of a run to which nothing happens."""
    attempt = start(folder / "undisturbed", folder / "quiet", [], False, {}).end()
    assert attempt.code == 0, attempt.lines
    return hashes(folder / "undisturbed"), attempt.seconds


def restarted_superlink(out: Path) -> Attempt:
    """A federation by hand: its SuperLink, which has a database, is stopped and started again."""
    began = time.monotonic()
    out.mkdir()
    (out / "config.yaml").write_text(CONFIG)
    experiment = load_experiment(out / "config.yaml")
    workspace = Workspace(out, "by-hand")
    workspace.write_app()
    nodes = node_configs(experiment, out)
    with Family(workspace.environment(len(nodes)), workspace.logs) as family:

        def submit(resume: bool) -> Child:
            workspace.write_run_config(experiment, "processes", time.time(), resume)
            return family.start(f"run-resume-{resume}", workspace.submit_command())

        options = ("--database", str(out / "superlink.db"))
        first, _ = start_superlink(family, workspace, 120.0, options, nodes)
        submit(resume=False)
        _until(lambda: any(event["event"] == "round_done" for event in journal(out)))
        first.process.send_signal(signal.SIGTERM)
        _until(lambda: not first.running)
        second = family.start("superlink", [str(word) for word in first.process.args])
        _until(lambda: f"{READY} http" in second.output())
        # The first ServerApp goes on until the SuperLink refuses what it knows its task by.
        (started,) = (event for event in journal(out) if event["event"] == "started")
        _until(lambda: not is_running(started["pid"]))
        resumed = submit(resume=True)
        _until(lambda: not resumed.running)
    # `flwr run --stream` ends with 0 whatever came of the run.
    code = 0 if journal(out)[-1]["event"] == "finished" else 1
    return Attempt(code, resumed.output().splitlines()[-1:], time.monotonic() - began)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.05)


Disturb = Callable[[Running], None]
Between = Callable[[Path], None]
