"""Errors that end in one clear line and an exit code.

Every error a user can cause or meet is a `BlendError`. Its text says what is wrong, where, and
what to do; `exit_code` is what the `blend` command ends with.
"""

from __future__ import annotations

import errno

# What the system says of a disk that is full.
FULL = (errno.ENOSPC, errno.EDQUOT)


class BlendError(Exception):
    """Base of all errors with a message for people. `exit_code` 1: the run failed."""

    exit_code = 1


class RunError(BlendError):
    """The run cannot go on: which client, which round, why. Exit code 1."""


class ConfigError(BlendError):
    """Wrong usage or configuration: names the key, the value and what is allowed. Exit code 2."""

    exit_code = 2


class SiteError(BlendError):
    """A site's data or private state is unusable: names the path and the fix. Exit code 3."""

    exit_code = 3


class LostStateError(SiteError):
    """A site has lost private state that the federation knows it had. Exit code 3."""


class FormationError(BlendError):
    """The federation could not be formed in time: names who is missing. Exit code 4."""

    exit_code = 4


def error_from_code(message: str, exit_code: int) -> BlendError:
    """Rebuild the error that a site reported, so that its exit code survives the wire."""
    kinds = (RunError, ConfigError, SiteError, FormationError)
    kind = next((k for k in kinds if k.exit_code == exit_code), RunError)
    return kind(message)


def described(error: BaseException) -> str:
    """An error in words: ours say everything, others need their kind."""
    return str(error) if isinstance(error, BlendError) else f"{type(error).__name__}: {error}"


def printable(text: str) -> str:
    """Text without line ends, control characters and changes of direction.

    These would change what a terminal shows beside the text itself.
    """
    return "".join(c if c.isprintable() else " " * c.isspace() for c in text)


def one_line(text: str, limit: int = 1000) -> str:
    """Text that came from elsewhere, fit for a log or a message: one line, not too long."""
    line = " ".join(printable(text).split())
    return line if len(line) <= limit else f"{line[:limit]}..."
