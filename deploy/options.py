"""What several commands are given in the same way."""

from __future__ import annotations

import ipaddress
import re
from enum import StrEnum
from typing import Annotated

import typer

from blend_core.errors import ConfigError

# The partition of a run's data, in its folder and where `blend data partition` writes it.
MANIFEST = "manifest.json"


class Engine(StrEnum):
    """How the clients of a run are computed; the numbers are the same."""

    LOOP = "loop"
    SIMULATION = "simulation"
    PROCESSES = "processes"


_ADDRESS = re.compile(r"(?P<host>[^\s:/\[\]]+|\[[^\s/\[\]]+\]):(?P<port>[0-9]{1,5})")

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; may be repeated."),
]
# `deploy.cli.main` looks for it itself, since an error may come before a command has begun.
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]


def split_address(what: str, address: object) -> tuple[str, int]:
    """Host and port of "HOST:PORT"; an IPv6 address stands in brackets, which are taken off.

    Args:
        what: the option or key, for the error.
        address: its value.

    Raises:
        ConfigError: it is no such text, or the port is not from 1 to 65535.
    """
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ConfigError(f"{what}: {address!r}: must be HOST:PORT, e.g. fl.example.org:9300")
    host = found["host"].strip("[]")
    try:
        # As a certificate has it: an IPv6 address in its short form.
        host = str(ipaddress.ip_address(host))
    except ValueError:
        try:
            host.encode("idna")
        except UnicodeError as error:
            raise ConfigError(f"{what}: {address!r}: no host has this name ({error})") from None
    return host, int(found["port"])


def parse_seeds(text: str) -> list[int]:
    """The value of `--seeds`, e.g. "0,1,2"; each seed once.

    Raises:
        ConfigError: none at all, or something else than whole numbers from 0.
    """
    numbers = parse_names("--seeds", text)
    if not all(number.isdecimal() for number in numbers):
        raise ConfigError(f"--seeds {text}: expected whole numbers from 0, e.g. 0,1,2")
    return list(dict.fromkeys(map(int, numbers)))


def parse_names(option: str, text: str) -> list[str]:
    """The value of an option that is a list with commas; each name once.

    Raises:
        ConfigError: no name at all.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"{option}: empty list; name at least one, or leave the option out")
    return names
