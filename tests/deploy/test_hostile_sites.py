"""A hostile site among real processes: refused by name, the others go on with the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.loop import run_loop
from deploy.processes import run_processes
from deploy.simulation import run_simulation

HOSTILE = """
import numpy as np
from client.node import Node

def spoilt(self, request, train=Node.train):
    reply = train(self, request)
    if self.site.name == "client-01":
        for name in reply.shared:
            reply.shared[name] = np.full_like(reply.shared[name], np.nan)
    if self.site.name == "client-02":
        for name, value in reply.shared.items():
            reply.shared[name] = request.shared[name] + 1000 * (value - request.shared[name])
    return reply
"""

# Python runs it at the start of every process; only those that compute for a site take part.
AT_START = f"""
import sys
if any(word.endswith(("client.worker", "default_worker.py")) for word in sys.orig_argv):
{HOSTILE.replace(chr(10), chr(10) + "    ")}
    Node.train = spoilt
"""


def outcome(out: Path) -> tuple[str, dict[str, Any]]:
    found = json.loads((out / "results.json").read_text())
    return found["shared_sha256"], found["refusals"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", [run_processes, run_simulation])
def test_a_site_that_sends_rubbish_is_refused_in_every_round(
    engine, tiny_experiment, tmp_path, monkeypatch
):
    server = {"max_change": 1e6, "max_change_ratio": 10.0}
    experiment = tiny_experiment(clients=5, server=server)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(AT_START)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path / "site"))
        engine(experiment, tmp_path / "run", "fed")
    shared, refusals = outcome(tmp_path / "run")
    assert sorted(refusals) == ["client-01", "client-02"]
    for client, reason in (("client-01", "not finite"), ("client-02", "server.max_change_ratio")):
        assert refusals[client]["refused"] == [1, 2]
        assert all(reason in told for told in refusals[client]["reasons"])
    scope: dict[str, Any] = {}
    exec(HOSTILE, scope)
    monkeypatch.setattr(scope["Node"], "train", scope["spoilt"])
    run_loop(experiment, tmp_path / "loop", "fed")
    assert outcome(tmp_path / "loop")[0] == shared
