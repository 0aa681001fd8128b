import json
from pathlib import Path

import pytest

from blend_core.config import parse_experiment
from blend_core.data.folders import FolderOptions
from blend_core.errors import ConfigError, SiteError
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
            "prompt-template": "an X-ray of {}.",
            "holdout": 0.25,
            "skip-bad": True,
            "strict": True,
            "image-memory": 8,
            "worker-idle": 30,
            "verbose-errors": True,
        }
    )
    assert site == Site(
        name="clinic-7",
        state_dir=tmp_path / "state",
        data_dir=tmp_path / "images",
        partition=3,
        label_space="federation",
        worker_idle=30.0,
        verbose_errors=True,
        prompt_template="an X-ray of {}.",
        holdout=0.25,
        skip_bad=True,
        strict=True,
        image_memory=8.0,
    )
    assert site.folder("fed-1") == tmp_path / "state" / "fed-1" / "clinic-7"


def test_a_site_without_a_name_is_named_after_its_partition(tmp_path: Path) -> None:
    config = {"partition-id": 4, "num-partitions": 10, "state-dir": str(tmp_path)}
    assert Site.from_node_config(config).name == "client-04"
    assert Site.from_node_config({**config, "client-name": "farm"}).name == "farm"


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
        ({"prompt-template": "a photo"}, "prompt-template"),
        ({"prompt-template": "{} and {}"}, "prompt-template"),
        ({"holdout": 1}, "holdout"),
        ({"holdout": -0.1}, "holdout"),
        ({"holdout": True}, "holdout"),
        ({"holdout": "0.2"}, "holdout"),
        ({"holdout": float("nan")}, "holdout"),
        ({"skip-bad": "False"}, "skip-bad"),
        ({"skip-bad": 1}, "skip-bad"),
        ({"strict": "true"}, "strict"),
        ({"image-memory": -1}, "image-memory"),
        ({"image-memory": True}, "image-memory"),
        ({"image-memory": float("inf")}, "image-memory"),
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
        site = Site("a", tmp_path / "s", data_dir, partition, "node", 1.5, False, "{}", 0.1, True)
        assert Site.from_json(json.loads(json.dumps(site.to_json()))) == site


def test_a_folder_is_read_as_the_experiment_says_unless_the_site_says_otherwise(
    tmp_path: Path,
) -> None:
    experiment = parse_experiment(
        {
            "data": {
                "kind": "folders",
                "label_space": "federation",
                "classes": ["cat", "dog"],
                "template": "a sketch of a {}.",
                "holdout": 0.2,
                "skip_bad": True,
            }
        }
    )
    file = tmp_path / "holdout" / "a.json"
    assert Site("a", tmp_path).folder_options(experiment) == FolderOptions(
        "federation", ("cat", "dog"), "a sketch of a {}.", 0.2, file, skip_bad=True, strict=False
    )
    own = {"label-space": "node", "prompt-template": "a {}.", "holdout": 0, "skip-bad": False}
    site = Site.from_node_config(
        {"client-name": "a", "state-dir": str(tmp_path), "strict": True, **own}
    )
    assert site.folder_options(experiment) == FolderOptions(
        "node", ("cat", "dog"), "a {}.", 0.0, file, skip_bad=False, strict=True
    )


@pytest.mark.parametrize("code", ["E06", "W04"])
@pytest.mark.parametrize("data", ["data", None])  # None: images that the server's settings name.
def test_a_server_learns_the_code_of_unusable_data_and_no_name(
    tmp_path: Path, code: str, data: str | None
) -> None:
    site = Site("a", tmp_path, data and tmp_path / data)
    told = site.for_outside(SiteError(f"{code} /data: ... secret.png"))
    assert str(told) == f"its data is unusable ({code}); its log says why"
