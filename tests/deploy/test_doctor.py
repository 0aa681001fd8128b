"""`blend doctor`: every kind of trouble is found, with what to do and the right exit code."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from PIL import Image

from blend_core.config import parse_experiment
from blend_core.state import Generations
from deploy.checks import Check, Settings, failure, ok, runner, warning
from deploy.checks import machine as machine_checks
from deploy.checks import superlink as superlink_checks
from deploy.checks.keys import keys, root_certificates
from deploy.checks.model import model, state_bytes
from deploy.checks.runner import examine, exit_code
from deploy.checks.site import site
from deploy.checks.superlink import superlink

NOW = datetime.now(UTC)
DAY = timedelta(days=1)


def last(checks: Iterator[Check]) -> dict[str, Check]:
    """The last word of every check."""
    return {check.name: check for check in checks}


# Packages


def fake_package(folder: Path, name: str, version: str, *requires: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {text}" for text in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def test_the_installed_packages_fit_together():
    found = last(machine_checks.packages())
    assert found["python"].level == found["packages"].level == "ok"
    assert "torch " in found["packages"].found


def test_a_package_of_another_version_is_named_with_what_is_needed(monkeypatch, tmp_path):
    fake_package(tmp_path, "ray", "1.2.3")
    monkeypatch.syspath_prepend(tmp_path)
    check = last(machine_checks.packages())["packages"]
    assert (check.level, check.code) == ("failure", 2)
    # Only flwr's extra "simulation" asks for it, so extras are followed.
    assert check.found.startswith("flwr needs ray==")
    assert check.found.endswith(", found 1.2.3")
    assert "pip install" in check.advice


def test_a_torchvision_for_another_torch_is_found(monkeypatch, tmp_path):
    fake_package(tmp_path, "torchvision", "0.29.1", "torch==2.6.0")
    monkeypatch.syspath_prepend(tmp_path)
    check = last(machine_checks.packages())["packages"]
    assert "torchvision needs torch==2.6.0, found " in check.found


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    fake_package(tmp_path, "torchvision", "0.29.1", "no-such-package>=1")
    monkeypatch.syspath_prepend(tmp_path)
    check = last(machine_checks.packages())["packages"]
    assert check.found == "torchvision needs no-such-package, which is missing"


# The machine


def test_a_port_in_use_is_a_warning_that_names_who_wants_it(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(machine_checks, "DEFAULT_PORTS", {port: "flower-superlink"})
        check = machine_checks.ports()
    assert check.level == "warning"
    assert check.found == f"in use: {port} of flower-superlink"


def test_no_temporary_folder_is_a_failure(monkeypatch, tmp_path):
    code = (
        "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/proc/none']\n"
        "from deploy.checks.machine import temporary_space as check; print(check().level)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout == "failure\n"


@pytest.mark.parametrize(("free", "level"), [(99, "failure"), (101, "warning"), (1025, "ok")])
def test_little_room_for_temporary_files(monkeypatch, free, level):
    usage = type("Usage", (), {"free": free * 2**20})
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda folder: usage)
    assert machine_checks.temporary_space().level == level


@pytest.mark.parametrize(("limit", "level"), [(200, "failure"), (1000, "warning"), (2000, "ok")])
def test_the_limit_of_open_files(limit, level):
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, 2000))\n"
        "from deploy.checks.machine import open_files as check; c = check()\n"
        "print(c.level, c.advice)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout == f"{level} {'' if level == 'ok' else 'ulimit -n 2000'}\n"


def test_a_clock_that_is_years_off_is_a_failure(monkeypatch):
    monkeypatch.setattr(machine_checks, "YEARS", range(1970, 1980))
    check = machine_checks.clock()
    assert (check.level, check.code) == ("failure", 2)
    assert "timedatectl" in check.advice


def test_a_clock_that_is_moved_meanwhile_is_a_warning(monkeypatch):
    # An hour between the first look and the second.
    looks = iter([0.0, 3600.0])
    true = time.time()
    monkeypatch.setattr(machine_checks.time, "time", lambda: true + next(looks))
    assert "moved by +3599.7 s" in machine_checks.clock().found


def test_a_flower_home_that_is_a_file_is_a_failure(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "file"))
    check = machine_checks.flower_home()
    assert (check.level, check.code) == ("failure", 3)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "new" / "home"))
    assert machine_checks.flower_home().level == "ok"
    assert not (tmp_path / "new").exists()


# A site's state


def state_check(folder: Path) -> Check:
    return last(site(Settings(state_dir=str(folder))))["state folder"]


def test_a_state_folder_that_does_not_exist_is_not_created(tmp_path):
    check = state_check(tmp_path / "a" / "b")
    assert check.level == "ok"
    assert "will be created" in check.found
    assert list(tmp_path.iterdir()) == []


def test_a_state_folder_below_a_file_is_a_failure(tmp_path):
    (tmp_path / "file").touch()
    check = state_check(tmp_path / "file" / "below")
    assert (check.level, check.code) == ("failure", 3)


def test_a_state_folder_in_use_names_the_process_and_is_left_alone(tmp_path):
    folder = tmp_path / "fed" / "site-a"
    folder.mkdir(parents=True)
    (folder / "lock").write_text("4711\n")
    assert state_check(tmp_path).level == "ok"
    with (folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        check = state_check(tmp_path)
    assert (check.level, check.code) == ("failure", 3)
    assert f"{folder} (process 4711)" in check.found
    assert (folder / "lock").read_text() == "4711\n"
    assert state_check(tmp_path).level == "ok"


def test_a_damaged_newest_state_is_found_before_a_run_finds_it(tmp_path):
    generations = Generations(tmp_path / "fed" / "site-a")
    for round in (1, 2):
        generations.save(round, {"x": np.ones(3, np.float32)}, {})
    assert "newest state of 1 intact" in state_check(tmp_path).found
    generations.path(2).write_bytes(generations.path(2).read_bytes()[:-1])
    check = state_check(tmp_path)
    assert (check.level, check.code) == ("failure", 3)
    assert "round 1 before it is intact" in check.found


# Keys and certificates


class Authority:
    """A CA in a folder, and what it makes."""

    def __init__(self, folder: Path, until=NOW + 365 * DAY) -> None:
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP384R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test CA")])
        self.certificate = self._sign(self.name, self.key.public_key(), [], until, True)
        self.path = folder / "ca.crt"
        self.path.write_bytes(self.certificate.public_bytes(Encoding.PEM))

    def _sign(self, subject, public, names, until, ca, begin=NOW - 400 * DAY):
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(ca, None), True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        return builder.sign(self.key, hashes.SHA256())

    def server(self, *hosts: str, until=NOW + 365 * DAY, begin=NOW - 400 * DAY, mode=0o600):
        """server.pem and server.key; returns their paths."""
        key = ec.generate_private_key(ec.SECP384R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "server")])
        names = [x509.DNSName(host) for host in hosts]
        certificate = self._sign(subject, key.public_key(), names, until, False, begin)
        pem, private = self.folder / "server.pem", self.folder / "server.key"
        pem.write_bytes(certificate.public_bytes(Encoding.PEM))
        write_key(private, key, mode)
        return pem, private


def write_key(path: Path, key, mode=0o600, form=PrivateFormat.PKCS8, password=None) -> None:
    encryption = BestAvailableEncryption(password) if password else NoEncryption()
    path.write_bytes(key.private_bytes(Encoding.PEM, form, encryption))
    path.chmod(mode)


def key_checks(folder: Path, superlink: str | None = None) -> dict[str, Check]:
    return last(keys(Settings(keys=str(folder), superlink=superlink)))


def test_good_keys_are_listed_with_their_names_and_last_day(tmp_path):
    Authority(tmp_path).server("fed.example", "localhost")
    found = key_checks(tmp_path, "fed.example:9300")
    assert [check.level for check in found.values()] == ["ok"] * 3
    day = (NOW + 365 * DAY).strftime("%Y-%m-%d")
    expected = f"certificate for fed.example, localhost, valid until {day}"
    assert found["keys server.pem"].found == expected


@pytest.mark.parametrize(
    ("change", "file", "level", "expected"),
    [
        ({"until": NOW - DAY}, "server.pem", "failure", "expired on"),
        ({"begin": NOW + DAY}, "server.pem", "failure", "valid only from"),
        ({"until": NOW + 20 * DAY}, "server.pem", "warning", "valid until"),
        ({"mode": 0o644}, "server.key", "failure", "others may read (mode 644)"),
    ],
)
def test_what_is_wrong_with_a_servers_keys(tmp_path, change, file, level, expected):
    Authority(tmp_path).server("fed.example", **change)
    check = key_checks(tmp_path)[f"keys {file}"]
    assert (check.level, check.code) == (level, 2 if level == "failure" else 0)
    assert expected in check.found
    assert check.advice


def test_a_certificate_for_another_host_says_which_it_is_for(tmp_path):
    Authority(tmp_path).server("fed.example")
    check = key_checks(tmp_path, "10.0.0.1:9300")["keys server.pem"]
    assert check.found == "certificate for fed.example, not good for 10.0.0.1"
    Authority(tmp_path).server("*.example")
    assert key_checks(tmp_path, "fed.example:9300")["keys server.pem"].level == "ok"
    Authority(tmp_path).server()
    assert "names no host" in key_checks(tmp_path)["keys server.pem"].found


def test_a_key_of_another_certificate_and_another_ca_are_found(tmp_path):
    authority = Authority(tmp_path)
    _, private = authority.server("fed.example")
    write_key(private, ec.generate_private_key(ec.SECP384R1()))
    assert "no private key beside it fits" in key_checks(tmp_path)["keys server.pem"].found
    authority.server("fed.example")
    Authority(tmp_path)  # Another CA in the place of the one that signed.
    assert "not signed by a CA" in key_checks(tmp_path)["keys server.pem"].found


def test_a_sites_keys_must_be_a_pair_of_a_kind_that_flower_takes(tmp_path):
    key = ec.generate_private_key(ec.SECP384R1())
    write_key(tmp_path / "site", key, form=PrivateFormat.OpenSSH)
    public = tmp_path / "site.pub"
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    assert {check.level for check in key_checks(tmp_path).values()} == {"ok"}
    other = ec.generate_private_key(ec.SECP384R1()).public_key()
    public.write_bytes(other.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    assert "does not belong" in key_checks(tmp_path)["keys site.pub"].found
    write_key(tmp_path / "site", ed25519.Ed25519PrivateKey.generate(), form=PrivateFormat.OpenSSH)
    assert "another kind" in key_checks(tmp_path)["keys site"].found


def test_a_key_with_a_passphrase_a_damaged_file_and_an_empty_folder(tmp_path):
    assert "no key or certificate" in key_checks(tmp_path)["keys"].found
    assert "no such folder" in key_checks(tmp_path / "none")["keys"].found
    write_key(tmp_path / "a.key", ec.generate_private_key(ec.SECP384R1()), password=b"secret")
    (tmp_path / "b.pem").write_text(
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    )
    found = key_checks(tmp_path)
    assert "passphrase" in found["keys a.key"].found
    assert found["keys b.pem"].found == "cannot be read: damaged"


def test_keys_in_the_layout_of_blend_keys_must_be_pairs_too(tmp_path):
    key = ec.generate_private_key(ec.SECP384R1())
    (tmp_path / "sites" / "ward").mkdir(parents=True)
    (tmp_path / "public-keys").mkdir()
    write_key(tmp_path / "sites" / "ward" / "node.key", key, form=PrivateFormat.OpenSSH)
    public = tmp_path / "public-keys" / "ward.pub"
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    assert {check.level for check in key_checks(tmp_path).values()} == {"ok"}
    other = ec.generate_private_key(ec.SECP384R1()).public_key()
    public.write_bytes(other.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    check = key_checks(tmp_path)["keys public-keys/ward.pub"]
    assert check.found == "does not belong to the private key of its name"
    public.rename(public.with_name("other.pub"))  # Its site was handed over.
    assert {check.level for check in key_checks(tmp_path).values()} == {"ok"}


def test_an_old_ca_beside_its_successor_keeps_no_site_out(tmp_path):
    folders = [tmp_path / name for name in ("old", "new")]
    for folder in folders:
        folder.mkdir()
    old = Authority(folders[0], until=NOW - DAY).path
    bundle = tmp_path / "bundle.crt"
    bundle.write_bytes(old.read_bytes() + Authority(folders[1]).path.read_bytes())
    assert root_certificates(bundle).level == "ok"
    assert root_certificates(old).level == "failure"


def test_a_ca_that_has_signed_nothing_here_is_named_although_the_right_one_is_there(tmp_path):
    for name in ("ca", "superlink", "other"):
        (tmp_path / name).mkdir()
    authority = Authority(tmp_path / "ca")
    server, private = authority.server("localhost")
    for file in (server, private):
        file.rename(tmp_path / "superlink" / file.name)
    Authority(tmp_path / "other").path.rename(tmp_path / "superlink" / "ca.crt")
    found = key_checks(tmp_path)
    assert found["keys superlink/server.pem"].level == "ok"
    assert found["keys ca/ca.crt"].level == "ok"
    check = found["keys superlink/ca.crt"]
    assert check.found == "CA certificate, has signed no certificate here"


SITE = """\
superlink: "localhost:9300"
client-name: "ward"
data-dir: {data}
state-dir: {state}
port: 9095
"""


def test_a_sites_folder_says_all_that_the_doctor_asks(blend, tmp_path, monkeypatch):
    folder = tmp_path / "ward"
    folder.mkdir()
    authority = Authority(folder)
    key = ec.generate_private_key(ec.SECP384R1())
    write_key(folder / "node.key", key, form=PrivateFormat.OpenSSH)
    (folder / "site.yaml").write_text(
        SITE.format(data=tmp_path / "photos", state=tmp_path / "state")
    )
    given = []
    monkeypatch.setattr(
        "deploy.checks.runner.examine", lambda settings, *_: given.append(settings) or []
    )
    assert blend("doctor", "--site", folder)[0] == 0
    (settings,) = given
    assert settings == Settings(
        state_dir=str(tmp_path / "state"),
        superlink="localhost:9300",
        root_certificates=str(authority.path),
        keys=str(folder),
        site=str(folder),
    )
    (folder / "site.yaml").unlink()
    code, _, error = blend("doctor", "--site", folder)
    assert (code, "site.yaml is missing" in error) == (2, True)


def test_a_servers_certificate_is_no_root(tmp_path):
    server, _ = Authority(tmp_path).server("fed.example")
    check = root_certificates(server)
    assert (check.level, check.code) == ("failure", 2)
    assert check.found == f"{server}: holds no CA, but a certificate for fed.example"
    bundle = tmp_path / "bundle.crt"
    bundle.write_bytes(server.read_bytes() + (tmp_path / "ca.crt").read_bytes())
    assert root_certificates(bundle).level == "ok"


# The SuperLink


@contextmanager
def server(tls: tuple[Path, Path] | None = None, answer: bytes = b"HTTP/1.1 200 OK\r\n\r\n"):
    """A server on a port of its own, which is yielded; it answers every connection alike."""
    context = None
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    link, _ = listening.accept()
                except OSError:
                    return
                with link:
                    link.settimeout(2)
                    try:
                        if context is not None:
                            link = context.wrap_socket(link, server_side=True)
                        if link.recv(1000) and answer:
                            link.sendall(answer)
                    except OSError:
                        pass
                    finally:
                        link.close()

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)


def link_check(where: str, root: Path | None = None) -> Check:
    settings = Settings(superlink=where, root_certificates=str(root) if root else None)
    return last(superlink(settings))["SuperLink"]


def test_nobody_listens_there():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    check = link_check(f"127.0.0.1:{port}")
    assert (check.level, check.code) == ("failure", 4)
    assert check.found == f"127.0.0.1:{port}: Connection refused"


def test_a_silent_server_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(superlink_checks, "PATIENCE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        check = link_check(f"127.0.0.1:{silent.getsockname()[1]}")
    assert check.level == "failure"
    assert time.monotonic() - begin < 3


def test_an_unknown_name():
    assert "name is unknown" in link_check("no-such-host.invalid:9300").found


def test_plaintext_on_this_machine_is_fine_and_elsewhere_a_warning(monkeypatch):
    with server() as port:
        assert link_check(f"127.0.0.1:{port}").level == "ok"
        monkeypatch.setattr(superlink_checks, "_is_loopback", lambda host: False)
        check = link_check(f"127.0.0.1:{port}")
    assert check.level == "warning"
    assert "nothing is encrypted" in check.found


def test_tls_with_the_right_ca_is_fine(tmp_path):
    authority = Authority(tmp_path)
    with server(authority.server("localhost")) as port:
        found = last(
            superlink(
                Settings(superlink=f"localhost:{port}", root_certificates=str(authority.path))
            )
        )
    assert [check.level for check in found.values()] == ["ok"]


def test_a_certificate_that_expires_soon_is_a_warning_beside(tmp_path):
    authority = Authority(tmp_path)
    with server(authority.server("localhost", until=NOW + 10 * DAY)) as port:
        settings = Settings(superlink=f"localhost:{port}", root_certificates=str(authority.path))
        found = last(superlink(settings))
    assert found["SuperLink's certificate"].level == "warning"
    assert found["SuperLink"].level == "ok"


def test_tls_and_plaintext_that_do_not_fit_together(tmp_path):
    authority = Authority(tmp_path)
    with server(authority.server("localhost")) as port:
        check = link_check(f"localhost:{port}")
    assert check.found == f"localhost:{port} wants TLS"
    assert "--root-certificates" in check.advice
    with server() as port:
        check = link_check(f"localhost:{port}", authority.path)
    assert (check.level, check.code) == ("failure", 4)
    assert "does not speak TLS" in check.found


@pytest.mark.parametrize(
    ("hosts", "change", "expected"),
    [
        (["fed.example"], {}, "its certificate is for fed.example"),
        (["localhost"], {"until": NOW - DAY}, "expired on"),
        (["localhost"], {"begin": NOW + DAY}, "valid only from"),
    ],
)
def test_a_certificate_that_is_refused_says_why(tmp_path, hosts, change, expected):
    authority = Authority(tmp_path)
    with server(authority.server(*hosts, **change)) as port:
        check = link_check(f"localhost:{port}", authority.path)
    assert (check.level, check.code) == ("failure", 4)
    assert expected in check.found


def test_a_ca_whose_time_is_over_is_told_from_its_servers_certificate(tmp_path):
    authority = Authority(tmp_path, until=NOW - DAY)
    with server(authority.server("localhost")) as port:
        check = link_check(f"localhost:{port}", authority.path)
    assert (check.level, check.code) == ("failure", 4)
    day = (NOW - DAY).strftime("%Y-%m-%d")
    assert f"{authority.path}: CA certificate, expired on {day}" in check.found
    assert check.advice.startswith("ask the server's operator for a new one")


@pytest.mark.parametrize("content", [None, "junk"])
def test_without_a_usable_ca_the_superlink_is_not_blamed(tmp_path, content):
    authority = Authority(tmp_path)
    root = tmp_path / "root.crt"
    if content is not None:
        root.write_text(content)
    with server(authority.server("localhost")) as port:
        check = link_check(f"localhost:{port}", root)
    assert (check.level, check.done) == ("warning", True)
    assert check.found == f"localhost:{port} answers; not tried with TLS"
    assert root_certificates(root).level == "failure"


def test_a_wrong_ca_is_named(tmp_path):
    (tmp_path / "other").mkdir()
    authority, other = Authority(tmp_path), Authority(tmp_path / "other")
    with server(authority.server("localhost")) as port:
        check = link_check(f"localhost:{port}", other.path)
    assert f"not signed by {other.path}" in check.found


# What needs torch


def model_checks(experiment, tmp_path: Path, monkeypatch, **given: str) -> dict[str, Check]:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "experiment.yaml"
    config.write_text(
        yaml.safe_dump(experiment if isinstance(experiment, dict) else experiment.to_json())
    )
    return last(model(Settings(config=str(config), **given)))


@pytest.fixture
def small(tiny_experiment, tower):
    return tiny_experiment(backbone=tower("tower_a").model_dump())


def test_all_is_well_with_a_good_configuration(small, tmp_path, monkeypatch):
    found = model_checks(small, tmp_path, monkeypatch)
    assert {check.level for check in found.values()} == {"ok"}
    assert set(found) == {"torch", "configuration", "device", "backbone", "room for a run", "data"}
    assert [p.name for p in tmp_path.iterdir()] == ["experiment.yaml"]


def test_a_wrong_setting_is_the_line_that_a_run_would_show(tmp_path, monkeypatch):
    found = model_checks({"rouns": 3}, tmp_path, monkeypatch)
    check = found["configuration"]
    assert (check.level, check.code) == ("failure", 2)
    assert check.found.startswith("rouns: unknown key")


def test_a_cuda_device_that_is_not_there(small, tmp_path, monkeypatch):
    experiment = small.to_json()
    experiment["train"]["device"] = "cuda:77"
    check = model_checks(experiment, tmp_path, monkeypatch)["device"]
    assert (check.level, check.code) == ("failure", 2)
    assert "CUDA devices here" in check.found


def test_weights_that_are_damaged(small, tmp_path, monkeypatch):
    experiment = small.to_json()
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(Path(experiment["backbone"]["weights"]).read_bytes()[:1000])
    experiment["backbone"]["weights"] = str(broken)
    check = model_checks(experiment, tmp_path, monkeypatch)["backbone"]
    assert (check.level, check.code) == ("failure", 2)
    assert "cannot be read" in check.found


def test_openai_weights_without_quickgelu_are_found(small, tmp_path, monkeypatch):
    from safetensors.torch import load_file, save_file

    experiment = small.to_json()
    # Half-precision values are how OpenAI's weights are recognised.
    halves = {k: v.half() for k, v in load_file(experiment["backbone"]["weights"]).items()}
    save_file(halves, tmp_path / "openai.safetensors")
    description = json.loads(Path(experiment["backbone"]["name"]).read_text())
    description.get("model_cfg", description)["quick_gelu"] = False
    (tmp_path / "model.json").write_text(json.dumps(description))
    experiment["backbone"] |= {
        "name": str(tmp_path / "model.json"),
        "weights": str(tmp_path / "openai.safetensors"),
    }
    check = model_checks(experiment, tmp_path, monkeypatch)["backbone"]
    assert check.level == "failure"
    assert "need QuickGELU" in check.found


def test_the_states_of_a_run_are_counted(small):
    # blend's shared and private parts, float32, in what is kept and one more.
    from blend_core.backbone import Backbone
    from blend_core.methods import build_method

    counts = build_method(
        small.method, Backbone.describe(small.backbone), small.seed
    ).parameter_counts()
    server, client = state_bytes(small)
    assert server == 4 * counts["shared"] * (3 + 1)
    # Of four rounds that are kept, one that is written, four that a resumed run abandoned.
    assert client == 4 * counts["private"] * 9
    stale = parse_experiment({**small.to_json(), "server": {"aggregate_stale": True}})
    # Two clients' uploads beside the mean.
    assert state_bytes(stale)[0] == 3 * server


@pytest.mark.parametrize(("free", "level"), [(1000, "failure"), (2**28, "warning")])
def test_a_disk_that_is_too_full(small, tmp_path, monkeypatch, free, level):
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr("deploy.checks.model.shutil.disk_usage", lambda folder: usage)
    check = model_checks(small, tmp_path, monkeypatch)["room for a run"]
    assert (check.level, check.code) == (level, 3 if level == "failure" else 0)


def test_every_sites_folder_is_examined(tiny_experiment, tower, tmp_path, monkeypatch):
    root = tmp_path / "sites"
    for name in ("site-a", "site-b"):
        for class_name in ("cat", "dog"):
            folder = root / name / "train" / class_name
            folder.mkdir(parents=True)
            for number in range(2):
                colour = (number * 40, len(class_name + name), ord(class_name[0]))
                Image.new("RGB", (32, 32), colour).save(folder / f"{number}.png")
    data = {"kind": "folders", "root": str(root)}
    experiment = tiny_experiment(data=data, backbone=tower("tower_a").model_dump())
    found = model_checks(experiment, tmp_path, monkeypatch)
    assert found["data site-a"].level != "failure"
    (root / "site-b" / "train" / "cat" / "0.png").write_bytes(b"no image")
    check = model_checks(experiment, tmp_path, monkeypatch)["data site-b"]
    assert (check.level, check.code) == ("failure", 3)
    assert check.found.startswith("E06")
    assert "blend data check" in check.advice


def test_the_images_of_a_site_are_examined(small, tmp_path, monkeypatch):
    folder = tmp_path / "ward"
    folder.mkdir()
    (tmp_path / "photos" / "train").mkdir(parents=True)
    Image.new("RGB", (40, 40)).save(tmp_path / "photos" / "train" / "stray.png")
    (folder / "site.yaml").write_text(
        SITE.format(data=tmp_path / "photos", state=tmp_path / "state")
    )
    check = model_checks(small, tmp_path, monkeypatch, site=str(folder))["data photos"]
    assert (check.level, check.code) == ("failure", 3)
    assert "E0" in check.found
    (folder / "site.yaml").write_text("client-name: [1]\n")
    check = model_checks(small, tmp_path, monkeypatch, site=str(folder))["site.yaml"]
    assert (check.level, check.code) == ("failure", 2)


def test_a_missing_data_set_is_code_3(tiny_experiment, tower, tmp_path, monkeypatch):
    experiment = tiny_experiment(backbone=tower("tower_a").model_dump()).to_json()
    experiment["data"] = {"kind": "oxford_pets", "root": str(tmp_path)}
    check = model_checks(experiment, tmp_path, monkeypatch)["data"]
    assert (check.level, check.code) == ("failure", 3)


# The command


def test_the_exit_code_is_that_of_what_has_to_be_mended_first():
    two, three, four = (failure("x", "", "", code) for code in (2, 3, 4))
    assert exit_code([ok("x", ""), warning("x", "", "")]) == 0
    assert exit_code([four, ok("x", "")]) == 4
    assert exit_code([four, three]) == 3
    assert exit_code([four, three, two]) == 2


def test_checks_that_do_not_end_in_time_say_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begin = time.monotonic()
    found = {check.name: check for check in examine(Settings(), 1.0)}
    assert time.monotonic() - begin < 5
    check = found.get("torch") or found["model"]
    assert check.level == "failure"
    assert check.found.endswith("not finished within 1 s")
    assert "--timeout" in check.advice
    assert all(check.done for check in found.values())


def test_a_group_that_crashes_is_a_failure_that_says_how(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'deploy.checks' in sys.orig_argv:\n    os.kill(os.getpid(), 11)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = examine(Settings(), 10.0)
    assert [check.name for check in found] == ["machine", "model", "site", "superlink"]
    assert "its process ended (signal 11)" in found[0].found


def test_a_process_that_says_nothing_more_but_stays_is_not_waited_for(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\nif 'deploy.checks' in sys.orig_argv:\n"
        "    os.close(1)\n    time.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(runner, "_PATIENCE", 0.2)
    found = examine(Settings(), 10.0)
    assert [check.level for check in found] == ["failure"] * 4
    assert "did not end within 0.2 s" in found[0].found


def test_a_process_that_cannot_be_killed_is_left_behind_with_a_line(monkeypatch):
    class Stuck:
        """As one that waits for a dead network mount."""

        pid = 77

        def kill(self) -> None:
            pass

        def wait(self, timeout: float) -> int:
            raise subprocess.TimeoutExpired("stuck", timeout)

    monkeypatch.setattr(runner, "_start", lambda *_: Stuck())
    found = examine(Settings(), 0.0)
    assert [check.name for check in found] == list(runner.GROUPS)
    assert found[0].found == "not finished within 0 s, and process 77 cannot be killed"
    assert "network mount" in found[0].advice


def test_a_wrong_address_is_wrong_usage(blend):
    code, out, errors = blend("doctor", "--superlink", "server")
    assert (code, out) == (2, "")
    assert "must be HOST:PORT" in errors


@pytest.mark.slow
def test_the_table_and_the_json_of_a_healthy_machine(blend, small, tmp_path):
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(small.to_json()))
    before = sorted(tmp_path.rglob("*"))
    code, out, _ = blend("doctor", config, "--json", "--timeout", 120)
    result = json.loads(out)
    assert code == result["exit_code"] == 0
    assert set(result["checks"][0]) == {"name", "level", "found", "advice", "code"}
    code, out, _ = blend("doctor", config, "--set", "rounds=0", "--timeout", 120)
    assert code == 2
    assert "rounds = 0" in " ".join(out.split())
    assert sorted(tmp_path.rglob("*")) == before
