"""Plain PEM and OpenSSH files: are keys private, and do keys, certificates and CA fit together?

A public key's private one is looked for beside it, under its name, and where `blend keys` puts it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from deploy.certificates import SOON, host_names, is_signed
from deploy.checks import CONFIGURATION, Check, Settings, failure, ok, warning
from deploy.options import split_address

# No key is longer; what is longer is not read.
LONGEST = 1_000_000
_OPENSSH = b"BEGIN OPENSSH PRIVATE KEY"


@dataclass
class Found:
    """What a folder holds: certificates of each file, and public keys in their DER form."""

    certificates: dict[Path, list[x509.Certificate]] = field(default_factory=dict)
    private: dict[Path, bytes] = field(default_factory=dict)
    public: dict[Path, bytes] = field(default_factory=dict)


def keys(settings: Settings) -> Iterator[Check]:
    """One line per file with a key or certificate in the folder, and of the root certificates."""
    host = split_address("--superlink", settings.superlink)[0] if settings.superlink else None
    if settings.keys is not None:
        yield from key_folder(Path(settings.keys).expanduser().absolute(), host)
    if settings.root_certificates is not None:
        yield root_certificates(Path(settings.root_certificates).expanduser().absolute())


def key_folder(folder: Path, host: str | None) -> Iterator[Check]:
    """All keys and certificates below a folder; server certificates must be good for `host`."""
    if not folder.is_dir():
        yield failure("keys", f"{folder}: no such folder", "make it: blend keys", CONFIGURATION)
        return
    found, checks = Found(), []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        checks += list(_read(path, f"keys {path.relative_to(folder)}", found))
    authorities = [c for cs in found.certificates.values() for c in cs if _is_authority(c)]
    leaves = [cs[0] for cs in found.certificates.values() if not _is_authority(cs[0])]
    for path, certificates in found.certificates.items():
        name = f"keys {path.relative_to(folder)}"
        first = certificates[0]
        known = {key for at, key in found.private.items() if at.parent == path.parent}
        if not _is_authority(first):
            trouble = _leaf_trouble(first, authorities, known, host)
        elif leaves and not any(is_signed(leaf, first) for leaf in leaves):
            trouble = "has signed no certificate here", "bring back this federation's own CA"
        else:
            trouble = None
        checks.append(trouble_or_validity(name, first, trouble))
    for path, key in found.public.items():
        name = f"keys {path.relative_to(folder)}"
        own = [found.private[p] for p in _private_paths(path) if p in found.private]
        if own and key not in own:
            what = "does not belong to the private key of its name"
            checks.append(failure(name, what, "make the pair again", CONFIGURATION))
        else:
            checks.append(ok(name, "public key"))
    if not checks:
        advice = "name the folder that `blend keys` made, or a site's part of it"
        checks.append(failure("keys", f"{folder}: no key or certificate", advice, CONFIGURATION))
    yield from sorted(checks, key=lambda check: check.name)


def root_certificates(path: Path) -> Check:
    """The CA certificates that the SuperLink's must be signed by."""
    name = "root certificates"
    try:
        certificates = x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        return failure(name, f"{path}: {error.strerror}", "name the CA's file", CONFIGURATION)
    except ValueError:
        advice = "name the file of the CA certificate (-----BEGIN CERTIFICATE-----)"
        return failure(name, f"{path}: holds no PEM certificate", advice, CONFIGURATION)
    # OpenSSL trusts these alone: CAs, and a server's certificate that nobody else has signed.
    roots = [c for c in certificates if _is_authority(c) or is_signed(c, c)]
    if not roots:
        what = f"{path}: holds no CA, but a {_kind(certificates[0])}"
        return failure(name, what, "name the CA's file, ca.crt", CONFIGURATION)
    renewal = "ask the server's operator for a new one"
    checks = [validity(name, certificate, renewal) for certificate in roots]
    # A bundle may hold an old CA beside its successor.
    usable = [check for check in checks if check.level != "failure"] or checks
    worst = max(usable, key=_rank)
    return replace(worst, found=f"{path}: {worst.found}")


def site_key(path: Path) -> Check:
    """The private key of a site, which flower-supernode takes in OpenSSH's format only."""
    name, found = "site's key", Found()
    for check in _read(path, name, found):
        if check.level == "failure":
            return replace(check, found=f"{path}: {check.found}")
    if path not in found.private or _OPENSSH not in path.read_bytes():
        what, advice = f"{path}: is no private key of OpenSSH", "blend keys add-site makes one"
        return failure(name, what, advice, CONFIGURATION)
    return ok(name, f"{path}: private key, readable by its owner alone")


def validity(name: str, certificate: x509.Certificate, renewal: str = "make a new one") -> Check:
    """Whether a certificate is valid by this machine's clock, and for another month.

    Args:
        name: of the check.
        certificate: any.
        renewal: what to do about one that has expired or will soon.
    """
    now = datetime.now(UTC)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    what = f"{_kind(certificate)}, valid until {end:%Y-%m-%d}"
    if end < now:
        what = f"{_kind(certificate)}, expired on {end:%Y-%m-%d}"
        return failure(name, what, f"{renewal}, or set the clock if it is ahead", CONFIGURATION)
    if begin > now:
        what = f"{_kind(certificate)}, valid only from {begin:%Y-%m-%d %H:%M} UTC"
        return failure(name, what, "set this machine's clock: it is behind", CONFIGURATION)
    if end - now < SOON:
        return warning(name, what, f"{renewal} before that day")
    return ok(name, what)


def trouble_or_validity(
    name: str, certificate: x509.Certificate, trouble: tuple[str, str] | None
) -> Check:
    """Expiry first: an expired certificate has to be made anew whatever else is wrong."""
    check = validity(name, certificate)
    if check.level == "failure" or trouble is None:
        return check
    return failure(name, f"{_kind(certificate)}, {trouble[0]}", trouble[1], CONFIGURATION)


def _leaf_trouble(
    certificate: x509.Certificate,
    authorities: list[x509.Certificate],
    private: set[bytes],
    host: str | None,
) -> tuple[str, str] | None:
    """What is wrong with a server's certificate, and what to do."""
    names = host_names(certificate)
    if _public_bytes(certificate.public_key()) not in private:
        return "no private key beside it fits", "put the key it was made with into this folder"
    if authorities and not any(is_signed(certificate, authority) for authority in authorities):
        return "not signed by a CA in this folder", "sign it with this federation's CA"
    if not names:
        return "names no host", "make one with --host NAME: the subject's name does not count"
    if host is not None and not any(_matches(name, host) for name in names):
        return f"not good for {host}", "use one of its names, or make one with this name"
    return None


def _read(path: Path, name: str, found: Found) -> Iterator[Check]:
    """Put what a file holds into `found`; say what can be said of the file alone."""
    try:
        if path.stat().st_size > LONGEST:
            return
        data = path.read_bytes()
    except OSError as error:
        yield failure(name, f"cannot be read: {error.strerror}", "fix its owner", CONFIGURATION)
        return
    broken = failure(name, "cannot be read: damaged", "make it again", CONFIGURATION)
    try:
        if b"PRIVATE KEY-----" in data:
            yield _private(path, name, data, found)
        elif b"-----BEGIN CERTIFICATE-----" in data:
            found.certificates[path] = x509.load_pem_x509_certificates(data)
        elif b"-----BEGIN PUBLIC KEY-----" in data:
            found.public[path] = _public_bytes(load_pem_public_key(data))
        elif re.match(rb"(ecdsa|ssh)-\S+ ", data):
            found.public[path] = _public_bytes(load_ssh_public_key(data))
    except (ValueError, UnsupportedAlgorithm):
        yield broken


def _private(path: Path, name: str, data: bytes, found: Found) -> Check:
    openssh = _OPENSSH in data
    try:
        key = load_ssh_private_key(data, None) if openssh else load_pem_private_key(data, None)
    except TypeError:  # The library's word for "a password is needed".
        advice = "Flower cannot ask for it: store the key without one"
        return failure(name, "private key with a passphrase", advice, CONFIGURATION)
    found.private[path] = _public_bytes(key.public_key())
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        what = f"private key that others may read (mode {mode:03o})"
        return failure(name, what, f"chmod 600 {path}", CONFIGURATION)
    if openssh and not isinstance(key, ec.EllipticCurvePrivateKey):
        advice = "flower-supernode takes elliptic-curve keys: ssh-keygen -t ecdsa -b 384"
        return failure(name, "private key of another kind", advice, CONFIGURATION)
    return ok(name, "private key, readable by its owner alone")


def _public_bytes(key: object) -> bytes:
    encoded: bytes = key.public_bytes(  # type: ignore[attr-defined]
        Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    )
    return encoded


def _private_paths(public: Path) -> tuple[Path, ...]:
    """Where the private key of a public one may lie, the last of `blend keys`."""
    site = public.parent.parent / "sites" / public.stem
    return public.with_suffix(""), public.with_suffix(".key"), site / "node.key"


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        found = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except x509.ExtensionNotFound:
        return False
    return found.value.ca


def _kind(certificate: x509.Certificate) -> str:
    if _is_authority(certificate):
        return "CA certificate"
    names = ", ".join(host_names(certificate))
    return f"certificate for {names}" if names else "certificate"


def _matches(name: str, host: str) -> bool:
    first, _, rest = host.partition(".")
    return name.lower() == host.lower() or (
        bool(first) and name.startswith("*.") and name[2:].lower() == rest.lower()
    )


def _rank(check: Check) -> int:
    return ("ok", "warning", "failure").index(check.level)
