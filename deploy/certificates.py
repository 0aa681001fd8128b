"""Certificates and keys of a federation: one CA, one SuperLink, one key per site.

What lies where:

    DIR/ca/            ca.key (0600), ca.crt: only to renew certificates; keep it off the server
    DIR/superlink/     ca.crt, server.crt, server.key (0600), README.txt: for the server
    DIR/sites/NAME/    ca.crt, node.key (0600), site.yaml, README.txt: to hand over to a site
    DIR/public-keys/   NAME.pub: to register with the SuperLink

Certificates are X.509 (RFC 5280) in PEM. A site's key is in OpenSSH's format on NIST's P-384,
which is what Flower 1.42 reads and what it makes itself.
"""

from __future__ import annotations

import datetime
import errno
import ipaddress
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from blend_core.errors import ConfigError
from blend_core.state import StateError, write_bytes_atomic

CA_DAYS = 3650
# What is left of a certificate's time when its owner is told to make the next one.
SOON = datetime.timedelta(days=30)
# With --host 0.0.0.0 the SuperLink's own helpers call it by this address.
LOOPBACK = "127.0.0.1"
# A site whose clock is a little behind must not find the certificate not yet valid.
_BACKDATED = datetime.timedelta(days=1)
_CURVE = ec.SECP384R1()
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")
# What renaming a folder onto something says (rename(2)); the last one onto a file.
_IN_THE_WAY = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_PRIVATE = 0o600
_PUBLIC = 0o644

# Content and permissions by name.
Files = dict[str, tuple[bytes, int]]


def create_federation(
    folder: Path, hosts: Sequence[str], days: int, texts: Mapping[str, str]
) -> None:
    """Make a CA and the SuperLink's certificate in a new folder, all of it or nothing.

    Args:
        folder: new or empty.
        hosts: DNS names and IP addresses under which sites reach the SuperLink.
        days: validity of the SuperLink's certificate, 1 to `CA_DAYS`.
        texts: further files of the SuperLink's folder, by name.

    Raises:
        ConfigError: the folder holds something, or a host is neither name nor address.
        StateError: the folder cannot be written.
    """
    names = _alternative_names(hosts)
    key = ec.generate_private_key(_CURVE)
    authority = _certificate("BLEND federation CA", key, key, None, _until(CA_DAYS), None)
    with _new_folder(folder) as draft:
        _write(draft / "ca", {"ca.key": _private_pem(key), "ca.crt": _public_pem(authority)})
        server_key = ec.generate_private_key(_CURVE)
        superlink = {
            "ca.crt": _public_pem(authority),
            "server.key": _private_pem(server_key),
            "server.crt": _server_certificate(server_key, key, authority, names, days),
        }
        _write(draft / "superlink", superlink | _texts(texts))
        (draft / "sites").mkdir()
        (draft / "public-keys").mkdir()


def renew(folder: Path, hosts: Sequence[str], days: int) -> list[str]:
    """Give the SuperLink a new certificate from the same CA; sites need nothing new.

    Its key stays, so that one file is replaced and the pair fits whenever this is stopped. Where
    there is no `server.key`, a new one is made.

    Args:
        folder: of `create_federation`, with `ca/ca.key` in place.
        hosts: as `create_federation`; none: those of the certificate before.
        days: as `create_federation`.

    Returns:
        Names of the files of `superlink` that are new.

    Raises:
        ConfigError: no such federation, a wrong host, a damaged key, or the CA ends before the
            certificate.
        StateError: a file cannot be written.
    """
    back = "bring the folder `ca` back from where you keep it"
    authority = load_certificate(folder / "ca" / "ca.crt", back)
    key = _load_key(folder / "ca" / "ca.key", back)
    if key.public_key() != authority.public_key():
        raise ConfigError(f"{folder / 'ca'}: ca.key is not the key of ca.crt")
    if _until(days) > authority.not_valid_after_utc:
        raise ConfigError(
            f"--days {days}: the CA ends before, on {authority.not_valid_after_utc:%Y-%m-%d}; "
            "give fewer days, or create a new federation"
        )
    superlink = folder / "superlink"
    if load_certificate(superlink / "ca.crt") != authority:
        raise ConfigError(
            f"{superlink / 'ca.crt'} is not the CA in {folder / 'ca'}, and sites trust the file "
            "that they were given; bring back the one that belongs here"
        )
    hosts = hosts or host_names(load_certificate(superlink / "server.crt"))
    names = _alternative_names(hosts)
    new: Files = {}
    if (superlink / "server.key").exists():
        server_key = _load_key(superlink / "server.key", "")
    else:
        server_key = ec.generate_private_key(_CURVE)
        new["server.key"] = _private_pem(server_key)
    new["server.crt"] = _server_certificate(server_key, key, authority, names, days)
    _write(superlink, new)
    return list(new)


def _own_ca(superlink: Path) -> x509.Certificate:
    """The CA that sites are given. Raises `ConfigError` if the SuperLink's is of another one."""
    authority = load_certificate(superlink / "ca.crt")
    if not is_signed(load_certificate(superlink / "server.crt"), authority):
        raise ConfigError(
            f"{superlink / 'ca.crt'} is not the CA of server.crt, so a site with it would trust "
            "another server; bring back the one that belongs here"
        )
    return authority


def is_signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether an authority has signed a certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def is_pair(superlink: Path) -> bool:
    """Whether the SuperLink's key, as far as it is here, is that of its certificate.

    Raises:
        ConfigError: a file is damaged.
    """
    if not (superlink / "server.key").exists():
        return True
    key = _load_key(superlink / "server.key", "")
    return key.public_key() == load_certificate(superlink / "server.crt").public_key()


def add_site(folder: Path, name: str, texts: Mapping[str, str]) -> Path:
    """Make a site's key and the folder to hand over.

    Args:
        folder: of `create_federation`.
        name: the client name, a plain name (`blend_core.names`).
        texts: further files of the site's folder, by name.

    Returns:
        The site's folder.

    Raises:
        ConfigError: no such federation, or the site exists.
        StateError: a file cannot be written.
    """
    authority = _own_ca(folder / "superlink")
    public = public_key_file(folder, name)
    site = folder / "sites" / name
    if public.exists():
        raise ConfigError(
            f"{public} exists: {name} has a key; choose another name, or for a new key remove "
            f"this file and {site} and unregister the old one"
        )
    if (site / "node.key").exists():  # Left by an add-site that was killed, for one.
        raise ConfigError(
            f"{site} has a key without {public}; restore that file, or for a new key remove "
            "this folder and unregister the old key"
        )
    key = ec.generate_private_key(_CURVE)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    line = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    with _new_folder(site) as draft:
        keys = {"node.key": (private, _PRIVATE), "ca.crt": _public_pem(authority)}
        _write(draft, keys | _texts(texts))
    # Last: what lies among the public keys is registered, so its private key must be there.
    try:
        _write(public.parent, {public.name: (line + f" {name}\n".encode(), _PUBLIC)})
    except BaseException:
        shutil.rmtree(site, ignore_errors=True)
        raise
    return site


def public_key_file(folder: Path, name: str) -> Path:
    """Where a site's public key lies in a federation's folder."""
    return folder / "public-keys" / f"{name}.pub"


def load_certificate(
    path: Path, missing: str = "blend keys create-federation makes it"
) -> x509.Certificate:
    """Read a PEM certificate. Raises `ConfigError` naming the file; `missing`: how to get it."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; {missing}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(
            f"{path}: is not a certificate in PEM; restore it from a backup"
        ) from None


def host_names(certificate: x509.Certificate) -> list[str]:
    """The DNS names and IP addresses a certificate is for, in its order; none: it names no host."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return [str(n.value) for n in extension.value if isinstance(n, x509.DNSName | x509.IPAddress)]


def _alternative_names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for host in [*hosts, LOOPBACK]:
        name: x509.GeneralName
        try:
            address = ipaddress.ip_address(host)
            if address.is_unspecified:
                raise ConfigError(
                    f"--host {host}: no site can call this address; name the server's"
                )
            name = x509.IPAddress(address)
        except ValueError:
            # A name's last label has a letter; 10.0.0.500 is a mistyped address.
            if not _HOST.fullmatch(host) or not re.search(r"[A-Za-z]", host.rpartition(".")[2]):
                raise ConfigError(
                    f"--host {host!r}: must be a DNS name or an IP address, without port"
                ) from None
            name = x509.DNSName(host.lower())
        if name not in names:
            names.append(name)
    return names


def _server_certificate(
    key: ec.EllipticCurvePrivateKey,
    authority_key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    names: Sequence[x509.GeneralName],
    days: int,
) -> tuple[bytes, int]:
    return _public_pem(
        _certificate("BLEND SuperLink", key, authority_key, authority, _until(days), names)
    )


def _certificate(
    common_name: str,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    until: datetime.datetime,
    names: Sequence[x509.GeneralName] | None,
) -> x509.Certificate:
    """A server's certificate for `names`, or without them that of a CA; RFC 5280, section 4.2."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    is_authority = names is None
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _BACKDATED)
        .not_valid_after(until)
        .add_extension(
            x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), True
        )
        .add_extension(
            x509.KeyUsage(
                digital_signature=not is_authority,
                key_cert_sign=is_authority,
                crl_sign=is_authority,
                encipher_only=False,
                decipher_only=False,
                **usage,
            ),
            True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False
        )
    )
    if names is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        builder = builder.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False
        )
    return builder.sign(signer, hashes.SHA384())


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)


def _until(days: int) -> datetime.datetime:
    return _now() + datetime.timedelta(days=days)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> tuple[bytes, int]:
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return pem, _PRIVATE


def _public_pem(certificate: x509.Certificate) -> tuple[bytes, int]:
    return certificate.public_bytes(serialization.Encoding.PEM), _PUBLIC


def _texts(texts: Mapping[str, str]) -> Files:
    return {name: (text.encode(), _PUBLIC) for name, text in texts.items()}


def _load_key(path: Path, missing: str) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; {missing}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError):
        raise ConfigError(
            f"{path}: is not an unencrypted private key in PEM; restore it from a backup"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path}: is not an EC key")
    return key


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A draft that becomes `folder` when all is written, or leaves nothing; owner only (0700).

    Raises:
        ConfigError: something is in the way.
        StateError: it cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{folder}: cannot be created: {error.filename} is a file") from None
    except OSError as error:
        raise StateError(f"{folder}: cannot be created: {error.strerror}") from error
    try:
        yield draft
        try:
            os.rename(draft, folder)  # Fails on a folder that holds anything, and on a file.
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise StateError(f"{folder}: cannot be created: {error.strerror}") from error
            raise ConfigError(f"{folder} exists; nothing is overwritten: name another") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(folder: Path, files: Files) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, (content, mode) in files.items():
        write_bytes_atomic(folder / name, content, mode)
