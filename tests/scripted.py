"""Clients of a coordinator that are functions, for tests of the server alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from blend_core import __version__
from blend_core.messages import Reply, Request

Client = Callable[[str, Request], Reply | None]


class Scripted:
    """A transport whose clients are functions; None means no reply in time."""

    def __init__(self, clients: Mapping[str, Client], reverse: bool = False) -> None:
        self.clients = clients
        self.reverse = reverse
        self.asked: list[tuple[int, list[str]]] = []

    def join(self, request: Request, timeout: float) -> Iterator[Reply]:
        for name, client in self.clients.items():
            reply = client(name, request)
            if reply is not None:
                yield reply

    def ask(self, requests: Mapping[str, Request], timeout: float) -> Iterator[tuple[str, Reply]]:
        round = next(iter(requests.values())).round
        self.asked.append((round, sorted(requests)))
        for name in sorted(requests, reverse=self.reverse):
            reply = self.clients[name](name, requests[name])
            if reply is not None:
                yield name, reply


def honest(images: int) -> Client:
    """A client that adds its number of images to every shared value."""

    def client(name: str, request: Request) -> Reply:
        counts = {"local": [images, 10], "base": [images, 20], "novel": [1, 20]}
        shared = {k: v + np.float32(images) for k, v in request.shared.items()}
        return Reply(
            request.kind,
            request.round,
            name,
            __version__,
            images,
            {"counts": counts, "private_sha256": f"hash of {name}"},
            shared=shared if request.kind == "train" else {},
        )

    return client


def events(out: Path) -> list[dict[str, Any]]:
    """The run's journal."""
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
