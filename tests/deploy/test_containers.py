"""docker-compose.yml and what belongs to it, without an engine; with one, if it answers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from blend_core.errors import RunError
from blend_core.report.runs import RESULTS
from blend_core.settings import CARRIER_KEYS, experiment_from_run_config
from deploy.certificates import host_names, load_certificate
from deploy.docker import operate
from deploy.docker.make_keys import make_keys
from deploy.site_start import supernode_command

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
GPU = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SITES = ["site-0", "site-1", "site-2"]
NAMES = ["client-00", "client-01", "client-02"]
STAYING = ["superlink", *SITES]
# What docker-compose 1.29 knows of a service, as far as we may need it; of the rest, say
# `pull_policy`, `develop` or `post_start`, it knows nothing.
KNOWN = {
    *("image", "build", "command", "environment", "depends_on", "healthcheck", "restart"),
    *("user", "init", "read_only", "tmpfs", "cap_drop", "security_opt", "volumes"),
    *("cpus", "mem_limit", "pids_limit", "stop_grace_period", "network_mode", "deploy"),
}


def mounts(service: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """Volume and whether it is read-only, by the place in the container."""
    found = {}
    for text in service["volumes"]:
        volume, place, *mode = re.sub(r"\$\{\w+:-([\w-]+)\}", r"\1", text).split(":")
        found[place] = (volume, mode == ["ro"])
    return found


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_confined(name):
    service = SERVICES[name]
    assert set(service) <= KNOWN
    assert service["user"] == "blend"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert {"cpus", "mem_limit", "pids_limit", "tmpfs"} <= set(service)
    # Never the host's; a service that needs no network has none.
    assert service.get("network_mode", "none") == "none"
    assert service["restart"] == ("unless-stopped" if name in STAYING else "no")
    assert ("healthcheck" in service) == (name in STAYING)
    assert ("build" in service) == (name == "keys")  # One image, built once.


def test_both_files_know_only_what_docker_compose_1_29_knows():
    assert set(COMPOSE) == {"x-service", "x-once", "x-site", "services", "volumes"}
    assert list(GPU) == ["services"]
    for text in (
        (ROOT / name).read_text() for name in ("docker-compose.yml", "docker-compose.gpu.yml")
    ):
        # Of variables' forms it has no others.
        assert set(re.findall(r"\$\{\w+(.?.?)", text)) == {":-"}
    for service in SERVICES.values():
        for dependency in service.get("depends_on", {}).values():
            assert list(dependency) == ["condition"]


def test_every_volume_is_declared_and_nobody_gets_what_belongs_to_another():
    places = {name: mounts(service) for name, service in SERVICES.items()}
    used = {volume for found in places.values() for volume, _ in found.values()}
    assert used == set(COMPOSE["volumes"])
    assert [name for name, found in places.items() if "/etc/blend/keys" in found] == ["keys"]
    for number, name in enumerate(SITES):
        assert places[name] == {
            "/etc/blend/site": (f"site-{number}", True),
            "/var/lib/blend": (f"state-{number}", False),
            "/data/photos": (f"data-{number}", True),
        }
        assert places["keys"][f"/etc/blend/sites/{NAMES[number]}"] == (f"site-{number}", False)
    # Keys of the SuperLink and of sites are no operator's business.
    assert places["run"] == {
        "/etc/blend/operator": ("operator", True),
        "/results": ("results", True),
    }
    assert places["superlink"]["/var/lib/superlink"] == ("database", False)
    # Docker gives a new volume the owner of the image's folder, so the image must have it.
    made = (DOCKER / "Dockerfile").read_text()
    for place in {place for found in places.values() for place in found}:
        assert re.search(rf"[ /]{place.removeprefix('/etc/').removeprefix('/')}[ \n]", made), place


def test_the_superlink_is_started_as_documented():
    documented = (ROOT / "docs" / "deployment.md").read_text().replace("\\\n", "")
    line = re.search(r"^flower-superlink .*$", documented, re.MULTILINE)
    assert line is not None
    assert " ".join(SERVICES["superlink"]["command"]).replace("=", " ").split() == line[0].split()


def test_the_dockerfile_takes_the_base_image_and_pip_arguments():
    text = (DOCKER / "Dockerfile").read_text()
    assert "ARG BASE_IMAGE=python:3.11-slim-bookworm\n" in text
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE_IMAGE}"}
    installs = re.findall(r"pip (?:install|wheel) (.*)", text)
    assert len(installs) == 3
    assert all("--no-cache-dir" in options for options in installs)
    assert [("--no-deps" in i) or ("${PIP_ARGS}" in i) for i in installs] == [True] * 3
    assert re.search(r"^USER blend$", text, re.MULTILINE)
    assert SERVICES["keys"]["build"]["args"] == {
        "BASE_IMAGE": "${BASE_IMAGE:-python:3.11-slim-bookworm}",
        "PIP_ARGS": "${PIP_ARGS:-}",
    }


def test_the_image_is_sent_all_packages_and_no_more():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    wheel = re.search(r"^packages = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert wheel is not None
    assert sent == {*re.findall(r'"(\w+)"', wheel[1]), "pyproject.toml", "README.md", "LICENSE"}


def test_gpus_are_for_sites_and_the_run_asks_for_them():
    for number, name in enumerate(SITES):
        (device,) = GPU["services"][name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        assert device["device_ids"] == [f"${{GPU_{number}:-0}}"]
    settings = GPU["services"]["run"]["environment"]["RUN_CONFIG"]
    assert (
        settings.replace(" train.device='cuda'", "") == SERVICES["run"]["environment"]["RUN_CONFIG"]
    )
    assert set(GPU["services"]) == {*SITES, "run"}


def test_the_run_is_the_quickstart_of_three():
    text = SERVICES["run"]["environment"]["RUN_CONFIG"]
    pairs = re.sub(r"\$\{\w+:-(\w*)\}", r"\1", text).split()
    given = {
        key: yaml.safe_load(value) for key, _, value in (pair.partition("=") for pair in pairs)
    }
    experiment = experiment_from_run_config(
        {key: "" for key in CARRIER_KEYS} | {"preset": "quickstart"} | given
    )
    assert (experiment.clients, experiment.data.kind) == (3, "shapes")
    assert experiment.server.require_keys


def handed_over(folder: Path) -> Path:
    for name in ("keys", "superlink", "operator", *(f"sites/{name}" for name in NAMES)):
        (folder / name).mkdir(parents=True)
    make_keys(folder, "superlink", NAMES, images=False)
    return folder


def test_keys_are_made_once_and_everybody_has_what_it_needs(tmp_path):
    folder = handed_over(tmp_path)
    certificate = load_certificate(folder / "superlink" / "server.crt")
    assert "superlink" in host_names(certificate)
    assert sorted(path.name for path in (folder / "operator").iterdir()) == [
        "ca.crt",
        "public-keys",
    ]
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    make_keys(folder, "superlink", NAMES, images=False)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    for name in NAMES:
        # Refuses keys that others can read, and folders that are not there.
        command = supernode_command(folder / "sites" / name)
        assert command[command.index("--superlink") + 1] == "superlink:9300"
        assert f"client-name='{name}' state-dir='/var/lib/blend'" in command


def test_own_images_are_where_the_volume_is(tmp_path):
    folder = handed_over(tmp_path)
    make_keys(folder, "superlink", NAMES, images=True)
    settings = yaml.safe_load((folder / "sites" / "client-00" / "site.yaml").read_text())
    assert settings["data-dir"] in mounts(SERVICES["site-0"])


def flwr(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A `flwr` that does what the script says; returns the run's folder."""
    command = folder / "flwr"
    out = folder / "out"
    out.mkdir()
    command.write_text(f"#!/bin/sh\ncd {out}\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setattr(operate, "script", lambda name: str(folder / name))
    monkeypatch.setattr(operate, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(operate, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(operate, "SETTLE_SECONDS", 0.1)
    return out


def event(kind: str, more: str = "") -> str:
    return f"""echo '{{"event": "{kind}"{more}}}' >> events.jsonl"""


def test_a_run_that_was_cut_off_is_submitted_again_with_resume(tmp_path, monkeypatch, capfd):
    first = f"touch cut; {event('started')}; {event('round_done')}; exit 1"
    script = f'echo "$@"; if [ ! -e cut ]; then {first}; fi; {event("finished")}'
    out = flwr(tmp_path, monkeypatch, script)
    operate.run("clients=3", out, 30)
    said = capfd.readouterr().out
    assert said.count(f"--run-config clients=3 out='{out}' resume=true") == 2
    assert said.count("submitted again") == 1
    (out / RESULTS).write_text("{}")
    operate.run("clients=3", out, 30)
    assert "finished before" in capfd.readouterr().out


def test_a_run_that_failed_is_not_submitted_again(tmp_path, monkeypatch):
    failed = event("failed", ', "message": "client-01: missing", "exit_code": 4')
    out = flwr(tmp_path, monkeypatch, f"echo x >> calls; {failed}")
    with pytest.raises(Exception, match="client-01: missing") as raised:
        operate.run("", out, 30)
    assert raised.value.exit_code == 4
    assert (out / "calls").read_text() == "x\n"


@pytest.mark.parametrize(
    ("script", "seconds", "message"),
    [
        ("echo x >> calls; exit 1", 30, "did not start 5 times"),
        ("exec sleep 30", 0.3, "not finished"),
    ],
)
def test_a_run_that_cannot_start_or_hangs_has_an_end(
    tmp_path, monkeypatch, script, seconds, message
):
    out = flwr(tmp_path, monkeypatch, script)
    with pytest.raises(RunError, match=message):
        operate.run("", out, seconds)
    calls = out / "calls"
    assert not calls.exists() or calls.read_text() == "x\n" * operate.FALSE_STARTS


def test_keys_are_registered_by_name_and_a_second_time_is_no_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(operate, "FOLDER", handed_over(tmp_path) / "operator")
    out = flwr(
        tmp_path,
        monkeypatch,
        'if [ -e "$6" ]; then echo "Public key already in use"; exit 1; fi; touch "$6"',
    )
    capsys.readouterr()
    operate.register()
    assert sorted(path.name for path in out.iterdir()) == NAMES
    operate.register()
    assert [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()] == [
        *(["registered"] * 3),
        *(["was registered"] * 3),
    ]
    (tmp_path / "flwr").write_text("#!/bin/sh\necho no SuperLink; exit 1\n")
    with pytest.raises(RunError, match="client-00 cannot be registered: no SuperLink"):
        operate.register()
    (tmp_path / "flwr").write_text("#!/bin/sh\nexec sleep 30\n")
    monkeypatch.setattr(operate, "ANSWER_SECONDS", 0.2)
    with pytest.raises(RunError, match="client-00 cannot be registered: no answer"):
        operate.register()


def engine() -> str:
    """Why the federation cannot be run here; empty if it can."""
    if shutil.which("docker") is None:
        return "no docker command"
    answer = subprocess.run(["docker", "info"], capture_output=True, timeout=60)
    return "no Docker engine answers" if answer.returncode else ""


@pytest.mark.slow
def test_the_federation_survives_in_containers():
    if reason := engine():
        pytest.skip(reason)
    # The environment may say how to build and with which compose; see the script.
    done = subprocess.run(
        [DOCKER / "check.sh"], env=os.environ, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "PASSED" in done.stdout
