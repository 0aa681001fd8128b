"""What differential privacy has cost so far, and when training must stop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from blend_core.accounting import epsilon
from blend_core.config import Experiment
from blend_core.errors import ConfigError

NOT_COVERED = (
    "the shared tensors only: numbers of images, counts of right answers and losses carry no noise"
)


def require_shared(experiment: Experiment, shared: int) -> None:
    """Refuse noise where it would cover nothing.

    Args:
        experiment: its method and privacy settings.
        shared: number of values that are shared, `Method.parameter_counts`.

    Raises:
        ConfigError: privacy is asked for, and nothing is shared.
    """
    if experiment.privacy.kind != "none" and shared == 0:
        raise ConfigError(
            f"privacy.kind {experiment.privacy.kind}: method {experiment.method.name} shares "
            "nothing with these settings, so there is nothing to add noise to; leave it out, or "
            "let the method share something (method.aggregate)"
        )


class Budget:
    """Rounds that every client took part in, and the clipping norm; kept over resumes.

    Who is asked follows from the run's seed and is no secret, so epsilon is that of the client
    that was asked most often, without amplification by sampling.

    Attributes:
        clipping_norm: of the next round.
        repeated: rounds that were done again from damaged checkpoints; they were released twice,
            with other noise if others answered, and count twice for everybody.
        stopped: why training ended before its last round; None if it did not.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.rounds: dict[str, int] = {}
        self.clipping_norm = experiment.privacy.clipping_norm
        self.repeated = 0
        self.stopped: str | None = None

    def state(self) -> dict[str, Any]:
        """What a resumed run must know, as JSON data."""
        return {
            "rounds": self.rounds,
            "repeated": self.repeated,
            "clipping_norm": self.clipping_norm,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` said."""
        self.rounds = dict(state["rounds"])
        self.repeated = int(state.get("repeated", 0))
        self.clipping_norm = float(state["clipping_norm"])

    def spend(self, clients: Iterable[str]) -> None:
        """A round that asked these clients is done; one that did not answer counts, too."""
        if self.experiment.privacy.kind != "none":
            self.rounds |= {client: self.rounds.get(client, 0) + 1 for client in clients}

    def allows(self, clients: Iterable[str]) -> bool:
        """Whether a round with these clients stays within the target; if not, says so."""
        privacy = self.experiment.privacy
        if privacy.kind == "none" or privacy.target_epsilon is None:
            return True
        most = max(self.rounds.get(client, 0) for client in clients) + self.repeated
        next_epsilon = self._epsilon(most + 1)
        if next_epsilon <= privacy.target_epsilon:
            return True
        self.stopped = (
            f"another round would raise epsilon to {next_epsilon:.3g}, above "
            f"privacy.target_epsilon {privacy.target_epsilon:g}"
        )
        return False

    def report(self) -> dict[str, Any] | None:
        """What results say of it; None if there is no noise."""
        experiment, privacy = self.experiment, self.experiment.privacy
        if privacy.kind == "none":
            return None
        most = max(self.rounds.values(), default=0) + self.repeated
        return {
            "kind": privacy.kind,
            "epsilon": self._epsilon(most),
            "epsilon_per_round": self._epsilon(1),
            "delta": privacy.delta,
            "target_epsilon": privacy.target_epsilon,
            "clipping": privacy.clipping,
            "clipping_norm": self.clipping_norm,
            "noise_multiplier": privacy.noise_multiplier,
            "noise_from": privacy.noise_from,
            "sampling": {
                "fraction": experiment.server.fraction,
                "amplification_counted": False,
                "most_rounds_of_a_client": most,
            },
            "covers": NOT_COVERED,
            "stopped": self.stopped,
        }

    def _epsilon(self, rounds: int) -> float:
        privacy = self.experiment.privacy
        return epsilon(privacy.noise_multiplier, rounds, privacy.delta)
