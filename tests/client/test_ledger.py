"""The site's own record of what left it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from blend_core.backbone import Backbone
from blend_core.errors import SiteError
from blend_core.messages import Reply, Request
from blend_core.methods import build_method
from blend_core.methods.base import snapshot
from blend_core.state import tensors_sha256
from client.ledger import LEDGER, Ledger, disagreements, read_ledger
from client.node import Node
from client.site import Site


@pytest.fixture
def setting(tiny_experiment, tower, tmp_path):
    """(experiment, its initial shared tensors, function that makes a node, the ledger's path)."""
    experiment = tiny_experiment(backbone=tower("tower_a").model_dump(), rounds=20)
    described = Backbone.describe(experiment.backbone)
    shared = snapshot(build_method(experiment.method, described, experiment.seed).shared())
    site = Site("client-00", tmp_path / "state", partition=0, verbose_errors=True)
    return experiment, shared, lambda: Node(site, "fed"), site.folder("fed") / LEDGER


def ask(experiment, shared, kind="train", round=1, **fields) -> Request:
    return Request(kind, "fed", round, experiment.to_json(), shared=shared, **fields)


def one(value: float = 1.0, round: int = 1, experiment: str = "a") -> tuple[Request, Reply]:
    """A request and its answer: two tensors of 3 values, 2 * 3 * 4 + 128 = 152 bytes."""
    request = Request("train", "fed", round, {"method": {"name": "blend"}, "id": experiment})
    tensors = {n: np.full(3, value, dtype=np.float32) for n in ("b", "a")}
    statistics = {"counts": {"base": [1, 2], "local": [1, 1]}, "training": {}}
    return request, Reply("train", round, "north", "1", 7, statistics, shared=tensors)


def test_an_entry_says_what_the_reply_holds(tmp_path):
    ledger = Ledger(tmp_path / "fed" / "north", "fed")
    request, reply = one()
    ledger.append(request, reply)
    (entry,), problems = read_ledger(ledger.path)
    assert problems == []
    assert entry.time.endswith("+00:00")
    assert entry.model_dump(exclude={"time"}) == {
        "federation": "fed",
        "client": "north",
        "kind": "train",
        "round": 1,
        "method": "blend",
        "experiment": hashlib.sha256(b'{"id": "a", "method": {"name": "blend"}}').hexdigest(),
        "train_images": 7,
        "tensors": ("a", "b"),
        "tensor_bytes": 152,
        "sha256": tensors_sha256(reply.shared),
        "header_bytes": len(reply.pack()[0]),
        "statistics": ("counts.base", "counts.local", "training"),
        "error": None,
    }
    assert ledger.path.stat().st_mode & 0o777 == 0o600


def test_every_answer_of_a_node_is_written_down_before_it_leaves(setting):
    experiment, shared, node, path = setting
    subject, replies = node(), []
    requests = [
        ask(experiment, shared, "join", 0),
        ask(experiment, shared),
        ask(experiment, shared, "evaluate", 2, last_round=1),
        ask(experiment, shared, round=9, last_round=8),
    ]
    for request in requests:
        replies.append(subject.handle(request))
        entries, problems = read_ledger(path)
        assert (len(entries), problems) == (len(replies), [])
    for entry, reply in zip(entries, replies, strict=True):
        assert (entry.kind, entry.round, entry.error) == (reply.kind, reply.round, reply.error)
        assert entry.tensors == tuple(sorted(reply.shared))
        assert entry.sha256 == tensors_sha256(reply.shared)
        assert entry.header_bytes == len(reply.pack()[0])
    assert entries[1].tensors == tuple(sorted(shared))
    assert {"training.loss", "private_sha256"} <= set(entries[1].statistics)
    assert "private state of round 8 is missing" in (entries[3].error or "")


def test_a_round_done_again_appears_again_with_the_same_hash(setting):
    experiment, shared, node, path = setting
    for _ in range(2):  # In another process the second time.
        assert node().handle(ask(experiment, shared)).error is None
    first, second = read_ledger(path)[0]
    assert first.sha256 == second.sha256
    assert disagreements([first, second]) == []
    other = {name: value + 1 for name, value in shared.items()}
    node().handle(ask(experiment, other))
    assert disagreements(read_ledger(path)[0]) == [
        "fed, client-00: train of round 1 was answered 3 times with 2 different contents; "
        "the server had not changed the experiment"
    ]


def test_another_experiment_is_told_as_the_reason(tmp_path):
    ledger = Ledger(tmp_path, "fed")
    for round, value, experiment in ((1, 1.0, "a"), (2, 2.0, "a"), (2, 3.0, "b")):
        ledger.append(*one(value, round, experiment))
    (line,) = disagreements(read_ledger(ledger.path)[0])
    assert "round 2 was answered 2 times with 2 different contents; between them the" in line


@pytest.mark.parametrize("obstacle", ["a full disk", "a folder in its place"])
def test_what_cannot_be_written_down_does_not_leave(setting, obstacle, caplog):
    experiment, shared, node, path = setting
    path.parent.mkdir(parents=True)
    if obstacle == "a full disk":
        path.symlink_to("/dev/full")
    else:
        path.mkdir()
    reply = node().handle(ask(experiment, shared))
    assert (reply.exit_code, reply.shared, reply.statistics) == (3, {}, {})
    assert f"{path}: cannot be written: " in (reply.error or "")
    # Nothing is lost: as soon as there is room the same round gives the same answer.
    path.unlink() if path.is_symlink() else path.rmdir()
    again = node().handle(ask(experiment, shared))
    assert again.error is None
    assert len(again.shared) == len(shared)


def test_half_a_line_is_reported_left_out_and_spoils_no_other(tmp_path):
    ledger = Ledger(tmp_path, "fed")
    ledger.append(*one(1.0))
    first = ledger.path.read_bytes()
    ledger.append(*one(2.0, 2))
    whole = ledger.path.read_bytes()
    for cut in range(len(first) + 1, len(whole) - 1, 60):
        ledger.path.write_bytes(whole[:cut])
        entries, problems = read_ledger(ledger.path)
        assert [entry.round for entry in entries] == [1]
        assert problems == [f"{ledger.path}: line 2 is cut short or damaged, and left out"]
        ledger.append(*one(3.0, 3))
        entries, problems = read_ledger(ledger.path)
        assert [entry.round for entry in entries] == [1, 3]
        assert len(problems) == 1


def test_a_flipped_bit_is_noticed(tmp_path):
    ledger = Ledger(tmp_path, "fed")
    ledger.append(*one())
    whole = ledger.path.read_bytes()
    for place in range(0, len(whole) - 1, 7):
        data = bytearray(whole)
        data[place] ^= 1
        ledger.path.write_bytes(bytes(data))
        assert read_ledger(ledger.path)[0] == [], place


def test_a_disk_that_fills_in_the_middle_of_a_line_leaves_no_half_line(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path, "fed")
    ledger.append(*one())
    before, write = ledger.path.read_bytes(), os.write
    written: list[int] = []

    def filling(descriptor: int, data: bytes) -> int:
        if written:
            raise OSError(28, "No space left on device")
        written.append(write(descriptor, data[:100]))
        return 100

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", filling)
        with pytest.raises(SiteError, match="nothing leaves the site unrecorded: make room"):
            ledger.append(*one(2.0, 2))
    assert written == [100]
    assert ledger.path.read_bytes() == before


def test_an_answer_costs_one_fsync(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path, "fed")
    ledger.append(*one())
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda d: (synced.append(d), fsync(d)))
    ledger.append(*one(2.0, 2))
    assert len(synced) == 1


def test_a_process_killed_while_it_writes_leaves_a_ledger_that_goes_on(tmp_path):
    program = f"""
import sys
from pathlib import Path
from blend_core.messages import Reply, Request
from client.ledger import Ledger
ledger = Ledger(Path({str(tmp_path)!r}), "fed")
for round in range(1, 1_000_000):
    ledger.append(Request("join", "fed", round, {{}}), Reply("join", round, "north"))
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    path, deadline = tmp_path / LEDGER, time.monotonic() + 60
    while not (path.exists() and path.stat().st_size > 5000):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    entries, problems = read_ledger(path)
    assert [entry.round for entry in entries] == list(range(1, len(entries) + 1))
    assert len(problems) <= 1
    Ledger(tmp_path, "fed").append(*one())
    assert len(read_ledger(path)[0]) == len(entries) + 1
    assert all(json.loads(line) for line in path.read_text().splitlines()[: len(entries)])
