"""Flower's aggregation strategies, fed with clients' changes of the shared vector.

What clients changed, not what they hold: Krum's distances and the clipping of differential
privacy are about changes, and in float64 they lose nothing. Flower is imported here and nowhere
in `aggregation`, so that the plain mean needs none of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, Message, Metadata, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
    Krum,
    MultiKrum,
)
from flwr.serverapp.strategy.strategy import Strategy

from blend_core.config import Experiment, PrivacyConfig, ServerConfig
from blend_core.noise import NEXT_TO_NOTHING, global_numpy, noise_seed, require_server_key
from blend_core.state import tensors_sha256
from server.checkpoints import Checkpoints

Vector = npt.NDArray[np.float64]


def robust(changes: Sequence[Vector], server: ServerConfig) -> Vector:
    """Aggregate by `server.aggregation`, every client alike.

    Args:
        changes: per client, in the order of names, its change [P].
        server: names the rule and its settings.
    """
    return _aggregate(_rule(server, len(changes)), changes)


def central(
    replied: Mapping[str, Vector],
    asked: int,
    experiment: Experiment,
    clipping_norm: float,
    round: int,
    folder: Path,
) -> tuple[Vector, float]:
    """Sum of clipped changes over the number of clients asked, plus noise.

    A client that is absent counts as one that changed nothing. So the mean moves by at most
    clipping_norm / asked with any one client, whoever else replies, and that is what Flower sizes
    the noise by.

    Args:
        replied: client -> its change [P]; at least one.
        asked: clients that were asked, at least as many.
        experiment: its privacy settings and seed.
        clipping_norm: of this round.
        round: its number.
        folder: of the server, for the key of its noise.

    Returns:
        The noisy mean change [P] and the clipping norm of the next round.

    Raises:
        StateError: the key cannot be used, or is gone although rounds are done.
    """
    privacy = experiment.privacy
    require_server_key(experiment, folder, Checkpoints(folder).newest_round())
    changes = [replied[client] for client in sorted(replied)]
    # A round may be done again after it was released, with others who reply. With the same noise
    # the difference of both means would be bare.
    what = tensors_sha256(replied)
    seed = noise_seed(experiment, folder, round, asked, clipping_norm.hex(), what)
    absent = asked - len(changes)
    whole = [_not_nothing(change) for change in changes]
    whole += [_not_nothing(np.zeros_like(changes[0]))] * absent
    with global_numpy(seed):
        if privacy.clipping == "fixed":
            wrapper = DifferentialPrivacyServerSideFixedClipping(
                FedAvg(), privacy.noise_multiplier, clipping_norm, asked
            )
        else:
            wrapper = AdaptiveClipping(privacy, clipping_norm, asked, absent)
        # What clients were sent, from which Flower takes the changes: these are changes already.
        wrapper.current_arrays = _record(np.zeros_like(changes[0]))
        return _aggregate(wrapper, whole), float(wrapper.clipping_norm)


class AdaptiveClipping(DifferentialPrivacyServerSideAdaptiveClipping):  # type: ignore[misc]
    """Flower's wrapper, put right in three places to be what Andrew et al. 2021 prove.

    Flower 1.42 counts the clipped changes where the paper counts the unclipped ones, so the norm
    runs away from the quantile; it sizes a round's noise by the norm of the next round, which may
    be smaller than the one that clipped; and a client that is absent counts as unclipped, which
    doubles the sensitivity of the count that the paper's noise is sized for.
    """

    def __init__(
        self, privacy: PrivacyConfig, clipping_norm: float, asked: int, absent: int
    ) -> None:
        # The paper's asked / 20 is too little noise for a few clients: none can make up for it.
        count_noise = max(asked / 20, privacy.noise_multiplier)
        super().__init__(
            FedAvg(),
            privacy.noise_multiplier,
            asked,
            clipping_norm,
            privacy.clipping_quantile,
            privacy.clipping_lr,
            count_noise,
        )
        self._absent = absent
        self._unclipped = privacy.clipping_quantile

    def _noisy_fraction(self, count: int, total: int) -> float:
        # Half: with or without a client the count then differs by 1/2 (Andrew et al., section 2).
        return float(super()._noisy_fraction(count + self._absent / 2, total))

    def _geometric_update(self, clipped_fraction: float) -> None:
        self._unclipped = 1.0 - clipped_fraction

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate as Flower does; only then move the norm."""
        aggregate: tuple[ArrayRecord | None, MetricRecord | None]
        aggregate = super().aggregate_train(server_round, replies)
        super()._geometric_update(self._unclipped)
        return aggregate


def _rule(server: ServerConfig, replies: int) -> Strategy:
    if server.aggregation == "median":
        return FedMedian()
    if server.aggregation == "trimmed-mean":
        return FedTrimmedAvg(beta=server.trim)
    if server.aggregation == "krum":
        return Krum(num_malicious_nodes=server.malicious)
    keep = server.krum_keep or replies - server.malicious
    return MultiKrum(num_malicious_nodes=server.malicious, num_nodes_to_select=keep)


def _aggregate(strategy: Strategy, changes: Sequence[Vector]) -> Vector:
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)  # A line per client, about what the journal says in one.
    try:
        record, _ = strategy.aggregate_train(1, [_message(change) for change in changes])
    finally:
        logger.setLevel(level)
    if record is None:  # They return nothing instead of raising.
        raise ValueError(f"{type(strategy).__name__} aggregated nothing")
    vector: Vector = record["shared"].numpy()
    return vector


def _message(change: Vector) -> Message:
    content = RecordDict({"arrays": _record(change), "weights": MetricRecord({"num-examples": 1})})
    return Message(content=content, metadata=Metadata(0, "", 0, 0, "", "", 0.0, 0.0, "train"))


def _record(vector: Vector) -> ArrayRecord:
    return ArrayRecord({"shared": Array(vector)})


def _not_nothing(change: Vector) -> Vector:
    if change.any():
        return change
    change = change.copy()
    change[0] = NEXT_TO_NOTHING
    return change
