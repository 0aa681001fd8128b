"""What a run leaves behind: rows per (round, client), metrics, hashes, bytes, seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from blend_core import __version__
from blend_core.config import Experiment
from blend_core.messages import Reply, Request, Tensors, payload_bytes
from blend_core.metrics import federation_metrics
from blend_core.state import tensors_sha256, write_json_atomic

RESULTS = "results.json"
SHAPES_NOTE = "rendered shapes, tiny model: not comparable with the papers' numbers"

Span = tuple[float, float]


class Record:
    """Collects the facts of a run while it goes on."""

    def __init__(self, experiment: Experiment, engine: str, started: float) -> None:
        self.experiment = experiment
        self.engine = engine
        self.started = started
        self.zero_shot: dict[str, Any] = {}
        self.final: dict[str, Any] = {}
        self.rounds: list[dict[str, Any]] = []
        self.private_sha256: dict[str, str] = {}
        self.workers: dict[str, dict[int, int]] = {}
        self.not_evaluated: dict[str, str] = {}
        self.seconds = {"start_up": 0.0, "training": 0.0, "evaluation": 0.0}

    def formed(self, members: Mapping[str, Reply]) -> None:
        """All clients have joined; their replies hold the zero-shot counts."""
        now = time.time()
        self.zero_shot = _summary({c: r.statistics["counts"] for c, r in members.items()})
        evaluating = _covered(_spans(members.values(), "evaluate_span"), (self.started, now))
        self.seconds["evaluation"] += evaluating
        self.seconds["start_up"] = now - self.started - evaluating
        for client, reply in members.items():
            self._worker(client, reply)

    def row(
        self, client: str, reply: Reply | None, request: Request, reason: str | None
    ) -> dict[str, Any]:
        """One (round, client) row; status "accepted", "refused" or "absent" with the reason."""
        statistics = reply.statistics if reply else {}
        if reply and reason is None:
            self._worker(client, reply)
            self.private_sha256[client] = str(statistics.get("private_sha256"))
        return {
            "status": "absent" if reply is None else "refused" if reason else "accepted",
            "reason": reason,
            "train_images": reply.train_images if reply else 0,
            "training": statistics.get("training"),
            "counts": statistics.get("counts"),
            "bytes_up": payload_bytes(reply.shared) if reply else 0,
            "bytes_down": payload_bytes(request.shared),
            "header_bytes_up": len(reply.pack()[0].encode()) if reply else 0,
            "header_bytes_down": len(request.pack()[0].encode()),
            "train_span": statistics.get("train_span"),
            "evaluate_span": statistics.get("evaluate_span"),
            "private_sha256": statistics.get("private_sha256"),
        }

    def round_done(self, round: int, start: float, rows: Mapping[str, dict[str, Any]]) -> None:
        """A round was aggregated."""
        window = (start, time.time())
        training = _spans(rows.values(), "train_span")
        busy = training + _spans(rows.values(), "evaluate_span")
        trained = _covered(training, window)
        self.seconds["training"] += trained
        self.seconds["evaluation"] += _covered(busy, window) - trained
        ordered = [{"client": client, **rows[client]} for client in sorted(rows)]
        self.rounds.append({"round": round, "seconds": window[1] - start, "clients": ordered})

    def evaluated(
        self, start: float, replies: Mapping[str, Reply], problems: Mapping[str, str]
    ) -> None:
        """The last evaluation is in."""
        self.final = _summary({c: r.statistics["counts"] for c, r in replies.items()})
        self.not_evaluated = dict(problems)
        spans = _spans(replies.values(), "evaluate_span")
        self.seconds["evaluation"] += _covered(spans, (start, time.time()))
        for client, reply in replies.items():
            self._worker(client, reply)
            self.private_sha256[client] = str(reply.statistics.get("private_sha256"))

    def _worker(self, client: str, reply: Reply) -> None:
        worker = reply.statistics.get("worker")
        if isinstance(worker, dict) and isinstance(worker.get("backbone_loads"), int):
            self.workers.setdefault(client, {})[worker.get("pid", 0)] = worker["backbone_loads"]


def write_results(out: Path, record: Record, shared: Tensors, members: Mapping[str, Reply]) -> Path:
    """Write `out/results.json` durably and return its path."""
    total = time.time() - record.started
    seconds = {"total": total, **record.seconds}
    seconds["waiting"] = total - sum(record.seconds.values())
    last = record.rounds[-1]["clients"] if record.rounds else []
    without = [c for c, r in record.final["counts"].items() if r["base"][1] == 0]
    results = {
        "method": record.experiment.method.name,
        "engine": record.engine,
        "seed": record.experiment.seed,
        "version": __version__,
        "note": SHAPES_NOTE if record.experiment.data.kind == "shapes" else None,
        "config": record.experiment.to_json(),
        "zero_shot": record.zero_shot,
        "final": record.final,
        "shared_sha256": tensors_sha256(shared),
        "clients": [
            {
                "name": client,
                "train_images": members[client].train_images,
                "private_sha256": record.private_sha256.get(client),
                "backbone_loads": sum(record.workers.get(client, {}).values()),
                "workers": len(record.workers.get(client, {})),
            }
            for client in sorted(members)
        ],
        "clients_without_test": without,
        "clients_not_evaluated": record.not_evaluated,
        "bytes_per_round": {
            "up": {row["client"]: row["bytes_up"] for row in last},
            "down": {row["client"]: row["bytes_down"] for row in last},
        },
        "rounds": record.rounds,
        "seconds": seconds,
    }
    path = out / RESULTS
    write_json_atomic(path, results)
    return path


def _summary(counts: Mapping[str, Mapping[str, list[int]]]) -> dict[str, Any]:
    return {**federation_metrics(counts), "counts": {c: counts[c] for c in sorted(counts)}}


def _spans(sources: Iterable[Reply | Mapping[str, Any]], key: str) -> list[Span]:
    facts = (s.statistics if isinstance(s, Reply) else s for s in sources)
    return [(f[key][0], f[key][1]) for f in facts if f.get(key)]


def _covered(spans: Iterable[Span], window: Span) -> float:
    """Seconds of the window in which at least one span runs (clients work at the same time)."""
    covered, reached = 0.0, window[0]
    for start, end in sorted(spans):
        start, end = max(start, reached), min(end, window[1])
        if end > start:
            covered += end - start
            reached = end
    return covered
