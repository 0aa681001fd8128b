"""The server's run: form the federation, rounds, final evaluation. Knows no transport.

Read `Coordinator.round` for one server round from top to bottom. The three engines run this same
code; they differ in the transport that carries requests to clients and replies back, and in whose
the nodes are: where we started all of them, the first that is refused ends the run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Protocol

from blend_core import __version__
from blend_core.backbone import Backbone
from blend_core.config import Experiment, clients_per_round
from blend_core.data import class_names, dealt_data, prompt_template
from blend_core.data.manifest import Manifest
from blend_core.errors import (
    BlendError,
    RunError,
    SiteError,
    described,
    error_from_code,
    one_line,
)
from blend_core.messages import Kind, Reply, Request, Tensors
from blend_core.methods import build_method
from blend_core.methods.base import Method, snapshot
from blend_core.noise import require_server_key
from blend_core.randomness import numpy_generator
from blend_core.state import lock_folder
from server.aggregation import aggregate
from server.budget import require_shared
from server.checkpoints import Checkpoint, Checkpoints, require_same
from server.formation import Formation
from server.guard import other_version, outliers, refusal
from server.journal import Journal
from server.results import Problem, Record, write_results

CHOSEN_ON_TEST = (
    "evaluation.select best-local-test chooses a round by its test images; it is shown beside the "
    "last round, which stays the result"
)
# Flower ends a ServerApp by a signal, whatever its reason.
STOPPED = (
    "stopped from outside: by flwr stop, by a signal, or by the SuperLink, which took this process "
    "for dead (a clock that was set?); it can be resumed"
)
STOPPED_CODE = 128 + signal.SIGTERM


class Transport(Protocol):
    """Carries requests to clients by name. Both calls end at their deadline, in seconds."""

    def join(self, request: Request, timeout: float) -> Iterator[Reply]:
        """Ask every client that appears to join; yield their replies."""

    def ask(self, requests: Mapping[str, Request], timeout: float) -> Iterator[tuple[str, Reply]]:
        """Send each client its request; yield (client asked, reply) as they arrive."""


class Coordinator:
    """One run of one experiment.

    Args:
        experiment: the resolved experiment.
        transport: how clients are reached.
        out: folder for events, checkpoints and results.
        federation: names the federation whose private states the sites keep; a resumed run has
            that of its checkpoint.
        engine: name of the engine; in all but "flower" every node was started by us.
        started: unix time at which the user started the run; unset: now.
        echo: takes a line for people per event; unset: nothing is said.
        resume: go on after the newest checkpoint in `out`, if there is one.
    """

    def __init__(
        self,
        experiment: Experiment,
        transport: Transport,
        out: Path,
        federation: str,
        engine: str,
        started: float | None = None,
        echo: Callable[[str], None] | None = None,
        resume: bool = False,
    ) -> None:
        self.experiment = experiment
        self.transport = transport
        self.out = out
        self.federation = federation
        self.journal = Journal(out, echo)
        self.resume = resume
        self.checkpoints = Checkpoints(out, experiment.server.keep_checkpoints)
        self.record = Record(experiment, engine, started or time.time())
        # Clients of the rounds so far, which a resumed run must have again.
        self.expected: list[str] = []
        self.members: dict[str, Reply] = {}
        # Newest accepted upload of each client, if the method or the settings want them kept.
        self.uploads: dict[str, Tensors] = {}
        # Number of training images behind each of them.
        self.upload_images: dict[str, int] = {}
        # Newest round of each client that entered a mean.
        self.last_round: dict[str, int] = {}

    @cached_property
    def method(self) -> Method:
        """The method without weights: names, shapes and initial values, payloads."""
        backbone = Backbone.describe(self.experiment.backbone)
        return build_method(self.experiment.method, backbone, self.experiment.seed)

    @cached_property
    def _partition(self) -> Manifest | None:
        """How the images are dealt; None if every site has its own, or only clients know it."""
        data = self.experiment.data
        if data.kind == "folders":
            return None
        if data.kind != "shapes" and (data.root is None or not os.path.isdir(data.root)):
            return None
        return dealt_data(self.experiment)[1]

    def run(self) -> None:
        """Run to the end and write the results; errors are written to the journal and raised.

        Raises:
            StateError: another server runs in the folder.
            BlendError: the run failed.
        """
        # Whoever owns the folder already must not read in its journal that it has failed.
        with lock_folder(self.checkpoints.generations.folder):
            try:
                self._run()
            except (SystemExit, KeyboardInterrupt):
                self.journal.write("failed", message=STOPPED, exit_code=STOPPED_CODE)
                raise
            except BaseException as error:
                code = error.exit_code if isinstance(error, BlendError) else RunError.exit_code
                self.journal.write("failed", message=described(error), exit_code=code)
                raise
            finally:
                self.journal.close()

    def _run(self) -> None:
        experiment = self.experiment
        self.journal.write(
            "started",
            pid=os.getpid(),
            engine=self.record.engine,
            rounds=experiment.rounds,
            clients=experiment.clients,
        )
        self.record.parameters = self.method.parameter_counts()
        require_shared(experiment, self.record.parameters["shared"])
        if names := class_names(experiment):  # Too long ones must not wait for the sites.
            self.method.tokenize(names, prompt_template(experiment))
        done, shared = self._begin()
        if experiment.evaluation.select == "best-local-test":
            self.warn(CHOSEN_ON_TEST)
        self.form()
        if self.method.trains:
            for round in range(done + 1, experiment.rounds + 1):
                if not self._affordable(round):
                    break
                shared = self.round(round, shared)
        self.final_evaluation(shared)
        path = write_results(self.out, self.record, shared, self._partition)
        self.journal.write("finished", results=str(path))

    def _begin(self) -> tuple[int, Tensors]:
        """The last finished round and its shared tensors; 0 and the initial ones at the start.

        Raises:
            ConfigError: the run was begun as another experiment.
            StateError: there are checkpoints, but all are damaged, or `noise.key` is gone.
        """
        if self.resume:
            require_server_key(self.experiment, self.out, self.checkpoints.newest_round())
        found = self.checkpoints.newest(self.warn) if self.resume else None
        if found is None:
            if self.resume:
                self.warn(f"no checkpoint in {self.out}: the run begins with round 1")
            shared = snapshot(self.method.shared())
            self._save(0, shared)  # So that the federation's name survives from here on.
            return 0, shared
        require_same(self.experiment, found)
        if found.version != __version__:
            self.warn(f"the run was begun with version {found.version}, this is {__version__}")
        self.federation, self.uploads = found.federation, found.uploads
        self.last_round, self.upload_images = found.last_round, found.upload_images
        self.expected = found.members
        self.record.restore(found.record)
        self.record.budget.repeated += self.checkpoints.newest_round() - found.round
        self.record.resumed_after.append(found.round)
        self.journal.write("resumed", round=found.round, of=self.experiment.rounds)
        return found.round, found.shared

    def warn(self, message: str) -> None:
        """Tell who watches the run."""
        self.journal.write("warning", message=message)

    def note_refused(self, client: str, reason: str) -> None:
        """Note a node that may not take part, or not with the name it gives."""
        after = len(self.record.rounds)
        self.record.refused_nodes.append({"after": after, "client": client, "reason": reason})
        self.journal.write("refused", round=0, client=client, reason=reason)

    def _save(self, round: int, shared: Tensors) -> None:
        self.checkpoints.save(
            Checkpoint(
                round=round,
                federation=self.federation,
                engine=self.record.engine,
                version=__version__,
                experiment=self.experiment.to_json(),
                shared=shared,
                uploads=self.uploads,
                upload_images=self.upload_images,
                last_round=self.last_round,
                record=self.record.state(),
                members=sorted(self.members) or self.expected,
            )
        )

    def form(self) -> None:
        """Wait until the configured number of clients has joined; see `Formation.gather`."""
        self.formation = Formation(
            self.experiment,
            self.federation,
            self.expected,
            self.method.private(),
            self._partition,
            self.record.engine != "flower",
            self.journal,
            self.note_refused,
        )
        self.formation.gather(self.transport)
        self.members = self.formation.members
        for client, reply in sorted(self.members.items()):
            if reply.train_images == 0:
                self.warn(f"{client} has no training images and only evaluates")
        self.record.formed(self.members)
        self.journal.write("formed", clients=sorted(self.members), zero_shot=self.record.zero_shot)

    def unfit(self, reply: Reply) -> str | None:
        """Why a client that joins, now or in mid-run, may not take part; None if it may."""
        return self.formation.unfit(reply)

    def round(self, round: int, shared: Tensors) -> Tensors:
        """One round: sample, ask, guard, average, checkpoint. Returns the new shared tensors.

        Raises:
            RunError: fewer acceptable replies than `server.needed_replies`; names every client's
                reason (a `SiteError` if all of them are sites whose data or state is unusable).
        """
        start = time.time()
        clients = self.sample(round)
        every = self.experiment.evaluation.every
        evaluate = every > 0 and (round - 1) % every == 0
        requests = self._requests("train", round, shared, clients, evaluate)
        self.journal.write(
            "round", round=round, of=self.experiment.rounds, asked=len(clients), clients=clients
        )
        replies, problems = self._collect(requests)
        server = self.experiment.server
        if len(replies) < server.needed_replies:
            what = f"{len(replies)} acceptable replies, server.min_replies = {server.min_replies}"
            if server.needed_replies > server.min_replies:
                what += f", aggregation {server.aggregation} needs {server.needed_replies}"
            raise _failure(f"round {round}: {what}", problems)
        self._note_cold_starts(replies)
        uploads = {client: reply.shared for client, reply in replies.items()}
        stale = self.experiment.server.aggregate_stale
        if self.method.keeps_uploads or stale:
            self.uploads |= uploads
        images = {client: reply.train_images for client, reply in replies.items()}
        if stale:
            self.upload_images |= images
            uploads, images = self.uploads, self.upload_images
        budget = self.record.budget
        shared = aggregate(
            self.experiment, round, shared, uploads, images, len(clients), budget, self.out
        )
        self.last_round |= dict.fromkeys(replies, round)
        metrics = self.record.round_done(round, start, requests, replies, problems)
        self._save(round, shared)
        self.journal.write(
            "round_done",
            round=round,
            accepted=len(replies),
            asked=len(clients),
            per=metrics["per"],
            gen=metrics["gen"],
            seconds=time.time() - start,
        )
        return shared

    def _affordable(self, round: int) -> bool:
        """Whether the target epsilon allows the round; if not, training ends here."""
        budget = self.record.budget
        if budget.allows(self.sample(round)):
            return True
        self.journal.write("stopped", round=round - 1, reason=budget.stopped)
        return False

    def sample(self, round: int) -> list[str]:
        """The round's clients, sorted: max(floor(fraction N), 1) of those with training images.

        All of them in round 1 if the method has private tensors, so that every client has its
        own from the start (unless `server.full_first_round` says otherwise).
        """
        able = sorted(name for name, reply in self.members.items() if reply.train_images > 0)
        if not able:
            raise RunError("no client has training images")
        everyone = self.experiment.server.full_first_round
        if everyone is None:
            everyone = bool(self.method.private())
        if round == 1 and everyone:
            return able
        count = clients_per_round(self.experiment.server.fraction, len(able))
        draw = numpy_generator(self.experiment.seed, "sampling", round)
        return sorted(able[i] for i in draw.choice(len(able), size=count, replace=False))

    def final_evaluation(self, shared: Tensors) -> None:
        """Evaluate every client, sampled or not, with the last shared tensors.

        Raises:
            RunError: no client answered; names every client's reason.
        """
        start = time.time()
        round = self.experiment.rounds + 1
        clients = sorted(self.members)
        self.journal.write("final", asked=len(clients))
        requests = self._requests("evaluate", round, shared, clients, True)
        replies, problems = self._collect(requests)
        if not replies:
            raise _failure("final evaluation: no client answered", problems)
        self._note_cold_starts(replies)
        self.record.evaluated(start, replies, problems)

    def _collect(
        self, requests: Mapping[str, Request]
    ) -> tuple[dict[str, Reply], dict[str, Problem]]:
        """Ask, judge every reply, and note in the journal what came of it."""
        replies: dict[str, Reply] = {}
        problems: dict[str, Problem] = {}
        timeout = self.experiment.server.round_timeout
        for client, reply in self.transport.ask(requests, timeout):
            round = requests[client].round
            reason = other_version(reply)
            if reason is None and reply.error is not None:
                self._note_lost(client, reply, requests[client])
            reason = reason or reply.error or self._refusal(reply, requests[client], client)
            if reason is None:
                replies[client] = reply
            else:
                code = reply.exit_code if reply.error else RunError.exit_code
                problems[client] = Problem("refused", one_line(reason), code)
                self.journal.write(
                    "refused", round=round, client=client, reason=problems[client].reason
                )
            heard = len(replies) + len(problems)
            self.journal.write(
                "heard", round=round, client=client, heard=heard, asked=len(requests)
            )
        for client, reason in outliers(replies, requests, self.experiment.server).items():
            del replies[client]
            problems[client] = Problem("refused", reason)
            round = requests[client].round
            self.journal.write("refused", round=round, client=client, reason=reason)
        for client in sorted(set(requests) - set(replies) - set(problems)):
            problems[client] = Problem("absent", f"no reply within {timeout:.0f} s")
            round, reason = requests[client].round, problems[client].reason
            self.journal.write("absent", round=round, client=client, reason=reason)
        return replies, problems

    def _note_lost(self, client: str, reply: Reply, request: Request) -> None:
        """Put lost private state into the journal, whatever follows from it.

        Raises:
            SiteError: it is lost and `state.on_missing` is "fail".
        """
        # Who has not counted in any round has nothing to lose; its word is a refusal like others,
        # and so is one about another round.
        same = (reply.client, reply.kind, reply.round) == (client, request.kind, request.round)
        if reply.statistics.get("state") != "lost" or request.last_round == 0 or not same:
            return
        reason = one_line(str(reply.error))
        self.journal.write("state_lost", round=request.round, client=client, reason=reason)
        if self.experiment.state.on_missing == "fail":
            raise SiteError(f"round {request.round}: {client} has lost its state: {reason}")

    def _note_cold_starts(self, replies: Mapping[str, Reply]) -> None:
        """Put what clients that counted say of lost private state into journal and results."""
        for client, reply in sorted(replies.items()):
            if (cold := reply.statistics.get("cold_start")) is None:
                continue
            reason = f"lost its state of round {cold['lost']} and started from round {cold['used']}"
            self.journal.write("state_lost", round=reply.round, client=client, reason=reason)
            self.record.cold_starts.append({"round": reply.round, "client": client, **cold})

    def _refusal(self, reply: Reply, request: Request, client: str) -> str | None:
        reason = refusal(reply, request, client, self.method.private(), self.experiment.server)
        cold = reply.statistics.get("cold_start")
        if reason is None and cold is not None and not self.record.asked(client, cold["lost"]):
            reason = "it speaks of a cold start that it may not make"
        return reason

    def _requests(
        self, kind: Kind, round: int, shared: Tensors, clients: list[str], evaluate: bool
    ) -> dict[str, Request]:
        payloads = self.method.payloads(clients, self.uploads, self.experiment.seed)
        return {
            client: Request(
                kind=kind,
                federation=self.federation,
                round=round,
                experiment=self.experiment.to_json(),
                evaluate=evaluate,
                last_round=self.last_round.get(client, 0),
                shared=shared,
                payload=payloads.get(client, {}),
            )
            for client in clients
        }


def _failure(what: str, problems: Mapping[str, Problem]) -> BlendError:
    """Why the run ends: exit code 3 if nothing but sites' data or state is the reason."""
    reasons = "; ".join(f"{client}: {p.reason}" for client, p in sorted(problems.items()))
    codes = {problem.exit_code for problem in problems.values()}
    code = SiteError.exit_code if codes == {SiteError.exit_code} else RunError.exit_code
    return error_from_code(f"{what}; {reasons}", code)
