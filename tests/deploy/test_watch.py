"""A run whose server, SuperLink or Ray dies ends at once, and its first line is the cause."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from blend_core.config import ServerConfig
from blend_core.errors import RunError
from blend_core.state import write_json_atomic
from client.process import PROC
from deploy import engine, watch
from deploy.children import Family
from deploy.relatives import MARKER
from deploy.watch import Watch

pytestmark = pytest.mark.skipif(not PROC.is_dir(), reason="looks into /proc")

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
# Seconds from the death to the end of `blend run`.
AT_MOST = 10.0


@pytest.fixture
def family(tmp_path: Path):
    environment = {**os.environ, MARKER: f"test-{tmp_path.name}-{os.getpid()}"}
    environment["PYTHONPATH"] = str(Path(engine.__file__).parent.parent)
    with Family(environment, tmp_path, patience=0.5) as family:
        yield family


def superlink_of(app: str, then: str = "") -> list[str]:
    """A process whose child starts `app` and, as Flower's SuperExec, never waits for it."""
    # Kept in a variable: the end of the object would ask for the child's, if that is quick.
    executor = f"import subprocess, time; app = subprocess.Popen([{app!r}]); {then}"
    executor += "time.sleep(600)"
    start = (
        f"import subprocess, time; subprocess.Popen({[*SLEEP[:3], executor]!r}); time.sleep(600)"
    )
    return [*SLEEP[:3], start]


def test_a_serverapp_that_dies_before_its_first_word_is_not_waited_for(
    family, tmp_path, monkeypatch
):
    monkeypatch.setattr(watch, "LAST_WORDS_SECONDS", 0.2)
    monkeypatch.setattr(watch, "SETTLE_SECONDS", 0.1)
    app = tmp_path / "flwr-serverapp"
    app.write_text("#!/bin/sh\nexit 7\n")
    app.chmod(0o755)
    run = family.start("run", SLEEP)
    # Another run's dead server is not ours.
    family.start("other", superlink_of(str(app)))
    quiet = family.start("superlink", SLEEP)
    options = (run, ServerConfig(), 1.0, lambda event: None)
    with pytest.raises(RunError, match="did not start within 1 s"):
        Watch(tmp_path, quiet, *options).until_end()
    link = family.start("superlink", superlink_of(str(app)))
    begin = time.monotonic()
    with pytest.raises(RunError, match="ended at its start: no error in its log, so it was killed"):
        Watch(tmp_path, link, run, ServerConfig(), 60.0, lambda event: None).until_end()
    assert time.monotonic() - begin < 5


def test_a_serverapp_that_somebody_waited_for_has_died_too(family, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "LAST_WORDS_SECONDS", 0.2)
    app = tmp_path / "flwr-serverapp"
    app.write_text("#!/bin/sh\nsleep 600\n")
    app.chmod(0o755)
    run = family.start("run", SLEEP)
    link = family.start("superlink", superlink_of(str(app), then="app.wait(); "))
    watching = Watch(tmp_path, link, run, ServerConfig(), 60.0, lambda event: None)
    deadline = time.monotonic() + 30
    while watching._app is None and time.monotonic() < deadline:
        assert watching._trouble() is None
        time.sleep(0.05)
    os.kill(watching._app, signal.SIGKILL)
    while (trouble := watching._trouble()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert str(trouble).startswith("the ServerApp ended at its start: ")


def test_new_results_count_though_a_full_disk_cost_the_journal_its_end(
    family, tmp_path, monkeypatch
):
    monkeypatch.setattr(watch, "SETTLE_SECONDS", 0.1)
    (tmp_path / "results.json").write_text("of the run before it was resumed")
    link, run = (family.start(name, SLEEP) for name in ("superlink", "run"))
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()

    def ended() -> Watch:
        event = {"event": "started", "pid": dead.pid, "engine": "processes"}
        (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
        return Watch(tmp_path, link, run, ServerConfig(), 60.0, lambda event: None)

    with pytest.raises(RunError, match="the ServerApp ended without a result"):
        ended().until_end()
    watching = ended()
    write_json_atomic(tmp_path / "results.json", {})
    watching.until_end()


def test_a_dead_part_of_ray_is_named_and_another_runs_is_not_ours(family, tmp_path):
    raylet = tmp_path / "raylet"
    raylet.write_text("#!/bin/sh\nexit 7\n")
    raylet.chmod(0o755)
    forget = f"import subprocess, time; part = subprocess.Popen([{str(raylet)!r}])"
    forget += "; time.sleep(600)"
    link, run, mine, other = (
        family.start(name, command)
        for name, command in (
            ("superlink", SLEEP),
            ("run", SLEEP),
            ("mine", [*SLEEP[:3], forget]),
            ("other", SLEEP),
        )
    )
    event = {"time": time.time(), "event": "started", "engine": "simulation"}
    found = {}
    for child in (other, mine):
        started = {**event, "pid": child.process.pid}
        (tmp_path / "events.jsonl").write_text("")
        watching = Watch(tmp_path, link, run, ServerConfig(), 60.0, lambda event: None)
        (tmp_path / "events.jsonl").write_text(json.dumps(started) + "\n")
        watching._finished()
        # A busy machine takes seconds to start what is to die; what is not ours never does.
        deadline = time.monotonic() + (30 if child is mine else 3)
        while (trouble := watching._trouble()) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        found[child.name] = str(trouble)
    assert found["other"] == "None"
    assert found["mine"].startswith("Ray's process raylet ended")


def test_what_a_dead_server_said_before_is_no_cause_but_its_last_error_is(family, tmp_path):
    code = "print('round: round 1, asked 2', flush=True)"
    run = family.start("run", [sys.executable, "-S", "-c", code])
    run.process.wait()
    assert watch._why(run).startswith("no error in its log, so it was killed (out of memory?); see")
    code += "; raise MemoryError('no more')"
    run = family.start("failed", [sys.executable, "-S", "-c", code])
    run.process.wait()
    assert watch._why(run).startswith("MemoryError: no more; see")


# The real thing


def launch(tiny_experiment, tower, out: Path, kind: str, path: str = "") -> subprocess.Popen[str]:
    experiment = tiny_experiment(rounds=500, backbone=tower("tower_a").model_dump())
    config = out.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(experiment.to_json()))
    root = str(Path(engine.__file__).parent.parent)
    return subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "run", config, "--engine", kind, "--out", out],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, root]))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def events(out: Path) -> list[dict]:
    path = out / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def process_of(out: Path, program: str) -> int:
    """The process of a run that runs a program of this name."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        names = [os.path.basename(part.decode()) for part in command[:2]]
        if program in names and str(out).encode() in environment:
            found.append(int(entry.name))
    (pid,) = found
    return pid


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "victim", "cause"),
    [
        ("processes", "flwr-serverapp", "the ServerApp ended without a result: "),
        ("processes", "flower-superlink", "the SuperLink ended (signal 9)"),
        ("simulation", "flwr-simulation", "the ServerApp ended without a result: "),
        ("simulation", "raylet", "Ray's process raylet ended"),
        ("simulation", "gcs_server", "Ray's process gcs_server ended"),
    ],
)
def test_a_death_in_mid_run_ends_the_run_within_ten_seconds(
    tiny_experiment, tower, tmp_path, kind, victim, cause
):
    out = tmp_path / "out"
    run = launch(tiny_experiment, tower, out, kind)
    try:
        deadline = time.monotonic() + 180
        while not any(event["event"] == "round_done" for event in events(out)):
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(process_of(out, victim), signal.SIGKILL)
        begin = time.monotonic()
        _, errors = run.communicate(timeout=120)
        seconds = time.monotonic() - begin
    finally:
        run.kill()
    assert run.returncode == 1
    assert errors.splitlines()[0].startswith(f"error: {cause}")
    assert seconds < AT_MOST


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "program"), [("processes", "flwr-serverapp"), ("simulation", "flwr-simulation")]
)
def test_a_death_at_the_start_ends_the_run_within_ten_seconds(
    tiny_experiment, tower, tmp_path, kind, program
):
    out, stamp = tmp_path / "out", tmp_path / "died"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        f"if any({program!r} in part for part in sys.orig_argv):\n"
        f"    open({str(stamp)!r}, 'w').close()\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    run = launch(tiny_experiment, tower, out, kind, str(tmp_path))
    try:
        _, errors = run.communicate(timeout=180)
        end = time.time()
    finally:
        run.kill()
    assert run.returncode == 1
    assert errors.startswith("error: the ServerApp ended at its start: ")
    assert end - stamp.stat().st_mtime < AT_MOST


@pytest.mark.slow
def test_an_exception_in_the_serverapp_is_the_first_line(tiny_experiment, tower, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if any('flwr-serverapp' in part for part in sys.orig_argv):\n"
        "    sys.modules['server.strategy'] = None\n"
    )
    run = launch(tiny_experiment, tower, out, "processes", str(tmp_path))
    try:
        _, errors = run.communicate(timeout=180)
    finally:
        run.kill()
    assert run.returncode == 1
    assert "ModuleNotFoundError: import of server.strategy halted" in errors.splitlines()[0]
