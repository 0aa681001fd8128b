"""Packages, ports, clock, temporary space and limits of this machine."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from blend_core.errors import RunError
from deploy.checks import CONFIGURATION, SITE, Check, Settings, failure, ok, warning
from deploy.engine import HOST, free_ports

PACKAGE = "blend-federated"
SHOWN = ("torch", "torchvision", "open_clip_torch", "flwr", "ray")
# Flower's own defaults (1.42).
DEFAULT_PORTS = {8000: "flower-superlink", 9094: "flower-supernode"}
GIB = 2**30
MIB = 2**20
# Below the first a run fails sooner or later, below the second it may.
TEMPORARY = (100 * MIB, GIB)
OPEN_FILES = (256, 1024)
# Ray keeps what actors send each other there; Docker's default is 64 MiB.
SHARED_MEMORY = GIB
# This product is younger, so an earlier clock is wrong.
YEARS = range(2025, 2100)
# Seconds over which two clocks are compared, and by which they may differ.
CLOCK_LOOK, CLOCK_STEP = 0.3, 0.1


def machine(settings: Settings) -> Iterator[Check]:
    """All checks that need neither a configuration nor torch."""
    yield from packages()
    yield ports()
    yield clock()
    yield temporary_space()
    if (check := shared_memory()) is not None:
        yield check
    yield open_files()
    yield flower_home()


def packages() -> Iterator[Check]:
    """Whether Python and all packages are those that the installed packages ask for."""
    advice = "install again, best into a new environment: pip install ."
    try:
        wanted = metadata(PACKAGE)["Requires-Python"] or ""
    except PackageNotFoundError:
        yield failure("packages", f"{PACKAGE} is not installed", advice, CONFIGURATION)
        return
    python = ".".join(map(str, sys.version_info[:3]))
    if SpecifierSet(wanted).contains(python, prereleases=True):
        yield ok("python", python)
    else:
        found = f"{python} does not fit {wanted}"
        yield failure("python", found, "install into a Python that fits", CONFIGURATION)
    problems: list[str] = []
    _misfits(PACKAGE, frozenset(), set(), problems)
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        yield failure("packages", "; ".join(problems[:3]) + more, advice, CONFIGURATION)
    else:
        yield ok("packages", ", ".join(f"{name} {version(name)}" for name in SHOWN))


def _misfits(
    name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]], problems: list[str]
) -> None:
    """Add what `name`, with extras, and the packages below it need and do not find."""
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    for text in requires(name) or ():
        wanted = Requirement(text)
        if wanted.marker and not any(wanted.marker.evaluate({"extra": e}) for e in extras or {""}):
            continue
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            problems.append(f"{name} needs {wanted.name}, which is missing")
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            problems.append(f"{name} needs {wanted.name}{wanted.specifier}, found {found}")
        _misfits(wanted.name, frozenset(wanted.extras), seen, problems)


def ports() -> Check:
    """Whether Flower's default ports and some for `blend run` are free on this machine."""
    try:
        free_ports(3)
    except RunError as error:
        return failure("ports", str(error), "end what holds so many ports", CONFIGURATION)
    taken = [f"{port} of {name}" for port, name in DEFAULT_PORTS.items() if not _is_free(port)]
    if taken:
        advice = "if it is not meant to run here, give --port (blend run chooses free ports)"
        return warning("ports", f"in use: {', '.join(taken)}", advice)
    return ok("ports", f"{' and '.join(map(str, DEFAULT_PORTS))} free, and some for blend run")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a connection that has just ended does not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def clock() -> Check:
    """Whether the wall clock is plausible and runs as the monotonic one does."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(CLOCK_LOOK)
    step = (time.time() - wall) - (time.monotonic() - steady)
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if time.gmtime().tm_year not in YEARS:
        advice = "set the clock (timedatectl); certificates are refused with a wrong one"
        return failure("clock", f"it says {now}", advice, CONFIGURATION)
    if abs(step) > CLOCK_STEP:
        advice = "let it settle, e.g. chronyc waitsync; no result depends on it"
        return warning("clock", f"it was moved by {step:+.1f} s meanwhile", advice)
    return ok("clock", now)


def temporary_space() -> Check:
    """Room in the folder for temporary files."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        advice = "make /tmp writable, or set TMPDIR to a folder that is"
        return failure("temporary files", "no folder for them is writable", advice, SITE)
    free = shutil.disk_usage(folder).free
    found, advice = f"{folder}: {size(free)} free", "make room there, or set TMPDIR"
    if free < TEMPORARY[0]:
        return failure("temporary files", found, advice, SITE)
    if free < TEMPORARY[1]:
        return warning("temporary files", found, advice)
    return ok("temporary files", found)


def shared_memory() -> Check | None:
    """Room for Ray's objects; None where the system has no such folder."""
    folder = "/dev/shm"
    if not os.path.isdir(folder):
        return None
    free = shutil.disk_usage(folder).free
    if free < SHARED_MEMORY:
        advice = "--engine simulation is slow or fails; in a container: --shm-size=2g"
        return warning("shared memory", f"{folder}: {size(free)} free", advice)
    return ok("shared memory", f"{folder}: {size(free)} free")


def open_files() -> Check:
    """How many files and connections a process may have open."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    found, advice = f"{limit} per process", f"ulimit -n {min(most, 65536)}"
    if most == resource.RLIM_INFINITY:
        advice = "ulimit -n 65536"
    if limit < OPEN_FILES[0]:
        return failure("open files", found, advice, CONFIGURATION)
    if limit < OPEN_FILES[1]:
        return warning("open files", found, advice)
    return ok("open files", found)


def flower_home() -> Check:
    """Whether Flower's own commands can write their folder."""
    home = Path(os.environ.get("FLWR_HOME") or "~/.flwr").expanduser().absolute()
    found = existing(home)
    if not found.is_dir() or not os.access(found, os.W_OK | os.X_OK):
        advice = "make it writable, or set FLWR_HOME to a folder that is"
        return failure("FLWR_HOME", f"{home}: cannot be written", advice, SITE)
    return ok("FLWR_HOME", str(home))


def existing(path: Path) -> Path:
    """The path, or the nearest of its parents that exists."""
    return next(folder for folder in (path, *path.parents) if os.path.lexists(folder))


def size(count: float) -> str:
    """Bytes for people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"
