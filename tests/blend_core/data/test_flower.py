"""Our partitions in Flower Datasets."""

from __future__ import annotations

import importlib.util

import pytest

from blend_core.data.flower import partitioner
from blend_core.errors import ConfigError

MISSING = importlib.util.find_spec("flwr_datasets") is None


@pytest.mark.skipif(not MISSING, reason="flwr-datasets is installed")
def test_a_missing_package_is_one_line_that_says_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match="pip install flwr-datasets"):
        partitioner([[0]])


@pytest.mark.skipif(MISSING, reason="flwr-datasets is not installed")
def test_every_client_gets_the_rows_of_its_part() -> None:
    import datasets

    ours = partitioner([[2, 0], [1, 3]])
    ours.dataset = datasets.Dataset.from_dict({"label": [10, 11, 12, 13]})
    assert ours.num_partitions == 2
    assert ours.load_partition(0)["label"] == [12, 10]
    assert ours.load_partition(1)["label"] == [11, 13]
