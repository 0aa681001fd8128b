"""Engine `simulation`: what Flower and Ray are told, and that Ray leaves nothing behind."""

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

from blend_core.config import parse_experiment
from blend_core.errors import ConfigError
from client.process import PROC
from deploy import simulation
from deploy.simulation import checked_actors, federation_config, ray_environment

EXPERIMENT = parse_experiment({"clients": 5})


def test_flower_reads_the_federation_as_we_meant_it():
    from flwr.common.config import parse_config_args
    from flwr.supercore.utils import simulation_config_from_json

    pairs = parse_config_args([federation_config(EXPERIMENT, actors=3)])
    config = simulation_config_from_json({k.replace("-", "_"): v for k, v in pairs.items()})
    assert (config.num_supernodes, config.backend) == (5, "ray")
    # One Ray CPU per actor, so that there are as many actors as Ray has CPUs.
    assert (config.client_resources_num_cpus, config.init_args_num_cpus) == (1, 3)


def test_there_are_never_more_actors_than_clients():
    assert checked_actors(EXPERIMENT, 64) == 5
    assert checked_actors(EXPERIMENT, 2) == 2
    assert 1 <= checked_actors(EXPERIMENT, None) <= 5


def test_less_than_one_actor_is_refused_by_the_name_of_the_option():
    with pytest.raises(ConfigError, match="--actors 0: must be at least 1"):
        checked_actors(EXPERIMENT, 0)


def test_ray_is_neither_sent_to_a_cluster_nor_calls_home():
    base = {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_TMPDIR": "/theirs", "PATH": "/bin"}
    environment = ray_environment(base, Path("/tmp/x"))
    assert "RAY_ADDRESS" not in environment
    assert environment["RAY_TMPDIR"] == "/tmp/x"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert environment["PATH"] == "/bin"


def test_rays_sockets_have_short_paths_even_with_a_long_temporary_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(simulation.tempfile, "tempdir", str(tmp_path / ("long" * 20)))
    socket = "ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
    assert len(f"{simulation._short_temporary_folder()}/blend-ray-12345678/{socket}") < 104


@pytest.mark.slow
@pytest.mark.skipif(not PROC.is_dir(), reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_simulation_leaves_no_process_and_no_session(
    tiny_experiment, tower, tmp_path, number
):
    experiment = tiny_experiment(rounds=5000, backbone=tower("tower_a").model_dump())
    config, out = tmp_path / "experiment.yaml", tmp_path / "out"
    config.write_text(yaml.safe_dump(experiment.to_json()))
    run = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "run", config, "--engine=simulation", "--out", out],
        env={**os.environ, "PYTHONPATH": str(Path(simulation.__file__).parent.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    journal = out / "events.jsonl"
    try:
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline and run.poll() is None:
            lines = journal.read_text().splitlines() if journal.exists() else []
            if any(json.loads(line)["event"] == "round_done" for line in lines):
                break
            time.sleep(0.1)
        sessions = {line for facts in _facts(out).values() for line in facts.split("\0")}
        scratch = {Path(s.partition("=")[2]) for s in sessions if s.startswith("RAY_TMPDIR=")}
        run.send_signal(number)
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    killed = number == signal.SIGKILL
    assert run.returncode == (-9 if killed else 128 + number), errors
    if not killed:
        kept = f"every finished round is kept: blend run --resume {out}"
        assert errors.splitlines() == [f"stopped by {number.name}", kept]
    # Nobody waits for a killed launcher's clean-up.
    deadline = time.monotonic() + (30 if killed else 0)
    while _left(out, scratch) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(scratch) == 1
    assert not _left(out, scratch)


def _facts(out: Path) -> dict[str, str]:
    """Environment and command line of the processes that have to do with a run's folder."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            facts = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(out).encode() in facts and entry.name != str(os.getpid()):
            found[entry.name] = facts.decode(errors="replace")
    return found


def _left(out: Path, scratch: set[Path]) -> list[str]:
    """What is left of a run: its processes, and Ray's folder."""
    return [*_facts(out).values(), *(str(folder) for folder in scratch if folder.exists())]
