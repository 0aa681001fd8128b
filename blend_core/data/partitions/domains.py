"""Several clients per domain, label skew inside each (PROTOCOL 3d)."""

from __future__ import annotations

from collections.abc import Sequence

from blend_core.data.partitions.dirichlet import Split, dirichlet
from blend_core.errors import ConfigError

__all__ = ["domain_dirichlet"]

LEAST = 2


def domain_dirichlet(
    train: Sequence[tuple[int, str]],
    test: Sequence[tuple[int, str]],
    domains: Sequence[str],
    clients: int,
    beta: float,
    seed: int,
) -> list[Split]:
    """Split every domain among clients of its own by Dirichlet shares of its classes.

    Client d x (clients / domains) + j is the j-th of domain d. Every domain has a generator of
    its own, seeded once.

    Args:
        train: label and domain of every training item.
        test: the same of every test item.
        domains: their names in the order of clients.
        clients: a multiple of the number of domains.
        beta: concentration, above 0.
        seed: the partition seed.

    Returns:
        Per client, positions in `train` and in `test`; at least 2 each.

    Raises:
        ConfigError: `clients` is no such multiple, or a domain is too small for its clients.
    """
    if clients % len(domains):
        raise ConfigError(
            f"clients = {clients}: must be a multiple of the {len(domains)} domains "
            f"({', '.join(domains)})"
        )
    parts: list[Split] = []
    for domain in domains:
        own = [[i for i, (_, d) in enumerate(items) if d == domain] for items in (train, test)]
        split = dirichlet(
            [train[i][0] for i in own[0]],
            [test[i][0] for i in own[1]],
            clients // len(domains),
            beta,
            LEAST,
            seed,
            domain,
        )
        parts += [([own[0][i] for i in a], [own[1][i] for i in b]) for a, b in split]
    return parts
