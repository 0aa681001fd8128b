"""The server's run: form the federation, rounds, final evaluation. Knows no transport.

Read `Coordinator.round` for one server round from top to bottom. The three engines run this same
code; they differ only in the transport that carries requests to clients and replies back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from blend_core import __version__
from blend_core.backbone import Backbone
from blend_core.config import Experiment
from blend_core.data import client_names
from blend_core.errors import BlendError, FormationError, RunError
from blend_core.messages import Kind, Reply, Request, Tensors
from blend_core.methods import build_method
from blend_core.methods.base import snapshot
from blend_core.metrics import federation_metrics
from blend_core.randomness import numpy_generator
from blend_core.state import Generations
from server.aggregation import weighted_mean
from server.guard import refusal, statistics_refusal
from server.journal import Journal
from server.results import Record, write_results

CHECKPOINTS = "checkpoints"


class Transport(Protocol):
    """Carries requests to clients by name. Both calls end at their deadline, in seconds."""

    def join(self, request: Request, wanted: int, timeout: float) -> Iterator[Reply]:
        """Ask every client that appears to join; yield their replies until `wanted` were heard."""

    def ask(self, requests: Mapping[str, Request], timeout: float) -> Iterator[tuple[str, Reply]]:
        """Send each client its request; yield (client asked, reply) as they arrive."""


class Coordinator:
    """One run of one experiment.

    Args:
        experiment: the resolved experiment.
        transport: how clients are reached.
        out: folder for events, checkpoints and results.
        federation: names the federation whose private states the sites keep.
        engine: name of the engine, for the results.
        started: unix time at which the user started the run; unset: now.
    """

    def __init__(
        self,
        experiment: Experiment,
        transport: Transport,
        out: Path,
        federation: str,
        engine: str,
        started: float | None = None,
    ) -> None:
        self.experiment = experiment
        self.transport = transport
        self.out = out
        self.federation = federation
        self.journal = Journal(out)
        self.checkpoints = Generations(out / CHECKPOINTS, experiment.server.keep_checkpoints)
        self.record = Record(experiment, engine, started or time.time())
        self.members: dict[str, Reply] = {}
        # Newest round of each client that entered a mean.
        self.last_round: dict[str, int] = {}

    def run(self) -> None:
        """Run to the end and write the results; errors are written to the journal and raised."""
        experiment = self.experiment
        try:
            self.journal.write(
                "started",
                pid=os.getpid(),
                engine=self.record.engine,
                rounds=experiment.rounds,
                clients=experiment.clients,
            )
            method = build_method(
                experiment.method, Backbone.describe(experiment.backbone), experiment.seed
            )
            self.private = frozenset(method.private())
            shared = snapshot(method.shared())
            self.form()
            if method.trains:
                for round in range(1, experiment.rounds + 1):
                    shared = self.round(round, shared)
            self.evaluate(shared)
            path = write_results(self.out, self.record, shared, self.members)
            self.journal.write("finished", results=str(path))
        except BaseException as error:
            known = isinstance(error, BlendError)
            self.journal.write(
                "failed",
                message=str(error) if known else f"{type(error).__name__}: {error}",
                exit_code=error.exit_code if isinstance(error, BlendError) else 1,
            )
            raise
        finally:
            self.journal.close()

    def form(self) -> None:
        """Wait until the configured number of clients has joined.

        Raises:
            FormationError: too few joined in time; names who is missing or was refused.
            BlendError: a client's own error (its data, its configuration), as it reported it.
        """
        wanted, timeout = self.experiment.clients, self.experiment.server.formation_timeout
        request = Request("join", self.federation, 0, self.experiment.to_json())
        self.journal.write("forming", have=[], want=wanted)
        refused: list[str] = []
        for reply in self.transport.join(request, wanted, timeout):
            reply.raise_error()
            reason = statistics_refusal(reply, counts_needed=True)
            if reply.version != __version__:
                reason = f"it runs version {reply.version}, the server {__version__}"
            if reason is not None:
                refused.append(f"{reply.client}: {reason}")
                self.journal.write("refused", round=0, client=reply.client, reason=reason)
                continue
            self.members[reply.client] = reply
            self.journal.write("forming", have=sorted(self.members), want=wanted)
            if len(self.members) == wanted:
                break
        if len(self.members) < wanted:
            names = set(client_names(self.experiment) or ()) - set(self.members)
            missing = ", ".join(sorted(names)) or f"{wanted - len(self.members)} more"
            raise FormationError(
                f"{len(self.members)} of {wanted} clients joined within {timeout:.0f} s; missing: "
                f"{missing}" + "".join(f"; {reason}" for reason in refused)
            )
        self.record.formed(self.members)
        self.journal.write("formed", clients=sorted(self.members), zero_shot=self.record.zero_shot)

    def round(self, round: int, shared: Tensors) -> Tensors:
        """One round: sample, ask, guard, average, checkpoint. Returns the new shared tensors."""
        settings = self.experiment.server
        clients = self.sample(round)
        every = self.experiment.evaluation.every
        evaluate = every > 0 and (round - 1) % every == 0
        requests = {client: self._request("train", round, shared, client) for client in clients}
        for request in requests.values():
            request.evaluate = evaluate
        self.journal.write(
            "round", round=round, of=self.experiment.rounds, asked=len(clients), clients=clients
        )
        start = time.time()
        rows: dict[str, dict[str, Any]] = {}
        uploads: dict[str, Tensors] = {}
        shapes = {name: value.shape for name, value in shared.items()}
        for client, reply in self.transport.ask(requests, settings.round_timeout):
            reason = reply.error or refusal(
                reply, client, round, shapes, self.private, settings.max_images
            )
            rows[client] = self.record.row(client, reply, requests[client], reason)
            if reason is None:
                uploads[client] = reply.shared
            else:
                self.journal.write("refused", round=round, client=client, reason=reason)
            self.journal.write(
                "heard", round=round, client=client, heard=len(rows), asked=len(clients)
            )
        for client in sorted(set(clients) - set(rows)):
            reason = f"no reply within {settings.round_timeout:.0f} s"
            rows[client] = self.record.row(client, None, requests[client], reason)
            self.journal.write("absent", round=round, client=client, reason=reason)
        if len(uploads) < settings.min_replies:
            reasons = "; ".join(
                f"{c}: {r['reason']}" for c, r in sorted(rows.items()) if r["reason"]
            )
            raise RunError(
                f"round {round}: {len(uploads)} acceptable replies, "
                f"server.min_replies = {settings.min_replies}; {reasons}"
            )
        shared = weighted_mean(uploads, {c: rows[c]["train_images"] for c in uploads})
        self.last_round |= dict.fromkeys(uploads, round)
        self.record.round_done(round, start, rows)
        self.checkpoints.save(
            round, shared, {"federation": self.federation, "last_round": self.last_round}
        )
        counts = {c: r["counts"] for c, r in rows.items() if r["counts"] and c in uploads}
        metrics = federation_metrics(counts) if counts else {"per": None, "gen": None}
        self.journal.write(
            "round_done",
            round=round,
            accepted=len(uploads),
            asked=len(clients),
            per=metrics["per"],
            gen=metrics["gen"],
            seconds=time.time() - start,
        )
        return shared

    def sample(self, round: int) -> list[str]:
        """The round's clients, sorted: max(floor(fraction N), 1) of those with training images."""
        able = sorted(name for name, reply in self.members.items() if reply.train_images > 0)
        if not able:
            raise RunError("no client has training images")
        count = max(int(self.experiment.server.fraction * len(able)), 1)
        draw = numpy_generator(self.experiment.seed, "sampling", round)
        return sorted(able[i] for i in draw.choice(len(able), size=count, replace=False))

    def evaluate(self, shared: Tensors) -> None:
        """Evaluate every client, sampled or not, with the last shared tensors.

        Raises:
            RunError: no client answered.
        """
        start = time.time()
        round = self.experiment.rounds + 1
        clients = sorted(self.members)
        self.journal.write("final", asked=len(clients))
        requests = {c: self._request("evaluate", round, shared, c) for c in clients}
        replies: dict[str, Reply] = {}
        problems: dict[str, str] = {}
        for client, reply in self.transport.ask(requests, self.experiment.server.round_timeout):
            reason = reply.error or statistics_refusal(reply, counts_needed=True)
            if reason is None:
                replies[client] = reply
            else:
                problems[client] = reason
                self.journal.write("refused", round=round, client=client, reason=reason)
        for client in sorted(set(clients) - set(replies) - set(problems)):
            problems[client] = "no reply in time"
            self.journal.write("absent", round=round, client=client, reason=problems[client])
        if not replies:
            reasons = "; ".join(f"{c}: {r}" for c, r in sorted(problems.items()))
            raise RunError(f"final evaluation: no client answered; {reasons}")
        self.record.evaluated(start, replies, problems)

    def _request(self, kind: Kind, round: int, shared: Tensors, client: str) -> Request:
        return Request(
            kind=kind,
            federation=self.federation,
            round=round,
            experiment=self.experiment.to_json(),
            last_round=self.last_round.get(client, 0),
            shared=shared,
        )
