"""The engines are one federation: the same bytes whatever carries them, and nothing leaks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrix import ROWS

from blend_core.config import Experiment, parse_experiment
from blend_core.state import Generations
from deploy.loop import run_loop
from deploy.processes import run_processes
from deploy.simulation import run_simulation


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture
def experiment(tiny_experiment) -> Experiment:
    return tiny_experiment()


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def hashes(out: Path) -> tuple[str, dict[str, str]]:
    found = results(out)
    return found["shared_sha256"], {c["name"]: c["private_sha256"] for c in found["clients"]}


@pytest.fixture(scope="module")
def runs() -> dict[str, Path]:
    """Finished runs by name; the tests below make them in order and compare."""
    return {}


def run(runs: dict[str, Path], folder: Path, name: str, engine, experiment, **options) -> Path:
    if name not in runs:
        engine(experiment, folder / name, f"fed-{name}", **options)
        runs[name] = folder / name
    return runs[name]


def test_two_runs_of_the_loop_agree_and_seeds_differ(runs, folder, experiment, tiny_experiment):
    one = run(runs, folder, "loop", run_loop, experiment)
    two = run(runs, folder, "again", run_loop, experiment)
    assert hashes(one) == hashes(two)
    zero = run(runs, folder, "seed0", run_loop, tiny_experiment(seed=0))
    assert hashes(zero)[0] != hashes(one)[0]
    assert all(hashes(zero)[1][c] != sha for c, sha in hashes(one)[1].items())
    assert len(set(hashes(one)[1].values())) == experiment.clients


def test_processes_equal_the_loop(runs, folder, experiment):
    loop = run(runs, folder, "loop", run_loop, experiment)
    processes = run(runs, folder, "processes", run_processes, experiment)
    assert hashes(processes) == hashes(loop)
    first, second = results(loop), results(processes)
    for key in ("zero_shot", "final", "bytes_per_round"):
        assert first[key] == second[key]


@pytest.mark.parametrize("actors", [1, 2])
def test_simulation_equals_the_loop(runs, folder, experiment, actors):
    loop = run(runs, folder, "loop", run_loop, experiment)
    simulation = run(runs, folder, f"ray{actors}", run_simulation, experiment, actors=actors)
    assert hashes(simulation) == hashes(loop)
    assert results(simulation)["final"] == results(loop)["final"]


def test_a_worker_loads_its_backbone_once_per_run(runs, folder, experiment):
    out = run(runs, folder, "processes", run_processes, experiment)
    for client in results(out)["clients"]:
        assert (client["workers"], client["backbone_loads"]) == (1, 1)


def test_every_round_carries_the_bytes_of_the_formula(runs, folder, experiment):
    out = run(runs, folder, "processes", run_processes, experiment)
    # 10 blocks of width 128, rank 4: 10 (2*128*4 + 4 + 128) values of 4 bytes, one header.
    expected = 4 * 10 * 1156 + 128
    for round in results(out)["rounds"]:
        for row in round["clients"]:
            assert row["bytes_up"] == row["bytes_down"] == expected


def test_private_values_are_in_no_server_file_and_no_log(runs, folder, experiment):
    """Bits of the sites' private tensors appear nowhere outside the sites' state folders."""
    out = run(runs, folder, "processes", run_processes, experiment)
    needles: list[bytes] = []
    for site in sorted((out / "state").iterdir()):
        state = Generations(site / "fed-processes" / site.name)
        for _, tensors, _ in [state.newest_before(99)]:
            for value in tensors.values():
                flat = value.reshape(-1)[value.reshape(-1) != 0]
                if flat.size >= 4:
                    needles.append(flat[:4].astype("<f4").tobytes())
                    needles.append(repr(float(np.float32(flat[0]))).encode()[:10])
    assert len(needles) >= 2 * 2 * 2
    outside = [p for p in out.rglob("*") if p.is_file() and (out / "state") not in p.parents]
    assert len(outside) > 5
    for path in outside:
        content = path.read_bytes()
        for needle in needles:
            assert needle not in content, path


def processes_of(out: Path, name: str) -> list[int]:
    """Ids of the processes of a run's first site whose command line holds `name`."""
    lines, parents = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            lines[entry.name] = (entry / "cmdline").read_bytes().decode(errors="replace")
            parents[entry.name] = (entry / "stat").read_text().rpartition(")")[2].split()[1]
    node = f"{out}/state/client-00"

    def belongs(pid: str) -> bool:
        while pid in lines:
            if node in lines[pid]:
                return True
            pid = parents.get(pid, "")
        return False

    return [int(pid) for pid, line in lines.items() if name in line and belongs(pid)]


@pytest.mark.parametrize("victim", ["client.worker", "flwr-clientapp", "flower-supernode"])
@pytest.mark.slow
def test_a_killed_process_of_a_site_changes_no_byte(folder, tiny_experiment, victim):
    experiment = tiny_experiment(rounds=4)
    run_loop(experiment, folder / f"calm-{victim}", "calm")
    out = folder / f"killed-{victim}"
    killed: list[int] = []

    def kill_in_round_two(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 2 and not killed:
            deadline = time.monotonic() + 30
            while not killed and time.monotonic() < deadline:
                killed.extend(processes_of(out, victim)[:1])
            os.kill(killed[0], signal.SIGKILL)

    run_processes(experiment, out, "killed", kill_in_round_two)
    assert len(killed) == 1
    assert hashes(out) == hashes(folder / f"calm-{victim}")


@pytest.fixture
def of_method(tiny_experiment):
    """name -> a small experiment of that method."""

    def build(name: str) -> Experiment:
        plain = tiny_experiment(train={"optimizer": "sgd", "lr": 0.05}).to_json()
        return parse_experiment({**plain, "method": {"name": name, **ROWS[name].small}})

    return build


# pFedMoAP is the one with tensors for single clients; the others differ in numbers alone.
@pytest.mark.parametrize(
    "name",
    [
        name if name == "pfedmoap" else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(ROWS)
    ],
)
def test_every_method_gives_the_same_bytes_in_every_engine(folder, of_method, name):
    experiment = of_method(name)
    found = {}
    for label, engine in (("l", run_loop), ("s", run_simulation), ("p", run_processes)):
        out = folder / f"{label}-{name}"
        engine(experiment, out, f"fed-{label}")
        found[label] = {
            key: results(out)[key] for key in ("zero_shot", "final", "bytes_per_round")
        } | {"hashes": hashes(out)}
    assert found["s"] == found["l"]
    assert found["p"] == found["l"]
    if name == "pfedmoap":
        # Global prompt and one expert, 4 vectors of width 128 each.
        assert set(found["p"]["bytes_per_round"]["down"].values()) == {2 * 4 * 4 * 128 + 128}
