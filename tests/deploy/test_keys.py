"""`blend keys` and `blend site start`: what is written, for whom, and what is refused."""

from __future__ import annotations

import errno
import os
import shutil
import ssl
import subprocess
import threading
from pathlib import Path

import pytest
import yaml
from cryptography import x509

from blend_core.errors import ConfigError, SiteError
from blend_core.state import StateError
from deploy import certificates
from deploy.certificates import host_names, load_certificate
from deploy.site_start import supernode_command


@pytest.fixture
def federation(blend, tmp_path: Path) -> Path:
    folder = tmp_path / "fed"
    code, _, error = blend("keys", "create-federation", folder, "--host", "FL.example.org")
    assert code == 0, error
    return folder


@pytest.fixture
def site(blend, federation: Path, tmp_path: Path) -> Path:
    """A site's folder, filled in at the site."""
    assert blend("keys", "add-site", federation, "hospital-a")[0] == 0
    folder = federation / "sites" / "hospital-a"
    settings = yaml.safe_load((folder / "site.yaml").read_text())
    (tmp_path / "photos").mkdir()
    settings |= {"data-dir": str(tmp_path / "photos"), "state-dir": str(tmp_path / "state")}
    (folder / "site.yaml").write_text(yaml.safe_dump(settings))
    return folder


def handshake(server: Path, authority: Path, name: str) -> None:
    """One TLS connection over a pair of sockets, as strict as a client can be."""
    import socket

    ours, theirs = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server / "server.crt", server / "server.key")

    def serve() -> None:
        try:
            context.wrap_socket(theirs, server_side=True).close()
        except OSError:
            theirs.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        client = ssl.create_default_context(cafile=authority)
        client.verify_flags |= ssl.VERIFY_X509_STRICT
        client.wrap_socket(ours, server_hostname=name).close()
    finally:
        ours.close()
        thread.join(timeout=5)


def test_a_client_with_the_ca_trusts_the_server_by_its_names_only(federation):
    server, authority = federation / "superlink", federation / "superlink" / "ca.crt"
    handshake(server, authority, "fl.example.org")
    # The SuperLink's own helpers call it by this.
    handshake(server, authority, "127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for"):
        handshake(server, authority, "other.example.org")


def test_another_federations_ca_does_not_vouch_for_the_server(federation, blend, tmp_path):
    other = tmp_path / "other"
    assert blend("keys", "create-federation", other, "--host", "fl.example.org")[0] == 0
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(federation / "superlink", other / "ca" / "ca.crt", "fl.example.org")


def test_private_keys_are_for_their_owner_alone_and_the_cas_stays_apart(federation, site):
    private = [federation / "ca" / "ca.key", federation / "superlink" / "server.key"]
    for path in [*private, site / "node.key"]:
        assert path.stat().st_mode & 0o777 == 0o600, path
    assert federation.stat().st_mode & 0o077 == 0
    secret = (federation / "ca" / "ca.key").read_text().splitlines()[1]
    for folder in (federation / "superlink", site):
        for path in folder.iterdir():
            assert secret not in path.read_text(), path
    assert {p.name for p in site.iterdir()} == {"README.txt", "ca.crt", "node.key", "site.yaml"}


def test_flower_reads_a_sites_keys(federation, site):
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    private = load_ssh_private_key((site / "node.key").read_bytes(), None)
    public = try_load_public_key(federation / "public-keys" / "hospital-a.pub")
    assert public_key_to_bytes(private.public_key()) == public


def test_nothing_is_overwritten(federation, site, blend):
    before = {p: p.read_bytes() for p in federation.rglob("*") if p.is_file()}
    code, _, error = blend("keys", "create-federation", federation, "--host", "a.org")
    assert (code, "exists" in error) == (2, True)
    code, _, error = blend("keys", "add-site", federation, "hospital-a")
    assert (code, "hospital-a has a key" in error) == (2, True)
    shutil.rmtree(site)  # Handed over: the name is still taken.
    assert blend("keys", "add-site", federation, "hospital-a")[0] == 2
    left = {p: p.read_bytes() for p in federation.rglob("*") if p.is_file()}
    assert left == {p: data for p, data in before.items() if site not in p.parents}
    assert not list(federation.parent.glob(".fed*"))


def test_a_site_that_could_not_be_made_leaves_no_public_key_to_register(
    federation, blend, monkeypatch
):
    site, public_keys = federation / "sites" / "a", federation / "public-keys"
    site.mkdir()
    (site / "notes.txt").write_text("mine")
    code, _, error = blend("keys", "add-site", federation, "a")
    assert (code, f"{site} exists" in error) == (2, True)
    assert [p.name for p in site.iterdir()] == ["notes.txt"]
    assert list(public_keys.iterdir()) == []
    # Nor is there a private key without its public one.
    monkeypatch.setattr(certificates, "public_key_file", lambda *_: federation / "b" / "c" / "d")
    assert blend("keys", "add-site", federation, "b")[0] != 0
    assert not (federation / "sites" / "b").exists()
    monkeypatch.undo()
    assert blend("keys", "add-site", federation, "b")[0] == 0


def test_a_folder_that_cannot_be_made_is_not_said_to_exist(federation, monkeypatch):
    def rename(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(StateError, match="cannot be created: Read-only file system"):
        certificates.create_federation(federation.parent / "other", ["a.org"], 1, {})


@pytest.mark.parametrize("command", ["add-site", "renew", "show"])
def test_a_foreign_ca_in_the_place_of_ours_is_named(federation, blend, tmp_path, command):
    other = tmp_path / "other"
    assert blend("keys", "create-federation", other, "--host", "b.org")[0] == 0
    shutil.copy(other / "superlink" / "ca.crt", federation / "superlink" / "ca.crt")
    code, said, error = blend(
        "keys", command, federation, *(["x"] if command == "add-site" else [])
    )
    if command == "show":
        assert (code, "not signed by the CA in ca.crt" in said) == (0, True)
        return
    assert (code, "ca.crt is not the CA " in error) == (2, True)
    assert not (federation / "sites" / "x").exists()


@pytest.mark.parametrize("inside", ["new", "deeper/new"])
def test_a_file_in_the_place_of_the_folder_above_is_named(blend, tmp_path, inside):
    file = tmp_path / "file"
    file.write_text("")
    code, _, error = blend("keys", "create-federation", file / inside, "--host", "a.org")
    assert code == 2
    assert "cannot be created: " in error
    assert " is a file" in error


def test_a_site_whose_key_may_have_been_copied_gets_a_new_one_under_its_name(
    federation, site, blend
):
    public = federation / "public-keys" / "hospital-a.pub"
    old = public.read_bytes()
    code, _, error = blend("keys", "add-site", federation, "hospital-a")
    assert (code, f"remove this file and {site}" in error) == (2, True)
    shutil.rmtree(site)
    public.unlink()
    assert blend("keys", "add-site", federation, "hospital-a")[0] == 0
    assert public.read_bytes() != old


def test_a_private_key_without_its_public_one_is_kept_and_told(federation, site, blend):
    public = federation / "public-keys" / "hospital-a.pub"
    public.unlink()  # What an add-site that was killed leaves.
    private = (site / "node.key").read_bytes()
    code, _, error = blend("keys", "add-site", federation, "hospital-a")
    assert (code, f"{site} has a key without {public}; restore" in error) == (2, True)
    assert (site / "node.key").read_bytes() == private
    assert not public.exists()


@pytest.mark.parametrize("host", ["fl.example.org:9300", "10.0.0.500", "a b", "", "a..b", "*.org"])
def test_a_host_that_is_no_name_or_address_is_refused_before_anything_is_made(
    blend, tmp_path, host
):
    code, _, error = blend("keys", "create-federation", tmp_path / "new", "--host", host)
    assert (code, "must be a DNS name or an IP address" in error) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_addresses_go_into_the_certificate_as_addresses(blend, tmp_path):
    hosts = ["--host", "::1", "--host", "10.0.0.5", "--host", "localhost"]
    assert blend("keys", "create-federation", tmp_path / "fed", *hosts)[0] == 0
    certificate = load_certificate(tmp_path / "fed" / "superlink" / "server.crt")
    assert host_names(certificate) == ["::1", "10.0.0.5", "localhost", "127.0.0.1"]
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert blend("keys", "add-site", tmp_path / "fed", "a")[0] == 0
    text = (tmp_path / "fed" / "sites" / "a" / "site.yaml").read_text()
    assert yaml.safe_load(text)["superlink"] == "[::1]:9300"


def test_a_site_is_not_sent_where_the_certificate_does_not_hold(federation, blend):
    for address in ("elsewhere.org:9300", "fl.example.org", "fl.example.org:0"):
        code, _, error = blend("keys", "add-site", federation, "a", "--superlink", address)
        assert (code, address in error) == (2, True), address
    assert list((federation / "public-keys").iterdir()) == []
    code, _, error = blend("keys", "add-site", federation, "../evil")
    assert (code, "must be 1 to 64 letters" in error) == (2, True)


def test_renewal_keeps_the_ca_and_may_change_the_names(federation, blend):
    old = load_certificate(federation / "superlink" / "server.crt")
    authority = (federation / "ca" / "ca.crt").read_bytes()
    assert blend("keys", "renew", federation, "--days", "10")[0] == 0
    new = load_certificate(federation / "superlink" / "server.crt")
    assert new.serial_number != old.serial_number
    assert host_names(new) == host_names(old)
    assert (new.not_valid_after_utc - new.not_valid_before_utc).days == 11  # One backdated.
    assert blend("keys", "renew", federation, "--host", "new.org")[0] == 0
    handshake(federation / "superlink", federation / "superlink" / "ca.crt", "new.org")
    assert (federation / "superlink" / "ca.crt").read_bytes() == authority
    shutil.rmtree(federation / "ca")
    code, _, error = blend("keys", "renew", federation)
    assert (code, "ca.crt is missing; bring the folder `ca` back" in error) == (2, True)


def test_renewal_replaces_one_file_so_that_key_and_certificate_always_fit(federation, blend):
    superlink = federation / "superlink"
    key = (superlink / "server.key").read_bytes()
    code, said, _ = blend("keys", "renew", federation)
    assert (code, said) == (0, f"{superlink}: copy server.crt to the server and restart it\n")
    assert (superlink / "server.key").read_bytes() == key
    handshake(superlink, superlink / "ca.crt", "fl.example.org")
    # A key that may have been copied goes; the next one is made with its certificate.
    (superlink / "server.key").unlink()
    code, said, _ = blend("keys", "renew", federation)
    assert (code, "copy server.key and server.crt" in said) == (0, True)
    assert (superlink / "server.key").read_bytes() != key
    handshake(superlink, superlink / "ca.crt", "fl.example.org")
    # Killed between the two, or a backup of one: it is told, and mended by the same command.
    (superlink / "server.key").write_bytes(key)
    assert (
        "server.key is of another certificate; blend keys renew"
        in blend("keys", "show", federation)[1]
    )
    assert blend("keys", "renew", federation)[0] == 0
    assert "of another certificate" not in blend("keys", "show", federation)[1]
    handshake(superlink, superlink / "ca.crt", "fl.example.org")


@pytest.mark.parametrize("name", ["123", "007", "1e3", "0x10", "yes", "on", "null", "2024-01-01"])
def test_a_name_that_yaml_would_read_as_something_else_stays_a_name(federation, blend, name):
    assert blend("keys", "add-site", federation, name)[0] == 0
    site = federation / "sites" / name
    text = (site / "site.yaml").read_text()  # As a person edits it.
    (site / "site.yaml").write_text(text.replace("/data/photos", str(federation)))
    command = supernode_command(site)
    assert f"client-name='{name}'" in command[command.index("--node-config") + 1]


def test_show_tells_expiry_names_and_the_fingerprint_of_ssh_keygen(federation, site, blend):
    assert blend("keys", "renew", federation, "--days", "20")[0] == 0
    code, out, _ = blend("keys", "show", federation)
    assert code == 0
    assert "SuperLink: for fl.example.org, 127.0.0.1\n" in out
    assert "19 days left" in out
    assert "blend keys renew" in out
    assert f"private key still in {site / 'node.key'}" in out
    if shutil.which("ssh-keygen"):
        public = str(federation / "public-keys" / "hospital-a.pub")
        printed = subprocess.run(["ssh-keygen", "-lf", public], capture_output=True, check=True)
        assert f"site hospital-a: {printed.stdout.decode().split()[1]};" in out


@pytest.mark.parametrize(
    ("damaged", "what"),
    [
        ("superlink/server.crt", "is not a certificate in PEM"),
        ("public-keys/hospital-a.pub", "not a public key"),
    ],
)
def test_a_damaged_file_is_named(federation, site, blend, damaged, what):
    (federation / damaged).write_text("junk")
    code, _, error = blend("keys", "show", federation)
    assert (code, f"{federation / damaged}: " in error, what in error) == (2, True, True)
    assert "restore it from a backup" in error


def test_the_site_starts_by_tls_with_its_key_and_never_otherwise(site, tmp_path):
    command = supernode_command(site)
    assert command[0].endswith("flower-supernode")
    assert "--insecure" not in command
    for option, value in {
        "--superlink": "fl.example.org:9300",
        "--root-certificates": str(site / "ca.crt"),
        "--auth-supernode-private-key": str(site / "node.key"),
        "--port": "9094",
    }.items():
        assert command[command.index(option) + 1] == value
    config = command[command.index("--node-config") + 1]
    assert "client-name='hospital-a'" in config
    assert f"data-dir='{tmp_path}/photos'" in config


def test_the_readme_has_the_command_that_site_start_composes(site):
    readme = (site / "README.txt").read_text()
    options = {part for part in supernode_command(site) if part.startswith("--")}
    # The port of the local API is Flower's own unless site.yaml says otherwise.
    assert {o for o in options if o in readme} == options - {"--port"}
    assert "--insecure" not in readme


def change(site: Path, **values: object) -> None:
    settings = yaml.safe_load((site / "site.yaml").read_text())
    settings |= {key.replace("_", "-"): value for key, value in values.items()}
    (site / "site.yaml").write_text(yaml.safe_dump(settings))


def test_a_wrong_setting_of_a_site_is_named_before_anything_starts(site):
    for values, reason in (
        ({"superlink": "http://fl.example.org"}, "superlink"),
        ({"port": 0}, "port"),
        ({"insecure": True}, "insecure: unknown key"),
        ({"client_name": "../a"}, "client-name"),
        ({"worker_idle": "long"}, "worker-idle"),
    ):
        before = (site / "site.yaml").read_text()
        change(site, **values)
        with pytest.raises(ConfigError, match=reason):
            supernode_command(site)
        (site / "site.yaml").write_text(before)
    for text, reason in (
        ("- a\n", "must hold lines"),
        ("", "must hold lines"),
        ("a: [1]\n", r"a = \[1\]: must be"),
        ("policy:\n", "policy has no value"),
        ("policy: /a\npolicy: /b\n", "'policy' is given twice"),
        ("a: {", "not valid YAML"),
        ("\0", "not valid YAML"),
    ):
        (site / "site.yaml").write_text(text)
        with pytest.raises(ConfigError, match=rf"site\.yaml: .*{reason}"):
            supernode_command(site)


def test_a_site_with_an_open_missing_or_broken_key_does_not_start(site, tmp_path):
    key = site / "node.key"
    key.chmod(0o640)
    with pytest.raises(SiteError, match="chmod 600"):
        supernode_command(site)
    key.chmod(0o600)
    shutil.copyfile(site.parent.parent / "superlink" / "server.key", key)
    with pytest.raises(SiteError, match=r"node\.key: is no private key of OpenSSH"):
        supernode_command(site)
    key.write_text("broken")
    with pytest.raises(SiteError, match=r"node\.key"):
        supernode_command(site)
    key.unlink()
    with pytest.raises(SiteError, match=r"node\.key"):
        supernode_command(site)
    (site / "ca.crt").write_text("broken")
    with pytest.raises(SiteError, match=r"ca\.crt"):
        supernode_command(site)
    (tmp_path / "photos").rmdir()
    with pytest.raises(SiteError, match="data-dir"):
        supernode_command(site)


def test_a_site_hears_of_its_cas_end_and_from_whom_it_gets_another(
    blend, tmp_path, monkeypatch, site, capsys
):
    day = "ask the server's operator for a new one"
    make_ca(monkeypatch, tmp_path / "soon", 20)
    shutil.copyfile(tmp_path / "soon" / "superlink" / "ca.crt", site / "ca.crt")
    supernode_command(site)
    printed = capsys.readouterr().out
    assert f"warning: {site / 'ca.crt'}: CA certificate, valid until" in printed
    assert f"{day} before that day" in printed
    make_ca(monkeypatch, tmp_path / "over", -1)
    shutil.copyfile(tmp_path / "over" / "superlink" / "ca.crt", site / "ca.crt")
    with pytest.raises(SiteError, match=rf"ca\.crt: CA certificate, expired on .*; {day}"):
        supernode_command(site)


def make_ca(monkeypatch: pytest.MonkeyPatch, folder: Path, days: int) -> None:
    """A federation whose CA is good for so many days, backdated by two."""
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "CA_DAYS", days)
        patch.setattr(certificates, "_BACKDATED", certificates._BACKDATED * 2)
        certificates.create_federation(folder, ["a.org"], max(days, 1), {})
