"""One group of checks in a process of its own, which can crash or hang without harm.

Reads `Settings` as JSON from standard input and writes every `Check` as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

from deploy.checks import Check, Settings


def main() -> None:
    """Run the group that is named on the command line."""
    given = json.load(sys.stdin)
    settings = Settings(**{**given, "overrides": tuple(given["overrides"])})
    # Libraries print what they like; our lines have a descriptor of their own.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    for check in _group(sys.argv[1])(settings):
        print(json.dumps(asdict(check)), file=lines, flush=True)


def _group(name: str) -> Callable[[Settings], Iterator[Check]]:
    # Only the group's own imports: the others must not wait for torch.
    if name == "machine":
        from deploy.checks.machine import machine

        return machine
    if name == "site":
        from deploy.checks.site import site

        return site
    if name == "superlink":
        from deploy.checks.superlink import superlink

        return superlink
    from deploy.checks.model import model

    return model


if __name__ == "__main__":
    main()
