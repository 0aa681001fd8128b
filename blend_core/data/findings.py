"""What is wrong with a site's data, collected: with the codes of docs/data.md (PROTOCOL 7.3).

Every rule appends what it finds to a list and goes on. A worker raises the first error of the
list, `blend data check` shows all of it, so both know the same rules.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from blend_core.errors import SiteError, printable

__all__ = ["Finding", "error", "has_errors", "log_warnings", "raise_first", "warning"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or odd, in one line that names the place and the fix.

    Attributes:
        code: "E01" to "E13" or "W01" to "W09"; docs/data.md says what each means. An error may have
            the code of a warning that a setting made stricter.
        level: an error keeps the site from joining, a warning does not.
        message: without the code.
    """

    code: str
    level: Literal["error", "warning"]
    message: str

    def __str__(self) -> str:
        # Folders may be called anything, even more than one line.
        return printable(f"{self.code} {self.message}")


def error(code: str, message: str) -> Finding:
    """A finding that keeps the site from joining."""
    return Finding(code, "error", message)


def warning(code: str, message: str) -> Finding:
    """A finding that does not."""
    return Finding(code, "warning", message)


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether there is an error among them; what would only follow from it is not reported."""
    return any(finding.level == "error" for finding in findings)


def raise_first(findings: Iterable[Finding]) -> None:
    """Raise the first error, if there is one.

    Raises:
        SiteError: its text begins with the code.
    """
    for finding in findings:
        if finding.level == "error":
            raise SiteError(str(finding))


def log_warnings(findings: Iterable[Finding]) -> None:
    """Write the warnings to the log."""
    for finding in findings:
        if finding.level == "warning":
            _log.warning("%s", finding)
