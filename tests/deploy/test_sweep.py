"""`blend sweep`: what a grid means, and that finished runs are kept whatever happens."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from blend_core import __version__
from blend_core.errors import ConfigError
from blend_core.settings import preset_names
from deploy.grid import Cell, Sweep, labels, narrowed, read_grid, resolve
from deploy.options import Engine
from deploy.relatives import relatives
from deploy.sweep_folder import finished_results, foreign_content
from deploy.sweep_runner import _jobs, run_sweep
from deploy.sweep_view import SweepView

BLEND = [sys.executable, "-m", "deploy.cli"]


def write(path: Path, data: Any) -> str:
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return str(path)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=80)


def until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition():
        time.sleep(0.05)
    return bool(condition())


# What a grid means


def test_a_grid_is_multiplied_out_entry_by_entry(tmp_path):
    grid = {
        "set": {"rounds": 20, "method.context_length": 8},
        "seeds": [0, 1, 2],
        "cells": [
            {"method.name": ["promptfl", "fedotp"], "method.context_length": 4},
            {"method.name": "blend", "method.aggregate": ["blend", "full", "none"], "rounds": 5},
        ],
    }
    sweep = read_grid(write(tmp_path / "grid.yaml", grid))
    assert sweep.base == "quickstart"
    assert len(sweep.cells) == (2 + 3) * 3
    assert [cell.seed for cell in sweep.cells] == [0, 1, 2] * 5
    # An entry's own value wins over that for all cells.
    assert dict(sweep.cells[3].settings) == {
        "method.name": "fedotp",
        "method.context_length": 4,
        "rounds": 20,
    }
    assert dict(sweep.cells[-1].settings)["rounds"] == 5
    assert dict(sweep.cells[-1].settings)["method.aggregate"] == "none"


def test_two_lists_in_an_entry_are_combined_all_with_all(tmp_path):
    grid = {"seeds": [7], "cells": [{"method.gamma": [0.1, 0.2, 0.3], "train.lr": [0.1, 0.2]}]}
    sweep = read_grid(write(tmp_path / "grid.yaml", grid))
    assert [[value for _, value in cell.settings] for cell in sweep.cells] == [
        ["blend", 0.1, 0.1],
        ["blend", 0.1, 0.2],
        ["blend", 0.2, 0.1],
        ["blend", 0.2, 0.2],
        ["blend", 0.3, 0.1],
        ["blend", 0.3, 0.2],
    ]


def test_a_setting_that_is_a_list_reaches_the_run_as_one(tmp_path):
    grid = {"seeds": [0], "cells": [{"method.vision_layers": [[5, 6], "all"]}]}
    sweep = read_grid(write(tmp_path / "grid.yaml", grid))
    found = [experiment.to_json()["method"] for experiment in resolve(sweep).values()]
    assert [method["vision_layers"] for method in found] == [[5, 6], "all"]
    assert Cell((("method.vision_layers", [5, 6]),), 0) in {
        Cell((("method.vision_layers", (5, 6)),), 0)
    }


def test_cells_name_the_method_of_their_base(tmp_path):
    base = write(tmp_path / "base.yaml", {"method": {"name": "zero-shot"}, "rounds": 3})
    grid = {
        "base": base,
        "seeds": [0],
        "cells": [{"data.shots": [1, 2]}, {"method.name": "blend", "method.projection_rank": 8}],
    }
    sweep = read_grid(write(tmp_path / "grid.yaml", grid))
    names = [experiment.method.name for experiment in resolve(sweep).values()]
    assert names == ["zero-shot", "zero-shot", "blend"]
    assert list(labels(sweep.cells).values()) == ["zero-shot shots=1", "zero-shot shots=2", "blend"]


def test_labels_name_what_tells_cells_of_a_method_apart():
    common = (("rounds", 20), ("train.batch_size", 8))
    cells = [
        Cell((("method.name", "blend"), ("method.gamma", 0.2), *common), 0),
        Cell((("method.name", "blend"), ("method.gamma", 0.45), *common), 0),
        Cell((("method.name", "blend"), ("evaluation.batch_size", 4), *common[1:]), 0),
        Cell((("method.name", "zero-shot"), *common), 0),
    ]
    assert list(labels(cells).values()) == [
        "blend gamma=0.2 rounds=20",
        "blend gamma=0.45 rounds=20",
        "blend batch_size=4",
        "zero-shot",
    ]
    assert cells[2].label == "blend evaluation.batch_size=4 train.batch_size=8"


def test_folders_are_safe_different_and_the_same_tomorrow():
    one, two = ("method.name", "blend"), ("backbone.weights", "../../a b/ü" * 20)
    cell = Cell((one, two), 0)
    assert cell.folder == Cell((two, one), 3).folder
    assert len(cell.folder) <= 60
    assert set(cell.folder) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")
    assert not cell.folder.startswith(".")
    assert cell.folder != Cell((one, ("backbone.weights", "../../a b/ü" * 20 + "x")), 0).folder
    # printf '{"method.gamma": 0.2, "method.name": "blend"}' | sha256sum
    assert Cell((one, ("method.gamma", 0.2)), 0).folder == "blend-gamma-0.2-626ad4d9"


GOOD: dict[str, Any] = {"seeds": [0], "cells": [{"rounds": 2}]}
MANY = list(range(1000))
ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cell": []}, "cell: unknown key; known: base, set, seeds, cells"),
        ({"base": 3}, "base = 3: name a preset"),
        ({"base": "no-such-base"}, "no-such-base: no such file, and not a preset"),
        ({"set": [1]}, "set: expected settings"),
        ({"set": {"train": {"lr": 1}}}, "set: train: write single settings with dots"),
        ({"set": {"seed": 1}}, "set: seed: the seeds of all cells belong under 'seeds'"),
        ({"seeds": []}, "seeds: give a list"),
        ({"seeds": 3}, "seeds: give a list"),
        ({"seeds": [0, True]}, "seeds: true: a seed is a whole number"),
        ({"seeds": [-1]}, "seeds: -1: a seed is a whole number"),
        ({"seeds": [1, 2, 1]}, "seeds: 1 is given twice"),
        ({"seeds": list(range(10_001))}, "seeds: 10,001 runs; a sweep has at most 10,000"),
        ({"cells": {}}, "cells: give a list"),
        ({"cells": [{"rounds": 2}, None]}, "cells, entry 2: expected settings"),
        ({"cells": [{"rounds": []}]}, "cells, entry 1: rounds: empty list"),
        ({"cells": [{3: 4}]}, "cells, entry 1: 3: expected a setting"),
        ({"cells": [{"train.lr": [{"a": 1}]}]}, "entry 1: train.lr: write single settings"),
        ({"cells": [{"train.lr": [[[{"a": 1}]]]}]}, "entry 1: train.lr: write single settings"),
        ({"cells": [{"train.lr": {"a", "b"}}]}, "entry 1: train.lr: write single settings"),
        ({"cells": [{"train.lr": ITSELF}]}, "entry 1: train.lr: write single settings"),
        # 1000 x 1000 x 1000 choices and 1 seed, and 1000 of another entry.
        (
            {"cells": [dict.fromkeys(("a", "b", "c"), MANY), {"a": MANY}]},
            "grid.yaml: 1,000,001,000 runs; a sweep has at most 10,000",
        ),
        ({"cells": [{"rounds": [2, 2]}]}, "entry 1: blend rounds=2: already in entry 1"),
        (
            {"cells": [{"rounds": 2, "clients": 2}, {"clients": [3, 2], "rounds": 2}]},
            "entry 2: blend clients=2 rounds=2: already in entry 1",
        ),
    ],
)
def test_a_wrong_grid_is_one_line_that_names_the_place(tmp_path, changes, expected):
    path = write(tmp_path / "grid.yaml", {**GOOD, **changes})
    with pytest.raises(ConfigError) as caught:
        read_grid(path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", ["010", "0x10", "0b1", "1_000", "1:30"])
def test_a_seed_that_yaml_versions_read_differently_is_refused(tmp_path, seed):
    (tmp_path / "grid.yaml").write_text(f"seeds: [{seed}]\ncells:\n  - rounds: 2\n")
    with pytest.raises(ConfigError, match=f"{seed}: write numbers in plain digits"):
        read_grid(str(tmp_path / "grid.yaml"))


def test_a_cell_of_a_group_of_settings_is_a_mistake_of_usage():
    for value in ({"a": 1}, {"a"}, [{"a": 1}]):
        with pytest.raises(ConfigError, match=r"method\.gamma: write single settings with dots"):
            Cell((("method.gamma", value),), 0)


def test_other_seeds_may_not_make_too_many_runs(tmp_path):
    sweep = read_grid(write(tmp_path / "grid.yaml", {"seeds": [0], "cells": [{"rounds": [1, 2]}]}))
    with pytest.raises(ConfigError, match="--seeds: 10,002 runs; a sweep has at most 10,000"):
        narrowed(sweep, range(5001), [])


def test_cells_that_are_one_experiment_in_other_words_are_refused_by_name(tmp_path):
    # 0.9 is the schema's momentum, which quickstart leaves as it is.
    cells = [{"rounds": 2}, {"rounds": 2, "train.momentum": 0.9}]
    sweep = read_grid(write(tmp_path / "grid.yaml", {"seeds": [0, 1], "cells": cells}))
    with pytest.raises(ConfigError) as caught:
        resolve(sweep)
    same = "blend momentum=0.9: the same experiment as blend, in other words; leave one out"
    assert str(caught.value) == same


def test_every_grid_that_comes_along_can_run():
    folder = resources.files("blend_core") / "sweeps"
    found = sorted(Path(str(folder)).rglob("*.yaml"))
    assert found
    assert [path.stem for path in found] == preset_names("sweeps")
    for path in found:
        assert resolve(read_grid(path.stem))


def test_the_example_has_two_cells_with_two_seeds():
    names = labels(read_grid("example").cells)
    assert list(names.values()) == ["blend gamma=0.2"] * 2 + ["blend gamma=0.45"] * 2


def test_other_seeds_and_some_methods_of_a_grid_keep_the_settings_of_its_cells(tmp_path):
    methods = ["promptfl", "fedotp", "blend"]
    grid = {"seeds": [0, 1], "cells": [{"method.name": methods, "rounds": [2, 3]}]}
    sweep = narrowed(read_grid(write(tmp_path / "g.yaml", grid)), [5, 6, 7], ["blend", "promptfl"])
    runs = [(*dict(cell.settings).values(), cell.seed) for cell in sweep.cells]
    assert runs == [(m, r, s) for m in ("promptfl", "blend") for r in (2, 3) for s in (5, 6, 7)]
    whole = read_grid(str(tmp_path / "g.yaml"))
    assert narrowed(whole, None, []) == whole


# The command, without runs


def test_all_mistakes_are_shown_before_anything_runs(blend, tmp_path):
    cells = [{"method.gamma": [0.1, 7]}, {"method.gama": 1}, {"clients": 2}, {"backbone.name": "x"}]
    write(tmp_path / "grid.yaml", {"seeds": [0, 1], "cells": cells})
    code, out, errors = blend("sweep", "grid.yaml")
    assert (code, out) == (2, "")
    lines = errors.splitlines()
    assert len(lines) == 3  # A mistake that both seeds have is one.
    assert lines[0].startswith("error: blend gamma=7: method.gamma = 7")
    assert "method.gama: unknown key" in lines[1]
    assert "blend name=x" in lines[2]
    assert [path.name for path in tmp_path.iterdir()] == ["grid.yaml"]


def test_a_dry_run_prints_the_runs_and_starts_nothing(blend, tmp_path):
    code, out, errors = blend("sweep", "example", "--dry-run")
    assert (code, errors) == (0, "")
    assert "blend gamma=0.45, seeds 0, 1\n" in out
    assert "  method.gamma=0.45\n" in out
    assert out.endswith("4 runs over base quickstart; nothing was started\n")
    assert list(tmp_path.iterdir()) == []


def test_one_method_of_a_grid_can_be_run_alone(blend):
    code, out, _ = blend(
        "sweep", "methods-shapes", "--only", "pfedmma", "--seeds", "0", "--dry-run"
    )
    assert code == 0
    assert out.startswith("pfedmma, seeds 0\n")
    assert "  method.last_blocks=3\n" in out
    assert out.endswith("1 run over base quickstart; nothing was started\n")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--only", "fedavg"], "--only fedavg: not in this grid; its methods: blend"),
        (["--seeds", "0,x"], "--seeds 0,x: expected whole numbers from 0, e.g. 0,1,2"),
        (["--seeds", ","], "--seeds: empty list; name at least one, or leave the option out"),
    ],
)
def test_a_wrong_choice_of_runs_is_one_line(blend, tmp_path, options, expected):
    assert blend("sweep", "example", *options) == (2, "", f"error: {expected}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--out", "mine"], "not empty and no sweep's folder"),
        (["--out", "mine/file"], "file: Not a directory"),
    ],
)
def test_wrong_usage_is_one_line_and_nothing_is_touched(blend, tmp_path, options, expected):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("precious")
    code, out, errors = blend("sweep", "example", *options)
    assert (code, out) == (2, "")
    assert expected in errors
    assert len(errors.splitlines()) == 1
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == [
        "mine",
        "mine/file",
    ]


@pytest.mark.parametrize(
    "record", ["[" * 200_000, "{", "[]", '{"marker": 3}', '{"marker": ""}', '{"marker": "\\ud800"}']
)
def test_a_damaged_record_of_a_sweep_is_one_line(blend, tmp_path, record):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sweep.json").write_text(record)
    code, out, errors = blend("sweep", "example", "--out", "out")
    assert (code, out, errors.count("\n")) == (2, "", 1)
    assert "out/sweep.json: is no record of a sweep; name a new folder" in errors


def test_an_unknown_engine_is_wrong_usage(blend, tmp_path):
    code, _, errors = blend("sweep", "example", "--engine", "cloud")
    assert code == 2
    for word in ("--engine", "cloud", *Engine):
        assert word in errors
    assert list(tmp_path.iterdir()) == []


def test_cores_are_shared_out_among_the_runs(monkeypatch, tiny_experiment):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    one, three = tiny_experiment(), tiny_experiment(train={"threads": 3})
    assert _jobs([one], Engine.LOOP) == 8
    assert _jobs([one, three], Engine.LOOP) == 2
    assert _jobs([one], Engine.PROCESSES) == 4  # Its two clients compute at the same time.
    assert _jobs([tiny_experiment(train={"threads": 9})], Engine.LOOP) == 1
    assert _jobs([tiny_experiment(train={"device": "cuda"})], Engine.LOOP) == 1


# What is shown


def test_the_live_table_fits_a_terminal_and_shows_what_runs():
    cells = [
        Cell((("method.name", "a-method-with-a-long-name"), ("x.y", n)), 10) for n in range(30)
    ]
    console = Console(
        file=io.StringIO(), width=120, height=16, force_terminal=True, color_system=None
    )
    view = SweepView(console, labels(cells))
    view.started(cells[20])
    view.event(cells[20], {"event": "round", "round": 7, "of": 50})
    view.event(cells[20], {"event": "round_done", "per": 60.0, "gen": 40.0})
    view.ended(cells[3], "failed", "why", None)

    def shown() -> list[str]:
        with console.capture() as capture:
            console.print(view)
        return capture.get().splitlines()

    lines = shown()
    assert len(lines) <= 16
    assert max(map(len, lines)) <= 80
    (running,) = (line for line in lines if "running" in line and "y=20" in line)
    assert running.split()[2:8] == ["10", "running", "7/50", "60.0", "40.0", "48.0"]
    assert any("y=3 " in line and "failed" in line for line in lines)
    assert "28 waiting, 1 failed, 1 running" in lines[-1]
    with view:
        pass
    assert len([line for line in shown() if "y=" in line]) == 30


# Real runs


@dataclass
class Ran:
    """A sweep of two good cells and one that cannot work, run by the command."""

    grid: dict[str, Any]
    out: Path
    code: int
    output: str

    def sweep(self, folder: Path, **changes: Any) -> Sweep:
        return read_grid(write(folder / "grid.yaml", {**self.grid, **changes}))


@pytest.fixture(scope="module")
def ran(tower, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("sweep")
    ranks = {"vision_rank": 4, "text_rank": 4, "projection_rank": 8}
    base = {
        "rounds": 1,
        "clients": 2,
        "method": {"name": "blend", **ranks},
        "backbone": tower("tower_a").model_dump(),
        "data": {"shots": 2, "test_per_class": 1},
    }
    # No client can join within a microsecond.
    bad = {"server.formation_timeout": 1e-6}
    grid = {
        "base": write(folder / "base.yaml", base),
        "seeds": [3],
        "cells": [bad, {"method.gamma": [0.2, 0.45]}],
    }
    path, out = write(folder / "grid.yaml", grid), folder / "out"
    done = subprocess.run(
        [*BLEND, "sweep", path, "--out", out, "--jobs", "2"], capture_output=True, text=True
    )
    return Ran(grid, out, done.returncode, done.stdout)


GOOD_CELLS = [{"method.gamma": [0.2, 0.45]}]


def facts(results: dict[str, Any]) -> dict[str, Any]:
    """What may not depend on how a sweep was run."""
    private = [client["private_sha256"] for client in results["clients"]]
    return {k: results[k] for k in ("config", "final", "shared_sha256")} | {"private": private}


def test_a_failing_cell_is_listed_and_does_not_stop_the_others(ran):
    assert ran.code == 1
    lines = ran.output.splitlines()
    (failed,) = (line for line in lines if line.startswith("failed: "))
    assert failed.startswith("failed: blend formation_timeout=1e-06, seed 3: 0 of 2 clients joined")
    assert "client-00, client-01" in failed
    log = Path(failed.rpartition("log: ")[2])
    assert "error: 0 of 2 clients joined" in log.read_text()
    assert "2 done, 0 reused, 1 failed" in lines
    assert lines[-1] == f"to compare: blend compare {ran.out}"
    assert len(list(ran.out.glob("*/seed-3/results.json"))) == 2
    record = json.loads((ran.out / "sweep.json").read_text())
    assert [cell["status"] for cell in record["cells"]] == ["failed", "done", "done"]


def test_what_has_finished_is_not_run_again(ran, tmp_path):
    files = sorted(ran.out.glob("*/seed-3/results.json"))
    before = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in files]
    results = run_sweep(ran.sweep(tmp_path, cells=GOOD_CELLS), ran.out, None, quiet())
    assert [result.status for result in results.values()] == ["reused", "reused"]
    assert [(path.stat().st_ino, path.stat().st_mtime_ns) for path in files] == before
    assert sorted(result.folder for result in results.values()) == [path.parent for path in files]


def test_a_run_of_other_settings_or_version_does_not_count_as_finished(ran, tmp_path):
    sweep = ran.sweep(tmp_path, cells=[{"method.gamma": 0.2}])
    ((cell, experiment),) = resolve(sweep).items()
    results = json.loads((ran.out / cell.folder / "seed-3" / "results.json").read_text())
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert finished_results(tmp_path, experiment) == results
    assert finished_results(tmp_path, experiment.model_copy(update={"seed": 4})) is None
    (tmp_path / "results.json").write_text(json.dumps({**results, "version": f"{__version__}.1"}))
    assert finished_results(tmp_path, experiment) is None
    (tmp_path / "results.json").write_text(json.dumps(results)[:-9])
    assert finished_results(tmp_path, experiment) is None


def test_results_that_no_run_has_written_are_replaced_by_a_new_run(ran, tmp_path):
    sweep = ran.sweep(tmp_path, cells=GOOD_CELLS[:1])
    cell, experiment = next(iter(resolve(sweep).items()))
    good = json.loads((ran.out / cell.folder / "seed-3" / "results.json").read_text())
    final = good["final"]
    odd = [
        {**good, "final": "x"},
        {key: value for key, value in good.items() if key != "final"},
        {**good, "final": {}},
        {**good, "final": {**final, "hmean": "x"}},
        {**good, "final": {**final, "hmean": float("nan")}},
        {**good, "rounds": []},
        {**good, "seconds": 3},
        ["results"],
    ]
    for results in odd:
        (tmp_path / "results.json").write_text(json.dumps(results))
        assert finished_results(tmp_path, experiment) is None
    (tmp_path / "results.json").write_text("[" * 200_000)
    assert finished_results(tmp_path, experiment) is None
    (tmp_path / "results.json").write_text(json.dumps(good))
    assert finished_results(tmp_path, experiment) == good


@pytest.mark.slow
def test_a_sweep_whose_record_cannot_be_written_any_more_ends_with_its_summary(ran, tmp_path):
    ran.sweep(tmp_path, cells=[{"server.formation_timeout": [1e-6, 2e-6]}])
    out, record = tmp_path / "out", tmp_path / "out" / "sweep.json"
    command = [*BLEND, "sweep", str(tmp_path / "grid.yaml"), "--out", out, "--jobs", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert until(lambda: list(out.glob("*/seed-3.log")))
        # Like a full disk, this stops the writing, and it works for root, too.
        record.unlink()
        (record / "in-the-way").mkdir(parents=True)
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, errors) == (1, "")
    assert "0 done, 0 reused, 2 failed" in output
    failed = [line for line in output.splitlines() if line.startswith("failed: ")]
    assert len(failed) == 2
    for line in failed:
        # Before so short a deadline one of them may have joined.
        joined = "clients joined within 0 s; missing"
        none, one = f"0 of 2 {joined}: client-00, client-01;", f"1 of 2 {joined}: client-0[01];"
        assert re.search(f"{none}|{one}", line)
        assert f"{record}: cannot be written: Is a directory" in line


def test_a_disk_that_is_full_at_once_is_a_failed_sweep(ran, tmp_path):
    ran.sweep(tmp_path, cells=GOOD_CELLS)
    # The lock of a few bytes can be written, the record cannot.
    command = [*BLEND, "sweep", str(tmp_path / "grid.yaml"), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20)),
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path / 'out' / 'sweep.json'}: cannot be written")
    assert done.stderr.count("\n") == 1


def test_what_no_run_has_written_is_never_deleted(ran, tmp_path):
    out = shutil.copytree(ran.out, tmp_path / "out")
    (folder,) = out.glob("*formation*/seed-3")
    (folder / "notes.txt").write_text("precious")
    with pytest.raises(ConfigError, match=r"notes\.txt: is no part of a run"):
        run_sweep(ran.sweep(tmp_path), out, 1, quiet())
    assert (folder / "notes.txt").read_text() == "precious"
    assert (folder / "events.jsonl").exists()


def test_what_runs_write_is_known_as_theirs(ran, tmp_path):
    folders = list(ran.out.glob("*/seed-3"))
    assert len(folders) == 3
    assert [foreign_content(folder) for folder in folders] == [None, None, None]
    (tmp_path / "link").symlink_to(folders[0])
    assert foreign_content(tmp_path / "link") == str(tmp_path / "link")


def test_a_killed_sweep_goes_on_where_it_was_with_the_same_result(ran, tmp_path):
    sweep, out = ran.sweep(tmp_path, cells=GOOD_CELLS), shutil.copytree(ran.out, tmp_path / "out")
    first, second = (out / cell.folder / "seed-3" / "results.json" for cell in sweep.cells)
    before = first.stat().st_ino, json.loads(second.read_text())
    # As if it had been run with other settings: it is run again, in the same place.
    second.write_text(json.dumps({**before[1], "config": {**before[1]["config"], "rounds": 7}}))
    command = [*BLEND, "sweep", str(tmp_path / "grid.yaml"), "--out", out, "--jobs", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        assert until(lambda: not second.exists())
        with pytest.raises(ConfigError, match=f"used by process {process.pid}"):
            run_sweep(sweep, out, 1, quiet())
    finally:
        process.kill()
        process.wait(10)
    assert not second.exists()
    marker = json.loads((out / "sweep.json").read_text())["marker"]
    results = run_sweep(sweep, out, 1, quiet())
    assert [result.status for result in results.values()] == ["reused", "done"]
    assert first.stat().st_ino == before[0]
    assert relatives(marker, set()) == set()
    # One at a time and interrupted, or two at a time: the same bytes.
    assert facts(json.loads(second.read_text())) == facts(before[1])


@pytest.mark.slow
def test_a_sweep_that_is_asked_to_end_leaves_nothing_running(ran, tmp_path):
    sweep, out = ran.sweep(tmp_path, cells=GOOD_CELLS), tmp_path / "out"
    command = [*BLEND, "sweep", str(tmp_path / "grid.yaml"), "--out", out, "--jobs", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        logs = [out / cell.folder / "seed-3.log" for cell in sweep.cells]
        assert until(lambda: all(log.exists() for log in logs))
        marker = json.loads((out / "sweep.json").read_text())["marker"]
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (143, "stopped by SIGTERM\n")
    assert "the same command continues this sweep" in output
    assert relatives(marker, set()) == set()


@pytest.mark.slow
def test_a_run_that_takes_too_long_is_ended_and_failed(ran, tmp_path):
    sweep = ran.sweep(tmp_path, cells=GOOD_CELLS)
    results = run_sweep(sweep, tmp_path / "out", 1, quiet(), cell_timeout=1.0)
    assert [(result.status, result.reason) for result in results.values()] == [
        ("failed", "not finished within 1 s; it was ended")
    ] * 2
