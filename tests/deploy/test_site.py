"""`blend site ledger`, and a site's policy in a federation of real processes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from blend_core.errors import ConfigError
from blend_core.messages import Reply, Request
from client.ledger import Ledger
from deploy import processes
from deploy.node_config import node_config


def write(state: Path, client: str, *answers: tuple[int, float], federation: str = "fed") -> Path:
    """A ledger: (round, value of both tensors) each; bytes of an answer 2 * 3 * 4 + 128 = 152."""
    ledger = Ledger(state / federation / client, federation)
    for round, value in answers:
        request = Request("train", federation, round, {"method": {"name": "blend"}})
        shared = {f"vision.{n}.up": np.full(3, value, dtype=np.float32) for n in (1, 2)}
        statistics = {"training": {"loss": 1.5}}
        ledger.append(request, Reply("train", round, client, "1", 7, statistics, shared=shared))
    return ledger.path


def rows(output: str) -> list[list[str]]:
    lines = [line for line in output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_what_left_is_shown_per_round_with_totals(blend, tmp_path):
    write(tmp_path, "north", (1, 1.0), (2, 2.0), (2, 2.0))
    write(tmp_path, "south", (1, 3.0))
    code, output, error = blend("site", "ledger", tmp_path)
    assert (code, error) == (0, "")
    found = [row[:5] for row in rows(output)]
    assert found == [
        ["1", "train", "1", "2", "152"],
        ["2", "train", "2", "2", "304"],
        ["1", "train", "1", "2", "152"],
    ]
    assert "north in fed, blend" in output
    assert "tensors: vision.*.up (2)" in output
    assert "statistics: training.loss" in output
    assert "answers: 3, from 2" in output
    assert "bytes: 456 of tensors, " in output


def test_a_round_done_again_with_other_contents_is_named_and_ends_with_1(blend, tmp_path):
    write(tmp_path, "north", (1, 1.0), (2, 2.0), (2, 2.5))
    code, output, error = blend("site", "ledger", tmp_path)
    assert code == 1
    assert "fed, north: train of round 2 was answered 2 times with 2 different contents" in error
    assert [row[6].endswith("differs") for row in rows(output)] == [False, True, True]


def test_one_federation_and_one_client_can_be_chosen(blend, tmp_path):
    write(tmp_path, "north", (1, 1.0))
    write(tmp_path, "south", (1, 2.0), (2, 2.0))
    write(tmp_path, "south", (1, 3.0), federation="other")
    chosen = ("--federation", "fed", "--client", "south", "--json")
    code, output, _ = blend("site", "ledger", tmp_path, *chosen)
    found = json.loads(output)
    assert code == 0
    assert [(e["client"], e["round"], e["tensor_bytes"]) for e in found["entries"]] == [
        ("south", 1, 152),
        ("south", 2, 152),
    ]
    assert found["entries"][0]["tensors"] == ["vision.1.up", "vision.2.up"]
    assert (found["left_out"], found["disagreements"]) == ([], [])
    code, _, error = blend("site", "ledger", tmp_path, "--federation", "third")
    assert code == 2
    assert "no ledger.jsonl with an answer of that federation and client is below it" in error


def test_half_a_line_is_a_warning(blend, tmp_path):
    path = write(tmp_path, "north", (1, 1.0), (2, 2.0))
    path.write_bytes(path.read_bytes()[:-30])
    code, output, _ = blend("site", "ledger", tmp_path)
    assert code == 0
    assert f"warning: {path}: line 2 is cut short or damaged, and left out" in output
    assert len(rows(output)) == 1


def test_an_empty_ledger_is_a_warning(blend, tmp_path):
    write(tmp_path, "north", (1, 1.0))
    path = write(tmp_path, "south", (1, 1.0))
    path.write_bytes(b"")
    code, output, _ = blend("site", "ledger", tmp_path)
    assert (code, len(rows(output))) == (0, 1)
    assert f"warning: {path}: is empty" in output


def test_a_folder_without_a_ledger_is_named(blend, tmp_path):
    code, _, error = blend("site", "ledger", tmp_path / "none")
    assert code == 2
    assert error.startswith(f"error: {tmp_path / 'none'}: no ledger.jsonl")


@pytest.mark.slow
def test_a_site_of_a_real_federation_refuses_by_its_policy_and_writes_that_down(
    blend, tiny_experiment, tower, tmp_path, monkeypatch
):
    experiment = tiny_experiment(backbone=tower("tower_a").model_dump())
    policy = tmp_path / "policy.yaml"
    policy.write_text("max_rounds: 1\n")
    made = processes.node_configs

    def with_policy(*arguments):
        configs = made(*arguments)
        configs["client-01"] += " " + node_config({"policy": str(policy)})
        return configs

    monkeypatch.setattr(processes, "node_configs", with_policy)
    (tmp_path / "run").mkdir()
    told = "the site's policy refuses rounds = 2 (max_rounds: 1)"
    with pytest.raises(ConfigError) as caught:
        processes.run_processes(experiment, tmp_path / "run", "fed")
    assert str(caught.value) == f"client-01: {told}"
    _, output, _ = blend("site", "ledger", tmp_path / "run" / "state" / "client-01", "--json")
    (entry,) = json.loads(output)["entries"]
    assert (entry["kind"], entry["error"], entry["tensors"]) == ("join", told, [])
