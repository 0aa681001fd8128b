"""The ClientApp's door: what it asks of whom, for how long, and whom it turns away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, RecordDict

import client.link
from blend_core import __version__
from blend_core.messages import Reply, Request
from client.app import answer

EXPERIMENT = {"server": {"formation_timeout": 77.0, "round_timeout": 5.0}}


@pytest.fixture
def ask(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Hands a request to the ClientApp of a site; returns its reply and the seconds it had."""
    waits: list[float] = []

    def worker(site: Any, federation: str, request: Request, timeout: float) -> Reply:
        waits.append(timeout)
        return Reply(request.kind, request.round, site.name, __version__, 1)

    monkeypatch.setattr(client.link, "ask", worker)

    def hand(request: Request, change: str = "", config: Any = None) -> tuple[Reply, list[float]]:
        header, vector = request.pack()
        assert vector.size == 0
        if change:
            header = header.replace('"federation"', f'"{change}"', 1)
        message = SimpleNamespace(content=RecordDict({"message": ConfigRecord({"header": header})}))
        if config is None:
            config = {"client-name": "a", "state-dir": str(tmp_path), "data-dir": str(tmp_path)}
        return answer(message, SimpleNamespace(node_config=config, node_id=7)), waits

    return hand


@pytest.mark.parametrize("config", [{}, {"partition-id": 0, "num-partitions": 2}])
def test_a_supernode_without_a_state_folder_is_no_simulated_client(ask, config):
    """It would keep its state where the server says, and follow no policy."""
    reply, waits = ask(Request("join", "fed", 0, EXPERIMENT), config=config)
    assert (reply.client, reply.exit_code, waits) == ("node 7", 2, [])
    assert (reply.error or "").startswith("node config state-dir: missing")


@pytest.mark.parametrize(("kind", "wait"), [("join", 77.0), ("train", 5.0), ("evaluate", 5.0)])
def test_a_site_has_as_long_for_an_answer_as_the_server_waits_for_it(ask, kind, wait):
    reply, waits = ask(Request(kind, "fed", 1, EXPERIMENT))
    assert (reply.client, reply.error) == ("a", None)
    assert waits == [wait]


def test_a_server_of_another_version_is_told_both_before_anything_is_tried(ask):
    # Its settings may be others, too.
    reply, waits = ask(Request("join", "fed", 0, {}, version="9.9"))
    assert waits == []
    assert (reply.client, reply.version, reply.exit_code) == ("a", __version__, 2)
    assert reply.error == (
        f"this site runs version {__version__}, the server 9.9; install the same one at both"
    )


def test_a_request_with_other_fields_names_the_version_that_made_it(ask):
    reply, waits = ask(Request("join", "fed", 0, {}, version="9.9"), change="alliance")
    assert waits == []
    assert reply.client == "a"
    assert f"not those of version {__version__}; its sender runs 9.9" in (reply.error or "")
