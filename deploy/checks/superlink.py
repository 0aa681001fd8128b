"""Can the SuperLink be reached, encrypted as it should be?"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509

from deploy.certificates import host_names
from deploy.checks import (
    SUPERLINK,
    Check,
    Settings,
    begins,
    failure,
    ok,
    warning,
)
from deploy.checks.keys import root_certificates, validity
from deploy.options import split_address

NAME = "SuperLink"
# Seconds for a connection, and for each answer.
PATIENCE = 5.0
# OpenSSL's numbers of what is wrong with a certificate.
_NOT_YET, _EXPIRED, _OTHER_HOST = 9, 10, (62, 64)


def superlink(settings: Settings) -> Iterator[Check]:
    """One connection to the SuperLink, if one is named."""
    if settings.superlink is None:
        return
    host, port = split_address("--superlink", settings.superlink)
    yield begins(NAME, "connecting", "is there a firewall in between?", SUPERLINK)
    try:
        link = socket.create_connection((host, port), PATIENCE)
    except socket.gaierror:
        yield _unreachable(settings, "its name is unknown here", "check the name, or give its IP")
    except TimeoutError:
        advice = "check address and port; is there a firewall in between?"
        yield _unreachable(settings, f"no answer within {PATIENCE:.0f} s", advice)
    except OSError as error:
        advice = "is flower-superlink running, with --host 0.0.0.0 and this --port?"
        yield _unreachable(settings, str(error.strerror), advice)
    else:
        with link:
            link.settimeout(PATIENCE)
            if settings.root_certificates is None:
                yield _plain(settings, link, host, port)
            else:
                yield from _encrypted(settings, link, host, port)


def _plain(settings: Settings, link: socket.socket, host: str, port: int) -> Check:
    where = settings.superlink
    if _speaks_http(link):
        if _is_loopback(host):
            return ok(NAME, f"{where} answers, without TLS on this machine")
        advice = "fine inside a network you trust; else start it with TLS (blend keys)"
        return warning(NAME, f"{where} answers, but nothing is encrypted", advice)
    if _certificate(host, port) is not None:
        advice = "give --root-certificates, the CA's file that its operator handed over"
        return failure(NAME, f"{where} wants TLS", advice, SUPERLINK)
    return _unreachable(settings, "what listens there is no SuperLink", "check the port")


def _encrypted(settings: Settings, link: socket.socket, host: str, port: int) -> Iterator[Check]:
    where, given = settings.superlink, settings.root_certificates
    try:
        context = ssl.create_default_context(cafile=Path(given or "").expanduser())
    except (OSError, ssl.SSLError):
        # The check of this file says why.
        yield warning(NAME, f"{where} answers; not tried with TLS", "name the CA's file first")
        return
    try:
        with context.wrap_socket(link, server_hostname=host) as secure:
            certificate = x509.load_der_x509_certificate(secure.getpeercert(True) or b"")
            if not _speaks_http(secure):
                yield _unreachable(settings, "what listens there is no SuperLink", "check the port")
                return
    except ssl.SSLCertVerificationError as error:
        yield _distrusted(settings, error, _certificate(host, port))
        return
    except OSError:  # ssl.SSLError included: no handshake at all.
        advice = "start it with --ssl-certfile, --ssl-keyfile and --ssl-ca-certfile"
        yield failure(NAME, f"{where} does not speak TLS", advice, SUPERLINK)
        return
    check = validity("SuperLink's certificate", certificate)
    if check.level != "ok":
        yield check
    yield ok(NAME, f"{where} answers over TLS, its certificate is signed by {given}")


def _distrusted(
    settings: Settings, error: ssl.SSLCertVerificationError, certificate: x509.Certificate | None
) -> Check:
    """Why a certificate is refused, and what to do."""
    where, code = settings.superlink, SUPERLINK
    if error.verify_code in (_NOT_YET, _EXPIRED) and certificate is not None:
        check = validity(NAME, certificate)
        if check.level != "failure":  # Then it is the CA's time that is over.
            check = root_certificates(Path(settings.root_certificates or "").expanduser())
        return failure(NAME, f"{where}: {check.found}", check.advice, code)
    if error.verify_code in _OTHER_HOST and certificate is not None:
        names = ", ".join(host_names(certificate)) or "no host"
        advice = "use one of these names, or make a certificate with this one"
        return failure(NAME, f"{where}: its certificate is for {names}", advice, code)
    what = f"{where}: its certificate is not signed by {settings.root_certificates}"
    advice = f"ask its operator for the CA's file ({error.verify_message})"
    return failure(NAME, what, advice, code)


def _certificate(host: str, port: int) -> x509.Certificate | None:
    """The certificate that is shown there, trusted or not; None: no TLS."""
    try:
        text = ssl.get_server_certificate((host, port), timeout=PATIENCE)
        return x509.load_pem_x509_certificate(text.encode())
    except (OSError, ValueError):
        return None


def _speaks_http(link: socket.socket) -> bool:
    """Whether there is an answer in HTTP, which Flower 1.42 speaks."""
    try:
        link.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        return link.recv(5) == b"HTTP/"
    except OSError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _unreachable(settings: Settings, found: str, advice: str) -> Check:
    return failure(NAME, f"{settings.superlink}: {found}", advice, SUPERLINK)
