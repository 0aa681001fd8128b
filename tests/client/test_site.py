import json
from pathlib import Path

import pytest

from blend_core.errors import ConfigError
from blend_core.names import client_name
from client.site import Site


def test_every_key_of_the_node_config_arrives(tmp_path: Path) -> None:
    site = Site.from_node_config(
        {
            "client-name": "clinic-7",
            "data-dir": str(tmp_path / "images"),
            "state-dir": str(tmp_path / "state"),
            "partition-id": 3,
            "num-partitions": 10,
            "label-space": "federation",
            "worker-idle": 30,
        }
    )
    assert site == Site(
        name="clinic-7",
        state_dir=tmp_path / "state",
        data_dir=tmp_path / "images",
        partition=3,
        label_space="federation",
        worker_idle=30.0,
    )
    assert site.folder("fed-1") == tmp_path / "state" / "fed-1" / "clinic-7"


def test_a_simulated_node_is_named_after_its_partition(tmp_path: Path) -> None:
    config = {"partition-id": 4, "num-partitions": 10}
    assert Site.from_node_config(config, tmp_path).name == "client-04"
    assert Site.from_node_config(config, tmp_path, name="farm").name == "farm"


@pytest.mark.parametrize(
    ("partition", "partitions", "name"),
    [
        (0, None, "client-00"),
        (7, 100, "client-07"),
        (7, 101, "client-007"),
        (5, 1000, "client-005"),
    ],
)
def test_names_of_partitions_sort_by_number(
    partition: int, partitions: int | None, name: str
) -> None:
    assert client_name(partition, partitions) == name


def test_relative_folders_do_not_change_with_the_workers_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ann")
    site = Site.from_node_config({"client-name": "a", "state-dir": "s", "data-dir": "~/d"})
    assert site.state_dir == tmp_path / "s"
    assert site.data_dir == Path("/home/ann/d")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"worker-idel": 5}, "worker-idel"),
        ({"client-name": 7}, "client-name"),
        ({"client-name": ""}, "client-name"),
        ({"client-name": "../other"}, "client-name"),
        ({"client-name": ".hidden"}, "client-name"),
        ({"client-name": "line\n"}, "client-name"),
        ({"client-name": "x" * 65}, "client-name"),
        ({"data-dir": True}, "data-dir"),
        ({"state-dir": 1.5}, "state-dir"),
        ({"partition-id": -1}, "partition-id"),
        ({"partition-id": True}, "partition-id"),
        ({"partition-id": "3"}, "partition-id"),
        ({"partition-id": 10, "num-partitions": 10}, "partition-id"),
        ({"num-partitions": 0}, "num-partitions"),
        ({"label-space": "both"}, "label-space"),
        ({"worker-idle": 0}, "worker-idle"),
        ({"worker-idle": True}, "worker-idle"),
        ({"worker-idle": float("nan")}, "worker-idle"),
        ({"worker-idle": float("inf")}, "worker-idle"),
        ({"worker-idle": "60"}, "worker-idle"),
    ],
)
def test_a_wrong_node_config_names_the_key(change: dict, named: str, tmp_path: Path) -> None:
    config = {"client-name": "a", "state-dir": str(tmp_path), **change}
    with pytest.raises(ConfigError, match=named):
        Site.from_node_config(config)


def test_missing_state_dir_and_missing_name_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="state-dir"):
        Site.from_node_config({"client-name": "a"})
    with pytest.raises(ConfigError, match="client-name"):
        Site.from_node_config({"state-dir": str(tmp_path)})


def test_a_servers_federation_name_cannot_leave_the_state_folder(tmp_path: Path) -> None:
    for federation in ("../../etc", "a/b", "", ".."):
        with pytest.raises(ConfigError, match="federation"):
            Site("a", tmp_path).folder(federation)


@pytest.mark.parametrize("partition", [None, 0])
def test_a_site_survives_the_way_to_its_worker(partition: int | None, tmp_path: Path) -> None:
    for data_dir in (None, tmp_path / "d"):
        site = Site("a", tmp_path / "s", data_dir, partition, "node", 1.5)
        assert Site.from_json(json.loads(json.dumps(site.to_json()))) == site
