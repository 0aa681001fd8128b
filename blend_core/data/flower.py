"""A partition of ours as a partitioner of Flower Datasets.

None of its own partitioners is exactly one of the papers' rules (PROTOCOL 3), so whoever has the
images as a Hugging Face data set can deal them by our manifest. Optional: it needs flwr-datasets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blend_core.errors import ConfigError

__all__ = ["partitioner"]


def partitioner(parts: Sequence[Sequence[int]]) -> Any:
    """A `flwr_datasets.partitioner.Partitioner` that hands out given rows.

    Args:
        parts: per client, row numbers; e.g. `[part.train for part in manifest.clients]` for a
            data set whose rows are in the order of `Dataset.train`.

    Raises:
        ConfigError: flwr-datasets is not installed.
    """
    try:
        from flwr_datasets.partitioner import Partitioner
    except ImportError:
        raise ConfigError(
            "flwr-datasets is missing; install it: pip install flwr-datasets"
        ) from None

    class ManifestPartitioner(Partitioner):  # type: ignore[misc]
        def load_partition(self, partition_id: int) -> Any:
            return self.dataset.select(parts[partition_id])

        @property
        def num_partitions(self) -> int:
            return len(parts)

    return ManifestPartitioner()
