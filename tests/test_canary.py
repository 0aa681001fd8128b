"""No private tensor, class name of a node's label space or path of a site is ever let out.

Sites' class names, file names and folders hold a marker, and their private tensors are replaced
between two rounds by values of our own. Neither may be in any message, file or log of the server.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrix import ROWS
from PIL import Image

from blend_core.messages import Reply, Request
from blend_core.methods import BUILT_IN
from blend_core.state import read_tensors
from client.node import UPLOAD, Node
from client.site import Site
from deploy.loop import LoopTransport
from server.strategy import Coordinator

MARKER = "xqzvkwjp"
SITES = {"north": ("lesion", "fracture"), "south": ("scar", "ulcer", "cyst")}
# Values of a tensor that are looked for together: 32 bytes. Every 64 bytes in a row hold such a
# run whole.
RUN = 8

Tensors = Mapping[str, np.ndarray]


class Secrets:
    """What must not leave: the marker, and private tensors that were handed over."""

    def __init__(self) -> None:
        self.runs: set[bytes] = set()
        self.planted: set[int] = set()

    def add(self, tensors: Tensors) -> None:
        """Keep all runs of values that are not as good as constant."""
        for value in tensors.values():
            words = np.ascontiguousarray(value, dtype="<f4").reshape(-1).view("<u4")
            for start in range(0, len(words) - RUN + 1, RUN):
                run = words[start : start + RUN]
                if len(np.unique(run)) > RUN // 2:
                    self.runs.add(run.tobytes())

    def plant(self, tensors: Tensors, draw: np.random.Generator) -> dict[str, np.ndarray]:
        """Recognisable values instead of `tensors`: small ones whose last 12 bits are 0xABC."""
        planted = {}
        for name, value in tensors.items():
            words = draw.normal(0, 0.02, value.shape).astype("<f4").reshape(-1).view("<u4")
            words = (words & 0xFFFFF000) | 0xABC
            self.planted |= set(words.tolist())
            planted[name] = words.view("<f4").reshape(value.shape)
        self.add(planted)
        return planted

    def found_in(self, data: bytes) -> list[str]:
        """What of it is in some bytes, at whatever place."""
        found = [MARKER] if MARKER.encode() in data.lower() else []
        first = np.array(sorted(int.from_bytes(r[:4], "little") for r in self.runs), dtype="<u4")
        for shift in range(4 if len(data) >= 4 * RUN else 0):
            words = np.frombuffer(data, dtype="<u4", offset=shift, count=(len(data) - shift) // 4)
            for place in np.flatnonzero(np.isin(words, first)) * 4 + shift:
                if data[place : place + 4 * RUN] in self.runs:
                    found.append(f"a private tensor at byte {place}")
        return found

    def found_in_json(self, text: str) -> list[str]:
        """As `found_in`, and planted values that are written as numbers."""
        numbers = np.array(list(_numbers(json.loads(text))), dtype="<f4").view("<u4")
        planted = [str(w) for w in numbers.tolist() if w in self.planted]
        return self.found_in(text.encode()) + planted


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers(inner)
    elif isinstance(value, int | float) and abs(value) < 1e30:
        yield float(value)


class Recorded(LoopTransport):
    """Keeps every message in both directions, and plants values before the second round."""

    def __init__(self, nodes: Mapping[str, Node], secrets: Secrets) -> None:
        super().__init__(nodes)
        self.secrets = secrets
        self.messages: list[tuple[str, bytes]] = []

    def ask(self, requests: Mapping[str, Request], timeout: float) -> Iterator[tuple[str, Reply]]:
        for client, request in requests.items():
            if (request.kind, request.round) == ("train", 2):
                self._plant(client)
            self._keep(request)
        for client, reply in super().ask(requests, timeout):
            self._keep(reply)
            yield client, reply

    def _keep(self, message: Request | Reply) -> None:
        header, vector = message.pack()
        self.messages.append((header, vector.tobytes()))

    def _plant(self, client: str) -> None:
        generations = self.nodes[client].generations
        round, tensors, header = generations.newest_before(2)
        private = {n: v for n, v in tensors.items() if not n.startswith(UPLOAD)}
        self.secrets.add(private)
        draw = np.random.default_rng(len(client) + len(self.messages))
        generations.save(round, {**tensors, **self.secrets.plant(private, draw)}, header)


def write_sites(root: Path) -> None:
    draw = np.random.default_rng(5)
    for site, classes in SITES.items():
        for part, count in (("train", 3), ("test", 1), ("novel", 1)):
            for name in classes:
                new = "new " if part == "novel" else ""
                place = root / site / part / f"{MARKER} {new}{name}"
                place.mkdir(parents=True)
                for number in range(count):
                    pixels = draw.integers(0, 256, (40, 40, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(place / f"{MARKER}-{number}.png")


class Federation:
    """Two sites with places of their own, in this process."""

    def __init__(self, folder: Path, experiment: Any, node: type[Node] = Node) -> None:
        root = folder / f"{MARKER}-place"
        write_sites(root)
        self.state, self.out, self.secrets = folder / "state", folder / "server", Secrets()
        sites = [Site(name, self.state / name, data_dir=root / name) for name in SITES]
        self.root = root
        self.transport = Recorded({s.name: node(s, "fed") for s in sites}, self.secrets)
        self.echo: list[str] = []
        self.coordinator = Coordinator(
            experiment, self.transport, self.out, "fed", "loop", echo=self.echo.append
        )

    def leaks(self, log: str) -> list[str]:
        """Everything secret that left the sites, or that the server has written."""
        self.secrets.add(private_tensors(self.state))
        found = []
        for header, values in self.transport.messages:
            found += self.secrets.found_in_json(header) + self.secrets.found_in(values)
        for text in (*self.echo, log):
            found += self.secrets.found_in(text.encode())
        return found + in_files(self.out, self.secrets)


def private_tensors(state: Path) -> dict[str, np.ndarray]:
    """All private tensors in all generations below a folder."""
    found = {}
    for path in state.rglob("round-*.safetensors"):
        for name, value in read_tensors(path)[0].items():
            if not name.startswith(UPLOAD):
                found[f"{path}/{name}"] = value
    return found


def in_files(folder: Path, secrets: Secrets, but: Iterable[Path] = ()) -> list[str]:
    """What is found in all files below a folder, and in their names."""
    found, looked = [], 0
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or any(path.is_relative_to(other) for other in but):
            continue
        looked += 1
        whole = path.read_bytes() + str(path.relative_to(folder)).encode()
        found += [f"{path.name}: {what}" for what in secrets.found_in(whole)]
        if path.suffix in (".json", ".jsonl"):
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            for line in lines:
                found += [f"{path.name}: {what}" for what in secrets.found_in_json(line)]
    assert looked >= 3, "there is nothing to look at"
    return found


@pytest.fixture
def small(tiny_experiment, tower):
    """Name of a method -> a federation of two rounds with it."""

    def build(method: str, **changes: Any) -> Any:
        given = {"name": method, **ROWS[method].small}
        backbone = tower("tower_a").model_dump()
        experiment = tiny_experiment(backbone=backbone, data={"kind": "folders"}, **changes)
        return type(experiment).model_validate({**experiment.to_json(), "method": given})

    return build


@pytest.mark.parametrize("method", BUILT_IN)
def test_nothing_private_leaves_a_site_with_any_method(small, tmp_path, method, caplog):
    federation = Federation(tmp_path, small(method))
    federation.coordinator.run()
    assert federation.leaks(caplog.text) == []
    kinds = [json.loads(header)["kind"] for header, _ in federation.transport.messages]
    trains = method != "zero-shot"
    # There and back, of two sites: join, two rounds, the last evaluation.
    assert (kinds.count("join"), kinds.count("train")) == (4, 8 * trains)
    # There was something to be found.
    has_private = bool(federation.coordinator.method.private())
    assert bool(federation.secrets.planted) == bool(federation.secrets.runs) == has_private


def test_no_error_of_a_site_lets_its_names_out(small, tmp_path):
    """The site's own log says it all, hence none of it is looked at here."""
    federation = Federation(tmp_path, small("blend"))
    ask = federation.transport.ask

    def spoil(requests, timeout):
        if next(iter(requests.values())).round == 2:
            next((federation.root / "north" / "train").rglob("*.png")).write_bytes(b"half")
        yield from ask(requests, timeout)

    federation.transport.ask = spoil
    federation.coordinator.run()
    events = (federation.out / "events.jsonl").read_text()
    told = '"client": "north", "reason": "its data is unusable (E06); its log says why"'
    assert told in events
    assert federation.leaks("") == []


class Leaky(Node):
    """Lets out a little more with every reply."""

    extra = staticmethod(lambda loaded, reply: None)

    def _reply(self, request, loaded, statistics, shared=None):
        reply = super()._reply(request, loaded, statistics, shared)
        self.extra(loaded, reply)
        return reply


def _value(loaded):
    largest = max(loaded.method.private().values(), key=lambda value: value.numel())
    return largest.detach().numpy().reshape(-1)


def _window(loaded, reply):
    """64 bytes of a private tensor, not from its beginning, in the midst of a shared one."""
    if reply.shared:
        name = max(reply.shared, key=lambda n: reply.shared[n].size)
        reply.shared[name].reshape(-1)[21:37] = _value(loaded)[13:29]


def _number(loaded, reply):
    if reply.kind == "train":
        reply.statistics["training"]["norm"] = float(_value(loaded)[5])


def _name(loaded, reply):
    # Where the guard lets a text pass; one under a key of its own it refuses.
    reply.statistics["private_sha256"] = loaded.data.base_names[0].upper()


def _path(loaded, reply):
    reply.statistics["private_sha256"] = str(loaded._site.data_dir)[-100:]


@pytest.mark.parametrize("extra", [_window, _number, _name, _path])
def test_every_way_to_let_it_out_would_be_found(small, tmp_path, monkeypatch, extra):
    monkeypatch.setattr(Leaky, "extra", staticmethod(extra))
    # Lambda 0 leaves the projection as it was planted.
    experiment = small("blend")
    method = experiment.method.model_copy(update={"lambda_": 0.0})
    federation = Federation(tmp_path, experiment.model_copy(update={"method": method}), Leaky)
    federation.coordinator.run()
    assert federation.leaks("") != []


@pytest.mark.slow
def test_nothing_private_is_in_any_file_or_log_of_a_federation_of_processes(
    small, tmp_path, monkeypatch
):
    from deploy import processes

    # The run's own folder of sites is no secret here: the experiment names it.
    write_sites(tmp_path / "sites")
    data = {"kind": "folders", "root": str(tmp_path / "sites")}
    experiment = small("blend")
    experiment = type(experiment).model_validate({**experiment.to_json(), "data": data})
    out = tmp_path / "run"
    out.mkdir()
    database = out / "superlink.db"
    start = functools.partial(processes.start_superlink, options=("--database", str(database)))
    monkeypatch.setattr(processes, "start_superlink", start)
    processes.run_processes(experiment, out, "fed")
    assert (out / "results.json").exists()
    assert database.stat().st_size > 0
    logs = {path.name for path in (out / "logs").iterdir()}
    assert {"superlink.log", "run.log", "site-north.log", "site-south.log"} <= logs
    secrets = Secrets()
    secrets.add(private_tensors(out / "state"))
    assert len(secrets.runs) > 100
    assert in_files(out, secrets, but=[out / "state"]) == []
    # What is looked for is there, at the sites.
    assert in_files(out / "state", secrets)
