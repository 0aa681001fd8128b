"""docs/deployment.md's commands for several machines, word for word, on this one."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from blend_core.settings import load_experiment
from deploy.children import Child, Family
from deploy.engine import HOST, Workspace, free_ports, script
from deploy.loop import run_loop

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "deployment.md").read_text()
README = (ROOT / "README.md").read_text()
SITES = {"hospital-a": ["cat", "dog"], "hospital-b": ["bus", "car", "bike"]}


def blocks(text: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def block(start: str) -> str:
    """The code block of docs/deployment.md that begins with `start`."""
    (found,) = [text for text in blocks(DOCS) if text.startswith(start)]
    return found


def until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return bool(condition())


def photographs(folder: Path, classes: list[str]) -> None:
    draw = np.random.default_rng(len(classes))
    for part, count in (("train", 4), ("test", 2)):
        for name in classes:
            place = folder / part / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")


class Machines:
    """The documented commands, with this machine's folders and ports instead of the examples'."""

    def __init__(self, folder: Path, family: Family, workspace: Workspace) -> None:
        self.folder = folder
        self.family = family
        self.home = workspace.home
        (self.link,) = free_ports(1)
        self.keys = folder / "federation"
        self.out = folder / "run-1"
        self.changes = {
            "fl.example.org:9300": f"localhost:{self.link}",
            "fl.example.org": "localhost",
            "--host 0.0.0.0 --port 9300": f"--host 127.0.0.1 --port {self.link}",
            "/var/lib/superlink/state.db": str(folder / "state.db"),
            "/etc/blend/superlink": str(self.keys / "superlink"),
            "/etc/blend/ca.crt": str(self.keys / "superlink" / "ca.crt"),
            "/etc/blend/hospital-a": str(self.keys / "sites" / "hospital-a"),
            "keys create-federation federation": f"keys create-federation {self.keys}",
            "keys add-site federation": f"keys add-site {self.keys}",
            "keys show federation": f"keys show {self.keys}",
            "rm -rf federation/sites": f"rm -rf {self.keys / 'sites'}",
            "federation/public-keys": str(self.keys / "public-keys"),
            "/srv/blend/run-1": str(self.out),
            "run . ": f"run {ROOT} ",
        }

    def here(self, text: str) -> str:
        """A documented text with our folders and ports."""
        for old, new in self.changes.items():
            text = text.replace(old, new)
        return text

    def commands(self, start: str) -> list[list[str]]:
        """The commands of the documented block that begins with `start`."""
        lines = self.here(block(start)).replace("\\\n", "").splitlines()
        return [[script(name), *rest] for name, *rest in map(shlex.split, lines)]

    def do(self, start: str) -> None:
        """Run the commands of a documented block."""
        for command in self.commands(start):
            self.run(*command)

    def run(self, name: str, *arguments: str) -> str:
        """Run a command to its end; returns what it printed."""
        child = self.family.start("operator", [script(Path(name).name), *arguments])
        assert child.process.wait(timeout=60) == 0, child.output()
        return child.output()

    def form(self) -> Child:
        """Make the keys, start the SuperLink, register the sites; returns the SuperLink."""
        self.do("blend keys create-federation")
        for name, classes in SITES.items():
            photographs(self.folder / "sites" / name, classes)
            (port,) = free_ports(1)
            path = self.keys / "sites" / name / "site.yaml"
            settings = yaml.safe_load(path.read_text())
            # The host's port is that of the example; this machine gave the SuperLink another.
            assert settings["superlink"] == "localhost:9300"
            settings |= {
                "superlink": f"localhost:{self.link}",
                "port": port,
                "data-dir": str(self.folder / "sites" / name),
                "state-dir": str(self.folder / "state"),
            }
            path.write_text(yaml.safe_dump(settings))
        (command,) = self.commands("flower-superlink")
        superlink = self.family.start("superlink", command)
        assert until(lambda: "Uvicorn running on https" in superlink.output()), superlink.output()
        (self.home / "config.toml").write_text(self.here(block("[superlink.hospitals]")))
        self.do("flwr supernode register")
        return superlink

    def site(self, name: str) -> Child:
        """Start a site as documented."""
        (_, start) = self.commands("blend data check")
        return self.family.start(name, [part.replace("hospital-a", name) for part in start])

    def supernode(self, name: str, changes: dict[str, str]) -> Child:
        """Start Flower's own documented command, changed."""
        (command,) = self.commands("flower-supernode")
        text = "\0".join(command)
        for old, new in changes.items():
            assert old in text, old
            text = text.replace(old, new)
        (port,) = free_ports(1)
        parts = [part for part in text.split("\0") if part]
        return self.family.start(name, [*parts, "--port", str(port)])

    def nodes(self) -> list[str]:
        """Statuses of all registered SuperNodes."""
        return [node["status"] for node in self._listed()]

    def node_id(self, name: str) -> str:
        """The node id that registering a site printed; `list` shows ids without names."""
        log = self.family.logs / "operator.log"
        printed = re.findall(r"SuperNode (\d+) registered", log.read_text())
        return str(dict(zip(SITES, printed, strict=True))[name])

    def _listed(self) -> list[dict[str, Any]]:
        text = self.run("flwr", "supernode", "list", "hospitals", "--format", "json")
        listed: list[dict[str, Any]] = json.loads(text[text.index("{") :])["nodes"]
        return listed


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    workspace = Workspace(tmp_path / "flower", "several")
    with Family(workspace.environment(4), workspace.logs) as family:
        yield Machines(tmp_path, family, workspace)


@pytest.mark.slow
def test_only_registered_keys_by_tls_to_the_right_server_get_in(machines):
    superlink = machines.form()
    assert machines.nodes() == ["registered", "registered"]
    key, ca = (str(machines.keys / "sites" / "hospital-a" / n) for n in ("node.key", "ca.crt"))
    other = machines.keys.with_name("other")
    machines.run("blend", "keys", "add-site", str(machines.keys), "eve")
    machines.run("blend", "keys", "create-federation", str(other), "--host", "localhost")
    eve = {key: str(machines.keys / "sites" / "eve" / "node.key")}
    no_key = {"--auth-supernode-private-key": "", key: ""}
    no_tls = {"--root-certificates": "--insecure", ca: ""}
    plaintext = machines.supernode("plaintext", no_key | no_tls)
    refusals = {
        machines.supernode("unregistered", eve): "Failed to activate SuperNode",
        machines.supernode("no-key", no_key): "All SuperNodes must be registered",
        machines.supernode("wrong-ca", {ca: str(other / "ca" / "ca.crt")}): "CERTIFICATE_VERIFY",
        machines.supernode("key-without-tls", no_tls): "requires a secure TLS connection",
    }
    allowed = machines.site("hospital-a")
    for child, reason in refusals.items():
        assert child.process.wait(timeout=60) != 0, child.output()
        assert reason in child.output()
    assert until(lambda: "online" in machines.nodes()), allowed.output()
    # It tries on and on, but no answer is for it; the registered one is the only one inside.
    assert until(lambda: "retrying" in plaintext.output()), plaintext.output()
    assert superlink.output().count("Activated node_id") == 1
    assert sorted(machines.nodes()) == ["online", "registered"]


@pytest.mark.slow
def test_a_site_gets_a_new_key_under_its_name_and_the_old_one_ends(machines):
    machines.form()
    key = machines.keys / "sites" / "hospital-a" / "node.key"
    old = key.with_name("old.key")
    node = machines.node_id("hospital-a")
    old_key, settings = key.read_bytes(), (key.parent / "site.yaml").read_text()
    unregister, remove, *others = machines.here(block("flwr supernode unregister")).splitlines()
    machines.run(*shlex.split(unregister.replace("NODE-ID", node)))
    subprocess.run(shlex.split(remove), check=True)
    for command in others:
        machines.run(*shlex.split(command))
    (key.parent / "site.yaml").write_text(settings)
    old.write_bytes(old_key)
    former = machines.supernode("former", {str(key): str(old)})
    site = machines.site("hospital-a")
    assert former.process.wait(timeout=60) != 0, former.output()
    assert "Failed to activate SuperNode" in former.output()
    assert until(lambda: "online" in machines.nodes()), site.output()


@pytest.mark.slow
def test_a_site_that_stops_three_times_comes_back_under_its_key_with_its_state(machines):
    """The documented run, disturbed: its bytes are those of the loop engine, undisturbed.

    All the while another registered site claims its name, and is refused.
    """
    machines.form()
    key, mallory = machines.keys / "sites" / "hospital-a" / "node.key", "mallory"
    machines.run("blend", "keys", "add-site", str(machines.keys), mallory)
    public = str(machines.keys / "public-keys" / "mallory.pub")
    machines.run("flwr", "supernode", "register", public, "hospitals", "--name", mallory)
    machines.supernode(mallory, {str(key): str(machines.keys / "sites" / mallory / "node.key")})
    (documented,) = machines.commands("flwr run")
    settings = {"rounds": 4, "train.local_epochs": 1, "evaluation.every": 0}
    extra = "".join(f" {key}={value}" for key, value in settings.items())
    run = [part + extra if part.startswith("clients=") else part for part in documented]
    machines.site("hospital-b")
    site = machines.site("hospital-a")
    submitted = machines.family.start("run", run)

    def events(kind: str) -> list[dict[str, Any]]:
        path = machines.out / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    for stop in (1, 2, 3):
        until(lambda n=stop: len(events("round_done")) >= n or not submitted.running, 240)
        assert len(events("round_done")) >= stop, submitted.output()[-3000:]
        site.process.send_signal(signal.SIGTERM)
        assert site.process.wait(timeout=60) == 0, site.output()
        site = machines.site("hospital-a")
    assert submitted.process.wait(timeout=240) == 0, submitted.output()[-3000:]
    results = json.loads((machines.out / "results.json").read_text())
    assert [c["name"] for c in results["clients"]] == sorted(SITES)
    assert results["final"]["counts"]["hospital-b"]["base"][1] == 6
    (refused,) = events("refused")
    assert refused["client"] == "hospital-a"
    assert "its key is registered for mallory" in refused["reason"]
    identities = json.loads((machines.out / "identities.json").read_text())
    shown = machines.run("blend", "keys", "show", str(machines.keys))
    assert list(identities) == sorted(SITES)
    for name, key in identities.items():
        assert f"site {name}: {key}" in shown
        assert list((machines.folder / "state").rglob(f"{name}/round-*.safetensors")), name
    # Class names of a node's own vocabulary are in no file of the server.
    for path in machines.out.rglob("*"):
        if path.is_file():
            assert b"bike" not in path.read_bytes(), path
    undisturbed = machines.folder / "loop"
    data = {"kind": "folders", "root": str(machines.folder / "sites")}
    changes = [f"{key}={value}" for key, value in settings.items()]
    changes += ["clients=2", *(f"data.{key}={value}" for key, value in data.items())]
    undisturbed.mkdir()
    run_loop(load_experiment(None, changes), undisturbed, "undisturbed", time.time())
    wanted = json.loads((undisturbed / "results.json").read_text())
    assert results["shared_sha256"] == wanted["shared_sha256"]
    private, expected = (
        {c["name"]: c["private_sha256"] for c in r["clients"]} for r in (results, wanted)
    )
    assert private == expected
    assert all(private.values())


def test_readme_shows_the_documented_commands():
    section = README.partition("## A federation over several machines")[2].partition("\n## ")[0]
    documented = "".join(blocks(DOCS))
    lines = [line for text in blocks(section) for line in text.splitlines()]
    assert len(lines) > 8
    assert [line for line in lines if line not in documented] == []
    assert "--insecure" not in section + documented


def test_the_units_start_what_is_documented():
    units = [text for text in blocks(DOCS) if text.startswith("[Unit]")]
    lines = [text.replace("\\\n", "").partition("ExecStart=")[2].splitlines()[0] for text in units]
    superlink, site = map(shlex.split, lines)
    assert superlink[1:] == shlex.split(block("flower-superlink").replace("\\\n", ""))[1:]
    assert f"blend {shlex.join(site[1:])}".replace("%i", "hospital-a") in block("blend data check")


def test_only_the_launcher_of_this_machine_is_ever_insecure():
    """And it binds and calls 127.0.0.1 alone."""
    sources = [
        p for folder in ("client", "server", "deploy") for p in (ROOT / folder).rglob("*.py")
    ]
    # In whatever way it is written; docstrings say that it is not used.
    code = {p.name: [line.strip() for line in p.read_text().splitlines()] for p in sources}
    uses = {n: [t for t in lines if "insecure" in t.lower()] for n, lines in code.items()}
    assert {name: len(found) for name, found in uses.items() if found} == {
        "engine.py": 1,
        "processes.py": 2,
        "site_start.py": 1,
    }
    # For `flwr run`, in the home that is the run's own.
    assert uses["engine.py"] == ["f'address = \"{HOST}:{port}\"\\ninsecure = true\\n',"]
    assert uses["site_start.py"][0].endswith("Flower's --insecure is never passed.")
    text = (ROOT / "deploy" / "processes.py").read_text()
    commands = text.split('"--insecure"')[1:]
    assert HOST == "127.0.0.1"
    assert len(commands) == 2
    assert "*address" in commands[0]
    assert 'address = ("--host", HOST, ' in text
    assert 'f"{HOST}:{superlink_port}"' in commands[1][:120]
