"""What `blend doctor` checks, one module per kind; nothing here changes or starts anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from blend_core.errors import ConfigError, FormationError, SiteError

Level = Literal["ok", "warning", "failure"]

# Exit codes of failures.
CONFIGURATION = ConfigError.exit_code
SITE = SiteError.exit_code
SUPERLINK = FormationError.exit_code


@dataclass(frozen=True)
class Settings:
    """What the user gave `blend doctor`; JSON data.

    Attributes:
        config: name of a preset or a YAML file; None: quickstart.
        overrides: of its settings, key=value.
        state_dir: a site's folder of private state.
        superlink: host:port.
        root_certificates: file of the CA that signed the SuperLink's certificate.
        keys: folder of keys and certificates.
        site: a site's folder, whose images are looked at, too.
    """

    config: str | None = None
    overrides: tuple[str, ...] = ()
    state_dir: str | None = None
    superlink: str | None = None
    root_certificates: str | None = None
    keys: str | None = None
    site: str | None = None


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table.

    Attributes:
        name: what was checked.
        level: ok; warning: it works, but look at it; failure: a run will fail.
        found: what was found.
        advice: what to do; empty if ok.
        code: exit code of a failure; 0 else.
        done: False: the check begins now, and this is what to say if it never ends.
    """

    name: str
    level: Level
    found: str
    advice: str = ""
    code: int = 0
    done: bool = True


def ok(name: str, found: str) -> Check:
    """All is well."""
    return Check(name, "ok", found)


def warning(name: str, found: str, advice: str) -> Check:
    """It works, but somebody should look at it."""
    return Check(name, "warning", found, advice)


def failure(name: str, found: str, advice: str, code: int) -> Check:
    """A run will fail with exit code `code`."""
    return Check(name, "failure", found, advice, code)


def begins(name: str, doing: str, advice: str, code: int) -> Check:
    """A check that takes time begins; without an end it counts as a failure, or if `code` is 0
    as a warning."""
    return Check(name, "failure" if code else "warning", doing, advice, code, done=False)
