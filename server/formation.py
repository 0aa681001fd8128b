"""Who takes part in a run: the federation forms, and who joins later is judged alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from blend_core.config import DATASET_KINDS, Experiment
from blend_core.data import client_names
from blend_core.data.manifest import Manifest
from blend_core.errors import FormationError, error_from_code, one_line
from blend_core.messages import Reply, Request
from blend_core.names import is_plain_name
from server.guard import disagreement, other_version, refusal
from server.journal import Journal


class Joins(Protocol):
    """What of a transport is needed here."""

    def join(self, request: Request, timeout: float) -> Iterator[Reply]:
        """Ask every client that appears to join; yield their replies until the deadline."""


class Formation:
    """The clients of one run.

    Args:
        experiment: the resolved experiment.
        federation: names the federation.
        expected: the clients that a resumed run must have again; none: as the experiment says.
        private: names of tensors that must never leave a site.
        partition: how the images are dealt, as far as the server knows.
        ours: every node was started by us, so an error or a refusal is final.
        journal: of the run.
        on_refused: told (client, reason) of who may not take part.

    Attributes:
        members: client -> its reply to the request to join, of those who take part.
    """

    def __init__(
        self,
        experiment: Experiment,
        federation: str,
        expected: Sequence[str],
        private: Collection[str],
        partition: Manifest | None,
        ours: bool,
        journal: Journal,
        on_refused: Callable[[str, str], None],
    ) -> None:
        self.experiment = experiment
        self.request = Request("join", federation, 0, experiment.to_json(), evaluate=True)
        self.members: dict[str, Reply] = {}
        self._known = set(expected or client_names(experiment) or ())
        self._private = private
        # Of shapes all must agree with the first: each renders them itself.
        self._manifest = "" if experiment.data.kind == "folders" else None
        if experiment.data.kind in DATASET_KINDS and partition is not None:
            self._manifest = partition.sha256()
        self._ours = ours
        self._journal = journal
        self._on_refused = on_refused

    def gather(self, transport: Joins) -> None:
        """Wait until the configured number of clients has joined.

        Raises:
            FormationError: too few joined in time; names who is missing or was refused. At once,
                if one of the nodes that we started ourselves is refused.
            BlendError: a client's own error (its data, its configuration), as it reported it.
        """
        wanted, timeout = self.experiment.clients, self.experiment.server.formation_timeout
        self._journal.write("forming", have=[], want=wanted)
        refused: list[str] = []
        for reply in transport.join(self.request, timeout):
            named = self._is_client(reply.client)
            reason = other_version(reply)
            if reply.error is not None and reason is None and (named or self._ours):
                whose = f"{reply.client}: " if named else ""
                raise error_from_code(whose + one_line(reply.error), reply.exit_code)
            reason = reason or reply.error or self.unfit(reply)
            if reason is not None:
                client, reason = one_line(reply.client, 80), one_line(reason)
                refused.append(f"{client}: {reason}")
                self._on_refused(client, reason)
                if self._ours:  # As many nodes as clients: nobody can take its place.
                    raise FormationError(f"refused {client}: {reason}")
                continue
            self.members[reply.client] = reply
            self._journal.write("forming", have=sorted(self.members), want=wanted)
            if len(self.members) == wanted:
                return
        names = self._known - set(self.members)
        missing = ", ".join(sorted(names)) or f"{wanted - len(self.members)} more"
        raise FormationError(
            f"{len(self.members)} of {wanted} clients joined within {timeout:.0f} s; missing: "
            f"{missing}" + "".join(f"; refused {reason}" for reason in refused)
        )

    def unfit(self, reply: Reply) -> str | None:
        """Why a client that joins, now or in mid-run, may not take part; None if it may."""
        if not self._is_client(reply.client):
            return "no client of this experiment has that name"
        limits = self.experiment.server
        return refusal(reply, self.request, reply.client, self._private, limits) or disagreement(
            reply, next(iter(self.members.values()), reply), self._manifest
        )

    def _is_client(self, name: str) -> bool:
        return is_plain_name(name) and (not self._known or name in self._known)
