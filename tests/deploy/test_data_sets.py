"""A data set of the papers from its files to results, in every engine and by its manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from imitations import write_coop, write_domains

from blend_core.report.results_file import read_results
from deploy.loop import run_loop
from deploy.processes import run_processes
from deploy.simulation import run_simulation


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_coop(folder, "dtd", images=True)
    write_domains(folder, "office_caltech10", images=True)
    return folder


def settings(root: Path, kind: str = "dtd", **data: Any) -> dict[str, Any]:
    quick = {"shots": 1 if kind == "dtd" else 0, "max_test_per_class": 1, "test_per_class": 10}
    return {"kind": kind, "root": str(root), **quick, **data}


def results(out: Path) -> dict[str, Any]:
    read_results(out / "results.json")  # strict
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


@pytest.mark.parametrize(
    "engine", [run_processes, pytest.param(run_simulation, marks=pytest.mark.slow)]
)
def test_every_engine_gives_the_same_bytes_on_the_same_manifest(
    root, tmp_path, tiny_experiment, engine
):
    experiment = tiny_experiment(rounds=1, data=settings(root))
    engines = {"loop": run_loop, "other": engine}
    for name, engine in engines.items():
        engine(experiment, tmp_path / name, f"fed-{name}")
    loop, *others = (results(tmp_path / name) for name in engines)
    for other in others:
        for key in ("shared_sha256", "manifest_sha256", "final", "zero_shot"):
            assert other[key] == loop[key]
        assert [c["private_sha256"] for c in other["clients"]] == [
            c["private_sha256"] for c in loop["clients"]
        ]
    assert loop["dataset"] == "dtd"
    assert not loop["comparable"]
    assert "at most 1 test image per class" in loop["note"]
    # One of 24 base and of 23 new classes each: Base counts all of them at every client.
    counts = loop["final"]["counts"]["client-00"]
    assert (counts["base"][1], counts["novel"][1]) == (24, 23)
    assert 0 < counts["local"][1] < 24


def test_domains_reach_the_results_and_the_table(blend, root, tmp_path):
    keys = settings(root, "office_caltech10")
    chosen = [x for k, v in keys.items() for x in ("--set", f"data.{k}={v}")]
    run = ("run", "--engine", "loop", "--set", "clients=4", "--set", "rounds=1", "--out", "run")
    less = ("--set", "train.local_steps=1")
    code, output, errors = blend(*run, *less, *chosen)
    assert (code, errors) == (0, "")
    found = results(tmp_path / "run")
    assert [c["domain"] for c in found["clients"]] == ["amazon", "caltech", "dslr", "webcam"]
    assert list(found["final"]["domains"]) == ["amazon", "caltech", "dslr", "webcam"]
    assert "webcam" in output
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["rule"] == "domain-dirichlet"
    assert manifest["dataset"] == "office_caltech10"


def test_a_missing_folder_or_image_is_said_before_anything_is_written(blend, root, tmp_path):
    less = ("--set", "clients=2", "--engine", "loop", "--out", "run")
    code, _, errors = blend("run", "--set", "data.kind=eurosat", *less)
    assert (code, errors.count("\n")) == (2, 1)
    assert "data.kind = eurosat needs data.root" in errors
    chosen = ("--set", "data.kind=eurosat", "--set", f"data.root={root}")
    code, _, errors = blend("run", *chosen, *less)
    assert (code, errors.count("\n")) == (3, 1)
    assert f"no folder {root / 'eurosat'}" in errors
    assert not (tmp_path / "run").exists()


def test_a_partition_is_shown_and_written_and_the_run_that_uses_it_has_its_hash(
    blend, root, tmp_path
):
    chosen = ("--set", "data.kind=dtd", "--set", f"data.root={root}", "--set", "clients=3")
    code, output, _ = blend("data", "partition", *chosen, "--out", "part")
    assert code == 0
    assert max(map(len, output.splitlines()[1:8])) <= 80
    assert "3 clients, 384 training images" in output
    assert (tmp_path / "part" / "partition.png").read_bytes().startswith(b"\x89PNG")
    said = next(line for line in output.splitlines() if line.startswith("manifest "))
    code, _, errors = blend("data", "partition", *chosen, "--out", "part")
    assert code == 2
    assert "has a manifest.json already" in errors
    # Another seed deals otherwise, unless the manifest decides.
    other = (*chosen, "--set", "seed=9")
    _, dealt, _ = blend("data", "partition", *other)
    assert said not in dealt
    _, read, _ = blend("data", "partition", *other, "--set", "data.manifest=part/manifest.json")
    assert said in read


def test_shapes_have_a_partition_to_look_at_folders_have_none(blend):
    code, output, _ = blend("data", "partition")
    assert code == 0
    assert "shapes, base classes, 16 shots; dirichlet-preferred" in output
    code, _, errors = blend("data", "partition", "--set", "data.kind=folders")
    assert code == 2
    assert "every site has its own images" in errors


def test_a_split_is_made_on_request(blend, tmp_path):
    for name in ("River", "Forest"):
        (tmp_path / "eurosat" / "2750" / name).mkdir(parents=True)
        for number in range(5):
            (tmp_path / "eurosat" / "2750" / name / f"{number}.jpg").touch()
    code, output, _ = blend("data", "make-split", "eurosat", "--root", ".", "--seed", "4")
    assert code == 0
    assert "made with seed 4" in output
    assert (tmp_path / "eurosat" / "split_zhou_EuroSAT.json").is_file()
    code, _, errors = blend("data", "make-split", "eurosat", "--root", ".")
    assert code == 2
    assert "exists already" in errors
