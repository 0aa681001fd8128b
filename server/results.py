"""What a run leaves behind: rows per (round, client), metrics, hashes, bytes, seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blend_core import __version__
from blend_core.config import DATASET_KINDS, Experiment
from blend_core.data.manifest import Manifest
from blend_core.data.records import OWN_SPLIT
from blend_core.messages import Reply, Request, Tensors, header_of, tensor_bytes
from blend_core.metrics import (
    best_on_test,
    federation_metrics,
    mean_of_last,
    zero_shot_as_published,
)
from blend_core.report.runs import RESULTS
from blend_core.state import tensors_sha256, write_json_atomic
from blend_core.weights import TINY
from server.budget import Budget

SHAPES_NOTE = "rendered shapes, tiny model: not comparable with the papers' numbers"

Span = tuple[float, float]


@dataclass(frozen=True)
class Problem:
    """Why a client's reply did not count.

    Attributes:
        status: "refused" or "absent".
        reason: one line.
        exit_code: of the site's own error, else 1.
    """

    status: str
    reason: str
    exit_code: int = 1


class Record:
    """Collects the facts of a run while it goes on."""

    def __init__(self, experiment: Experiment, engine: str, started: float) -> None:
        self.experiment = experiment
        # Numbers of values: what is shared, what is private, what of both is trained.
        self.parameters: dict[str, int] = {}
        self.engine = engine
        self.started = started
        self.zero_shot: dict[str, Any] = {}
        self.final: dict[str, Any] = {}
        self.rounds: list[dict[str, Any]] = []
        # What all clients did after so many rounds; of evaluations that covered every client.
        self.evaluations: dict[int, dict[str, Any]] = {}
        self.members: dict[str, Reply] = {}
        self.private_sha256: dict[str, str | None] = {}
        self.workers: dict[str, dict[int, int]] = {}
        self.not_evaluated: dict[str, str] = {}
        self.seconds = {"start_up": 0.0, "training": 0.0, "evaluation": 0.0}
        # Of a run that was resumed: rounds after which, and the seconds of what was before.
        self.resumed_after: list[int] = []
        self.before = 0.0
        # Clients that went on without the private state of their last round that counted.
        self.cold_starts: list[dict[str, Any]] = []
        # Nodes that were not let in, and after how many rounds they came.
        self.refused_nodes: list[dict[str, Any]] = []
        self.budget = Budget(experiment)

    def state(self) -> dict[str, Any]:
        """What a resumed run must know of the rounds so far, as JSON data."""
        return {
            "rounds": self.rounds,
            "evaluations": {str(after): metrics for after, metrics in self.evaluations.items()},
            "workers": {
                client: {str(pid): loads for pid, loads in found.items()}
                for client, found in self.workers.items()
            },
            "seconds": {**self.seconds, "total": self.total()},
            "resumed_after": self.resumed_after,
            "cold_starts": self.cold_starts,
            "refused_nodes": self.refused_nodes,
            "budget": self.budget.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` said."""
        self.rounds = list(state["rounds"])
        self.evaluations = {int(after): metrics for after, metrics in state["evaluations"].items()}
        self.workers = {
            client: {int(pid): loads for pid, loads in found.items()}
            for client, found in state["workers"].items()
        }
        self.seconds = {key: state["seconds"][key] for key in self.seconds}
        self.before = state["seconds"]["total"]
        self.resumed_after = list(state["resumed_after"])
        self.cold_starts = list(state["cold_starts"])
        self.refused_nodes = list(state["refused_nodes"])
        self.budget.restore(state["budget"])

    def total(self) -> float:
        """Seconds of the run; of a resumed one without those after its last checkpoint."""
        return self.before + time.time() - self.started

    def formed(self, members: Mapping[str, Reply]) -> None:
        """All clients have joined; their replies hold the zero-shot counts."""
        now = time.time()
        self.members = dict(members)
        counts = {client: reply.statistics["counts"] for client, reply in members.items()}
        self.zero_shot = _summary(counts)
        published = zero_shot_as_published(counts)
        # Only papers with new classes print it like that; nobody has published sites' own images.
        if self.experiment.data.kind != "folders" and published["gen"] is not None:
            self.zero_shot["as_published"] = published
        evaluating = _covered(_spans(members.values(), "evaluate_span"), (self.started, now))
        self.seconds["evaluation"] += evaluating
        self.seconds["start_up"] += now - self.started - evaluating
        for client, reply in members.items():
            self._worker(client, reply)

    def asked(self, client: str, round: int) -> bool:
        """Whether a client was asked to train in a round that is done."""
        rows = (row for done in self.rounds if done["round"] == round for row in done["clients"])
        return any(row["client"] == client for row in rows)

    def round_done(
        self,
        round: int,
        start: float,
        requests: Mapping[str, Request],
        replies: Mapping[str, Reply],
        problems: Mapping[str, Problem],
    ) -> dict[str, Any]:
        """A round was aggregated: keep a row per client that was asked.

        Args:
            round: its number.
            start: unix time at which it began.
            requests: client -> what it was asked.
            replies: client -> its accepted reply.
            problems: client -> why there is none.

        Returns:
            The metrics of the model that was sent out; None where nothing was evaluated.
        """
        window = (start, time.time())
        training = _spans(replies.values(), "train_span")
        trained = _covered(training, window)
        busy = training + _spans(replies.values(), "evaluate_span")
        self.seconds["training"] += trained
        self.seconds["evaluation"] += _covered(busy, window) - trained
        rows = []
        for client, request in sorted(requests.items()):
            row = {
                "client": client,
                "status": "accepted",
                "reason": None,
                "bytes_down": tensor_bytes(request.tensors),
                "header_bytes_down": len(header_of(request).encode()),
            }
            if client in replies:
                row |= self._accepted(client, replies[client])
            else:
                row |= {"status": problems[client].status, "reason": problems[client].reason}
            rows.append(row)
        self.rounds.append({"round": round, "seconds": window[1] - start, "clients": rows})
        self.budget.spend(requests)
        counts = {c: r.statistics["counts"] for c, r in replies.items() if "counts" in r.statistics}
        metrics = federation_metrics(counts)
        self._keep(round - 1, counts, metrics)
        return metrics

    def _keep(self, rounds: int, counts: Mapping[str, Any], metrics: dict[str, Any]) -> None:
        """Keep an evaluation of all clients, except of what no round has trained yet."""
        if rounds > 0 and set(counts) == set(self.members):
            self.evaluations[rounds] = metrics

    def _accepted(self, client: str, reply: Reply) -> dict[str, Any]:
        self._worker(client, reply)
        self.private_sha256[client] = reply.statistics.get("private_sha256")
        wanted = ("training", "counts", "train_span", "evaluate_span", "private_sha256")
        return {
            "train_images": reply.train_images,
            "bytes_up": tensor_bytes(reply.shared),
            "header_bytes_up": len(header_of(reply).encode()),
            **{key: reply.statistics.get(key) for key in wanted},
        }

    def evaluated(
        self, start: float, replies: Mapping[str, Reply], problems: Mapping[str, Problem]
    ) -> None:
        """The last evaluation is in."""
        counts = {client: reply.statistics["counts"] for client, reply in replies.items()}
        summary = _summary(counts)
        self._keep(len(self.rounds), counts, summary)
        self.final = {
            **summary,
            "model_after_round": len(self.rounds),
            "mean_last_five": mean_of_last(self.evaluations),
            "domains": _by_domain(counts, self.members),
        }
        self.not_evaluated = {client: problem.reason for client, problem in problems.items()}
        spans = _spans(replies.values(), "evaluate_span")
        self.seconds["evaluation"] += _covered(spans, (start, time.time()))
        for client, reply in replies.items():
            self._worker(client, reply)
            self.private_sha256[client] = reply.statistics.get("private_sha256")

    def _worker(self, client: str, reply: Reply) -> None:
        worker = reply.statistics.get("worker")
        if worker is not None:
            self.workers.setdefault(client, {})[worker["pid"]] = worker["backbone_loads"]


def write_results(out: Path, record: Record, shared: Tensors, partition: Manifest | None) -> Path:
    """Write `out/results.json` durably and return its path.

    Args:
        out: folder of the run.
        record: what happened.
        shared: the shared tensors after the last round.
        partition: of the data; None where it is not known here.
    """
    experiment, members = record.experiment, record.members
    total = record.total()
    seconds = {"total": total, **record.seconds}
    seconds["waiting"] = total - sum(record.seconds.values())
    last = record.rounds[-1]["clients"] if record.rounds else []
    without = [c for c, r in record.final["counts"].items() if r["local"][1] == 0]
    how = None if partition is None else partition.how()
    # A manifest was dealt by seeds of its own, which may not be known here.
    own: Mapping[str, Any] = how or {}
    elsewhere = how is None and experiment.data.manifest is not None
    # Sites' own images are not drawn or dealt by anybody.
    elsewhere = elsewhere or experiment.data.kind == "folders"
    chosen = None
    if experiment.evaluation.select == "best-local-test":
        chosen = best_on_test(record.evaluations, record.final)
    results = {
        "method": experiment.method.name,
        "dataset": experiment.data.kind,
        "engine": record.engine,
        "seed": experiment.seed,
        "seeds": {
            "run": experiment.seed,
            "fewshot": own.get("fewshot_seed", None if elsewhere else experiment.fewshot_seed),
            "partition": own.get(
                "partition_seed", None if elsewhere else experiment.partition_seed
            ),
        },
        "partition": how,
        "version": __version__,
        **_comparability(experiment, members.values()),
        "config": experiment.to_json(),
        "manifest_sha256": _common(
            _data(reply).get("manifest_sha256") for reply in members.values()
        ),
        "backbone_sha256": _common(r.statistics.get("backbone_sha256") for r in members.values()),
        "zero_shot": record.zero_shot,
        "final": record.final,
        "best_on_test": chosen,
        "parameters": record.parameters,
        "shared_sha256": tensors_sha256(shared),
        "clients": [
            {
                "name": client,
                "domain": _data(members[client]).get("domain"),
                "train_images": members[client].train_images,
                "private_sha256": record.private_sha256.get(client),
                "backbone_loads": sum(record.workers.get(client, {}).values()),
                "workers": len(record.workers.get(client, {})),
            }
            for client in sorted(members)
        ],
        "clients_without_test": without,
        "clients_not_evaluated": record.not_evaluated,
        "aggregation": experiment.server.aggregation,
        "privacy": record.budget.report(),
        "refusals": _refusals(record.rounds),
        "refused_nodes": record.refused_nodes,
        "bytes_per_round": {
            "up": {row["client"]: row.get("bytes_up", 0) for row in last},
            "down": {row["client"]: row["bytes_down"] for row in last},
        },
        "cold_starts": record.cold_starts,
        "resumed_after_rounds": record.resumed_after,
        "rounds": record.rounds,
        "seconds": seconds,
    }
    path = out / RESULTS
    write_json_atomic(path, results)
    return path


def _refusals(rounds: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Client -> in which rounds it was refused or absent, and how often for which reason."""
    found: dict[str, dict[str, Any]] = {}
    for row in (dict(row, round=r["round"]) for r in rounds for row in r["clients"]):
        if row["status"] != "accepted":
            entry = found.setdefault(row["client"], {"refused": [], "absent": [], "reasons": {}})
            entry[row["status"]].append(row["round"])
            entry["reasons"][row["reason"]] = entry["reasons"].get(row["reason"], 0) + 1
    return found


def _summary(counts: Mapping[str, Mapping[str, list[int]]]) -> dict[str, Any]:
    return {**federation_metrics(counts), "counts": {c: counts[c] for c in sorted(counts)}}


def _data(reply: Reply) -> Mapping[str, Any]:
    """What a site says of its part of a data set; the guard has checked it."""
    data: Mapping[str, Any] = reply.statistics.get("data", {})
    return data


def _common(values: Iterable[str | None]) -> str | None:
    """What all clients have; formation refuses those that differ."""
    return next(iter(values), None)


def _comparability(experiment: Experiment, members: Iterable[Reply]) -> dict[str, Any]:
    """Whether data and model are those of the papers, whole; and what a reader must know."""
    data = experiment.data
    if data.kind == "shapes":
        return {"comparable": False, "note": SHAPES_NOTE}
    reasons = []
    if experiment.backbone.name == TINY:
        reasons.append(f"{TINY}, a toy model that knows rendered shapes only")
    if data.max_test_per_class is not None:
        plural = "" if data.max_test_per_class == 1 else "s"
        reasons.append(f"at most {data.max_test_per_class} test image{plural} per class")
    if not all(_data(reply).get("published", True) for reply in members):
        reasons.append(OWN_SPLIT)
    note = f"{'; '.join(reasons)}: not comparable with the papers' numbers" if reasons else None
    return {"comparable": data.kind in DATASET_KINDS and note is None, "note": note}


def _by_domain(
    counts: Mapping[str, Mapping[str, list[int]]], members: Mapping[str, Reply]
) -> dict[str, Any]:
    """Metrics over the clients of each domain (PROTOCOL 3d); empty where there are no domains."""
    found: dict[str, dict[str, Mapping[str, list[int]]]] = {}
    for client, groups in counts.items():
        if (domain := _data(members[client]).get("domain")) is not None:
            found.setdefault(domain, {})[client] = groups
    return {domain: federation_metrics(clients) for domain, clients in found.items()}


def _spans(replies: Iterable[Reply], key: str) -> list[Span]:
    spans = (reply.statistics.get(key) for reply in replies)
    return [(span[0], span[1]) for span in spans if span]


def _covered(spans: Iterable[Span], window: Span) -> float:
    """Seconds of the window in which at least one span runs (clients work at the same time)."""
    covered, reached = 0.0, window[0]
    for start, end in sorted(spans):
        start, end = max(start, reached), min(end, window[1])
        if end > start:
            covered += end - start
            reached = end
    return covered
